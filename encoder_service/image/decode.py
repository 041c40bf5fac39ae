"""Decoding: image files to upright RGB pixels, with NVIDIA DALI on the CPU or the GPU, and with Pillow.

DALI decodes JPEGs, a batch at a time. Pillow decodes the other formats, for which DALI drops transparency and
has no GPU path, and every JPEG that DALI rejects, one image at a time; without DALI it decodes everything. A bad image
fails alone.
"""

import io
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import PIL
import torch
import torch.utils.dlpack
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError, OverloadedError
from encoder_contract.header import Header, check_limits, png_chunks, read_header
from encoder_contract.orientation import FIRST_SWAPPED, UPRIGHT
from encoder_service.image.readers import READERS
from encoder_service.image.source import Source

log = logging.getLogger(__name__)

_END_OF_JPEG = b"\xff\xd9"
# Some encoders append a few bytes of padding to a JPEG.
_JPEG_PADDING_BYTES = 64
# On the CPU, no image in a batch takes a core much longer than a fifth of a second, since the others wait for it.
_MAX_BATCHED_PIXELS = 16_777_216

# The most memory that a source's pixel takes until it is resized, bytes (`test_decode_memory.py`): 3 are the
# result's; Pillow keeps 4, for a WebP 12 or more; of each channel a progressive JPEG has 2 and a JPEG 2000 some 5.
PILLOW_BYTES_PER_PIXEL, BATCHED_BYTES_PER_PIXEL = 28, 12

# Pillow's image is converted in bands of this many pixels, so that intermediate copies are small.
_BAND_PIXELS = 1 << 18
# Chunks of a PNG that determine its pixels. Pillow would also inflate every profile and text chunk.
_PNG_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT")
# Markers that make Pillow parse a JPEG's metadata, in Python, and their replacements.
_JPEG_METADATA = ((b"Exif\0\0", b"Past\0\0"), (b"Photoshop 3.0\0", b"Past here    \0"))
# Memory is short while other images are decoded.
_SHORT_RETRY_MS = 500


class Decoder:
    """Decodes images into pixels on one device. Safe to call from several threads; DALI serves one at a time.

    `device` is "cpu", "gpu" (the current CUDA device) or "gpu:N": nvJPEG, through DALI. `threads` bounds DALI's
    threads; Pillow decodes in the caller's. `backend` "auto" takes DALI where it is installed; a backend or
    GPU that is not available is a `ValueError`. `name` says what was chosen.

    `decode` does everything; callers that must not wait for the slowest image call `decode_batch` for those that
    `batches` accepts, and `decode_one` for the rest. `max_image_pixels` applies to `decode`: sources were checked.

    Pixels are uint8 [H, W, 3] RGB on the decoder's device, upright (EXIF applied), transparency laid over white, the
    first frame of an animation; their memory lives as long as they do. On CUDA they are written by the caller's
    current stream.
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
        pillow = f"Pillow {PIL.__version__}"
        self.name = f"{self._jpegs.name}, {pillow}" if self._jpegs else pillow

    def decode(self, images: Sequence[bytes]) -> list[Tensor | EncoderError]:
        """Return, in order, the pixels of each file or the error of that file alone."""
        sources = [self._source(image) for image in images]
        chosen = [source for source in sources if isinstance(source, Source) and self.batches(source)]
        batched = iter(self.decode_batch(chosen))
        outcomes: list[Tensor | EncoderError] = []
        for source in sources:
            if isinstance(source, EncoderError):
                outcomes.append(source)
            else:
                found = next(batched) if self.batches(source) else None
                outcomes.append(self.decode_one(source) if found is None else found)
        return outcomes

    def batches(self, source: Source) -> bool:
        """Whether `decode_batch` may read it: a whole JPEG that is not CMYK, and on the CPU not a huge one.

        A truncated image must not get an embedding. libjpeg rejects a truncated file, but a GPU decoder may fill it
        with grey; so a file without an end marker is left to Pillow.
        """
        header = source.header
        if self._jpegs is None or header.format != "JPEG" or header.channels == 4:
            return False
        small = self._torch_device.type != "cpu" or header.pixels <= _MAX_BATCHED_PIXELS
        return small and _END_OF_JPEG in source.data[-_JPEG_PADDING_BYTES:]

    def decode_batch(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Return the pixels of each, decoded by DALI; None for those left to `decode_one`."""
        found: list[Tensor | None] = [None] * len(sources)
        # A batch fails as a whole; it is then retried image by image.
        for batch in _batch_then_singles(len(sources)):
            if self._jpegs is None or all(found[index] is not None for index in batch):
                continue
            try:
                stored = self._jpegs.decode([sources[index].data for index in batch])
            except RuntimeError as error:
                log.debug("DALI refused a batch of %d: %s", len(batch), error)
                continue
            for index, pixels in zip(batch, stored, strict=True):
                header = sources[index].header
                if pixels.shape == (header.height, header.width, 3):
                    found[index] = upright(pixels, header.orientation)
        return found

    def decode_one(self, source: Source) -> Tensor | EncoderError:
        """Return the pixels of an image or its error, decoded by Pillow in this thread."""
        header = source.header
        try:
            data = _without_metadata(source)
            with READERS[header.format](io.BytesIO(data)) as picture:
                # Pillow turns a TIFF as it loads it; its size is mostly that of the turned one before.
                is_turned = header.format == "TIFF"
                stored = header.width, header.height
                if picture.size != stored and not (is_turned and picture.size == header.upright):
                    return InvalidImageError(f"damaged {header.format}: its parts differ in size")
                pixels = torch.from_numpy(_rgb(picture))
                if picture.size != (header.upright if is_turned else stored):
                    return InvalidImageError(f"damaged {header.format}: its parts differ in size")
            # Rotated before it is copied: later work on it runs on this stream.
            return upright(pixels, UPRIGHT if is_turned else header.orientation).to(self._torch_device)
        # Pillow's readers may raise any exception on damaged data.
        except Exception as error:
            if is_shortage(error) or not _has_room(header):
                log.warning("short of memory or files while decoding %s", header, exc_info=error)
                return OverloadedError(
                    f"decoding {header.pixels} pixels ran short of memory or files",
                    retry_after_ms=_SHORT_RETRY_MS,
                )
            return InvalidImageError(f"damaged or truncated {header.format}: {error}")

    def _source(self, image: bytes) -> Source | EncoderError:
        try:
            header = read_header(image)
            check_limits(
                header, len(image), max_image_bytes=sys.maxsize, max_image_pixels=self._max_image_pixels
            )
        except InvalidImageError as error:
            return error
        return Source(b"", image, header)


def is_shortage(error: Exception) -> bool:
    """Whether an exception means that this process lacks resources, not that the image is bad."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # System errors have an errno; Pillow's errors about files have none, except its out-of-memory error.
    return isinstance(error, OSError) and (error.errno is not None or "out of memory" in str(error))


def _has_room(header: Header) -> bool:
    """Whether the memory that decoding takes is available now: libwebp does not report why it failed."""
    try:
        np.empty(PILLOW_BYTES_PER_PIXEL * header.pixels, np.uint8)
    except MemoryError:
        return False
    return True


def _without_metadata(source: Source) -> bytes:
    """Return the file without metadata that Pillow would parse at unbounded cost; the header has what is needed."""
    data = source.data
    if source.header.format == "JPEG":
        for name, other in _JPEG_METADATA:
            data = data.replace(name, other)
    if source.header.format == "PNG":
        pieces, end = [data[:8]], 8
        for kind, begin, end_of_payload in png_chunks(data):
            end = end_of_payload + 4
            if kind in _PNG_PIXEL_CHUNKS:
                pieces.append(data[begin - 8 : end])
        return b"".join([*pieces, data[end:]])
    return data


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
    # numpy moves a pixel's three bytes at once: 1.5 ms for a 720p image; torch takes 20 ms.
    whole = pixels.numpy().view("V3")[::rows, ::columns, 0]
    turned = np.ascontiguousarray(whole.T if orientation >= FIRST_SWAPPED else whole)
    return torch.from_numpy(turned.view(np.uint8).reshape(*turned.shape, 3))


def _batch_then_singles(count: int) -> list[list[int]]:
    singles = [[index] for index in range(count)]
    return [list(range(count)), *singles] if count > 1 else singles


def _rgb(picture: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels [H, W, 3], transparency over white, as the Hugging Face processors convert them."""
    transparent = "A" in picture.getbands() or picture.info.get("transparency") is not None
    picture.load()
    width, height = picture.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = picture.crop((0, top, width, min(top + rows, height)))
        pixels[top : top + rows] = np.asarray(_over_white(band) if transparent else band.convert("RGB"))
    return pixels


def _over_white(picture: Image.Image) -> Image.Image:
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, picture).convert("RGB")


class _Dali:
    """JPEG decoding by DALI's dynamic mode, which unlike a DALI pipeline survives a bad image."""

    def __init__(self, device: str, threads: int) -> None:
        # Only errors go to standard error, not DALI's warnings about odd images; errors cannot be turned off.
        # Ordinary bad files do not get this far (see `batches`).
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
        """Return uint8 [H, W, 3] as stored for each JPEG; raises `RuntimeError` if any of them cannot be decoded.

        On the CPU the tensors share one allocation, which lives until the last of them is gone.
        """
        with self._lock, self._context, self._dynamic.EvalMode.sync_full:
            batch = self._dynamic.decoders.image(
                self._dynamic.as_batch([np.frombuffer(image, np.uint8) for image in images]),
                device=self._device,
                output_type=self._rgb,
                # Smooth chroma on the GPU too, as in libjpeg and therefore Pillow.
                jpeg_fancy_upsampling=True,
                # We apply the orientation that the grid was computed from instead.
                adjust_orientation=False,
            )
            stored = [torch.utils.dlpack.from_dlpack(sample) for sample in batch.tensors]
            if self._device == "cpu":
                return stored
            # DALI reuses GPU memory as soon as Python releases it, while torch's stream may still read it: return
            # copies that torch owns.
            owned = [sample.clone() for sample in stored]
            torch.cuda.current_stream(owned[0].device).synchronize()
            return owned
