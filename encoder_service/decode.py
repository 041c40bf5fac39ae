"""Decoding: image files to upright RGB pixels, with NVIDIA DALI on the CPU or the GPU, and with Pillow.

DALI takes the JPEGs, a batch at a time. Pillow takes the other formats, where DALI would drop transparency and
has no GPU path, and every JPEG that DALI refuses; without DALI it takes all. One bad image fails alone.
"""

import io
import logging
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import PIL
import torch
import torch.utils.dlpack
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.header import Header, check_limits, read_header
from encoder_contract.orientation import FIRST_SWAPPED, UPRIGHT

log = logging.getLogger(__name__)

# The readers themselves and not Image.open, which has a pixel limit of its own (ours was checked before) and
# follows the other pictures in a JPEG.
_READERS: dict[str, type[ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}
_END_OF_JPEG = b"\xff\xd9"
# Some writers pad a JPEG with a few bytes behind its end.
_JPEG_PADDING_BYTES = 64


class Decoder:
    """Decodes images into pixels on one device. Safe to call from several threads; DALI serves one at a time.

    `device` is "cpu", "gpu" (the current CUDA device) or "gpu:N": nvJPEG, through DALI. `threads` bounds the
    decoding threads. `backend` "auto" takes DALI where it is installed; naming one that is not there is a
    `ValueError`, and so is a GPU that is not there.
    `max_image_pixels` bounds the memory of one image (3 bytes a pixel, a few times that while Pillow works).
    `name` says what was chosen.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        threads: int = 4,
        backend: Literal["auto", "dali", "pillow"] = "auto",
        max_image_pixels: int = 100_000_000,
    ) -> None:
        self._max_image_pixels = max_image_pixels
        kind, _, ordinal = device.partition(":")
        if kind not in ("cpu", "gpu") or (ordinal and not ordinal.isdecimal()):
            raise ValueError(f"the decoder's device must be cpu, gpu or gpu:N, not {device!r}")
        if kind == "gpu" and int(ordinal or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"decoding on {device} needs that CUDA device; torch sees {torch.cuda.device_count()}"
            )
        self._torch_device = torch.device(device.replace("gpu", "cuda"))
        self._jpegs: _Dali | None = None
        if backend != "pillow":
            try:
                self._jpegs = _Dali(device, threads)
            except ImportError as error:
                if backend == "dali":
                    raise ValueError(f"the DALI decoder is not installed: {error}") from error
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        pillow = f"Pillow {PIL.__version__}"
        self.name = f"{self._jpegs.name}, {pillow}" if self._jpegs else pillow

    def decode(self, images: Sequence[bytes]) -> list[Tensor | EncoderError]:
        """Return, in order, the pixels of each image or the error of that image alone.

        Pixels are uint8 [H, W, 3] RGB on the decoder's device, upright (EXIF applied), transparency laid over
        white, the first frame of an animation; their memory lives as long as they do.
        """
        outcomes: list[Tensor | EncoderError | None] = [None] * len(images)
        headers: dict[int, Header] = {}
        for index, image in enumerate(images):
            try:
                headers[index] = self._header(image)
            except InvalidImageError as error:
                outcomes[index] = error
        for index, pixels in self._by_dali(images, headers).items():
            outcomes[index] = pixels
        rest = [index for index in headers if outcomes[index] is None]
        done = self._threads.map(lambda index: self._by_pillow(images[index], headers[index]), rest)
        for index, outcome in zip(rest, done, strict=True):
            outcomes[index] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """Stop the decoding threads."""
        self._threads.shutdown()

    def _header(self, image: bytes) -> Header:
        header = read_header(image)
        check_limits(header, len(image), max_image_bytes=sys.maxsize, max_image_pixels=self._max_image_pixels)
        return header

    def _by_dali(self, images: Sequence[bytes], headers: dict[int, Header]) -> dict[int, Tensor]:
        """Return the pixels of the images that DALI reads, by index."""
        if self._jpegs is None:
            return {}
        chosen = [index for index, header in headers.items() if _is_for_dali(images[index], header)]
        found: dict[int, Tensor] = {}
        # A batch fails as a whole, so one that does is tried again image by image.
        for batch in _batch_then_singles(chosen):
            if found.keys() >= set(batch):
                continue
            try:
                stored = self._jpegs.decode([images[index] for index in batch])
            except RuntimeError as error:
                log.debug("DALI refused a batch of %d: %s", len(batch), error)
                continue
            for index, pixels in zip(batch, stored, strict=True):
                header = headers[index]
                if pixels.shape == (header.height, header.width, 3):
                    found[index] = upright(pixels, header.orientation)
        return found

    def _by_pillow(self, image: bytes, header: Header) -> Tensor | EncoderError:
        if header.format == "JPEG":
            # Pillow parses EXIF when it opens a JPEG, at a cost the file decides; its word is in the header.
            image = image.replace(b"Exif\0\0", b"Past\0\0")
        try:
            with _READERS[header.format](io.BytesIO(image)) as picture:
                if picture.size != (header.width, header.height):
                    return InvalidImageError(f"damaged {header.format}: its parts differ in size")
                stored = torch.from_numpy(np.array(_rgb(picture)))
        # Pillow's readers let any kind of exception out when they stumble over damaged data.
        except Exception as error:  # noqa: BLE001
            return InvalidImageError(f"damaged or truncated {header.format}: {error}")
        return upright(stored.to(self._torch_device), header.orientation)


# Steps along rows and columns, taken before orientations 5 to 8 are transposed.
_STEPS = {1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (-1, 1), 7: (-1, -1), 8: (1, -1)}


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """Return `pixels` [H, W, 3] with an EXIF orientation applied, contiguous; what `exif_transpose` does."""
    if orientation == UPRIGHT:
        return pixels
    rows, columns = _STEPS[orientation]
    if pixels.is_cuda:
        pixels = pixels.flip([axis for axis, step in enumerate((rows, columns)) if step < 0])
        return (pixels.transpose(0, 1) if orientation >= FIRST_SWAPPED else pixels).contiguous()
    # numpy moves a pixel's three bytes as one: 1.5 ms for a 720p image, which takes torch 20 ms.
    whole = pixels.numpy().view("V3")[::rows, ::columns, 0]
    turned = np.ascontiguousarray(whole.T if orientation >= FIRST_SWAPPED else whole)
    return torch.from_numpy(turned.view(np.uint8).reshape(*turned.shape, 3))


def _is_for_dali(image: bytes, header: Header) -> bool:
    """Whether DALI may read it: a JPEG, not CMYK, and whole.

    Half an image must not get an embedding. libjpeg refuses a truncated file, a GPU decoder may fill it with
    grey; so one that does not end as a JPEG does is left to Pillow.
    """
    whole = _END_OF_JPEG in image[-_JPEG_PADDING_BYTES:]
    return header.format == "JPEG" and header.channels != 4 and whole


def _batch_then_singles(indices: list[int]) -> list[list[int]]:
    singles = [[index] for index in indices]
    return [indices, *singles] if len(indices) > 1 else singles


def _rgb(picture: Image.Image) -> Image.Image:
    """Return the picture in RGB, transparency over white, as the Hugging Face processors convert it."""
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


class _Dali:
    """JPEG decoding by DALI's dynamic mode, which unlike a DALI pipeline survives a bad image."""

    def __init__(self, device: str, threads: int) -> None:
        # Errors only on the standard error stream, where DALI would add warnings about odd images; they cannot
        # be turned off. Ordinary bad files do not get this far (see `_is_for_dali`).
        os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "1")
        import nvidia.dali as dali
        import nvidia.dali.experimental.dynamic as dynamic

        self.name = f"DALI {dali.__version__} ({device})"
        self._device = device
        self._dynamic: Any = dynamic
        self._rgb = dali.types.RGB
        with dynamic.Device(device):
            self._context = dynamic.EvalContext(num_threads=threads)
        # A context belongs to one thread at a time; DALI spreads a batch over its own threads.
        self._lock = threading.Lock()

    def decode(self, images: Sequence[bytes]) -> list[Tensor]:
        """Return uint8 [H, W, 3] as stored for each JPEG; raise RuntimeError when any of them cannot be read.

        On the CPU the tensors share one allocation, which lives until the last of them is gone.
        """
        with self._lock, self._context, self._dynamic.EvalMode.sync_full:
            batch = self._dynamic.decoders.image(
                self._dynamic.as_batch([np.frombuffer(image, np.uint8) for image in images]),
                device=self._device,
                output_type=self._rgb,
                # Smooth chroma on the GPU too: what libjpeg, and so Pillow, does.
                jpeg_fancy_upsampling=True,
                # Ours is applied instead, the one the grid was computed from.
                adjust_orientation=False,
            )
            stored = [torch.utils.dlpack.from_dlpack(sample) for sample in batch.tensors]
            if self._device == "cpu":
                return stored
            # DALI reuses GPU memory as soon as Python lets go of it, while torch's stream may yet read it: hand
            # out copies that torch owns.
            owned = [sample.clone() for sample in stored]
            torch.cuda.current_stream(owned[0].device).synchronize()
            return owned
