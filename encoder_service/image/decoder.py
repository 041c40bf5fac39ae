"""Decoding: image files to upright RGB pixels, with NVIDIA DALI on the CPU or the GPU, and with Pillow.

DALI decodes JPEGs, a batch at a time. Pillow decodes the other formats, for which DALI drops transparency and
has no GPU path, and every JPEG that DALI rejects, one image at a time; without DALI it decodes everything. A bad image
fails alone.
"""

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal

import PIL
import torch
import torch.utils.dlpack
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.header import check_limits, read_header
from encoder_contract.orientation import FIRST_SWAPPED, UPRIGHT
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.pillow import STEPS, decode_file, turned
from encoder_service.image.source import Source

log = logging.getLogger(__name__)

_END_OF_JPEG = b"\xff\xd9"
# Some encoders append a few bytes of padding to a JPEG.
_JPEG_PADDING_BYTES = 64
# On the CPU, no image in a batch takes a core much longer than a fifth of a second, since the others wait for it.
MAX_BATCHED_PIXELS = 16_777_216
# Source pixels that are decoded at the same time, in a batch and as many one by one; one image that is larger than
# that is decoded beside them.
DECODE_PIXELS = 50_000_000

# Why a decoder process was replaced: it crashed; it used up its processor time; it did not answer in time; it ran out
# of memory; somebody killed it, as the kernel does when the machine's memory is short; its answer makes no sense.
DEATHS = ("crashed", "time", "stuck", "memory", "killed", "senseless")

# The most memory that a source's pixel takes in a batch until it is resized, bytes (`test_decode_memory.py`).
BATCHED_BYTES_PER_PIXEL = 12


class Decoder:
    """Decodes images into pixels on one device. Safe to call from several threads; DALI serves one at a time.

    `device` is "cpu", "gpu" (the current CUDA device) or "gpu:N": nvJPEG, through DALI. `threads` bounds DALI's
    threads; Pillow decodes in the caller's. `backend` "auto" takes DALI on a GPU, if it is installed, and Pillow on
    the CPU; a backend or GPU that is not available is a `ValueError`. `name` says what was chosen.

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
        self._jpegs: DaliJpegs | None = None
        if backend == "dali" or (backend == "auto" and kind == "gpu"):
            try:
                self._jpegs = DaliJpegs(device, threads)
            except ImportError as error:
                if backend == "dali":
                    raise ValueError(f"the DALI decoder is not installed: {error}") from error
        self._max_batched_pixels = MAX_BATCHED_PIXELS if kind == "cpu" else math.inf
        pillow = f"Pillow {PIL.__version__}"
        self.name = f"{self._jpegs.name}, {pillow}" if self._jpegs else pillow
        # Decoder processes that died, by reason: here there are none.
        self.deaths = dict.fromkeys(DEATHS, 0)

    @property
    def messages(self) -> int:
        """Lines that decoder processes have printed: here there are none."""
        return 0

    @property
    def _has_dali(self) -> bool:
        return self._jpegs is not None

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
        if not self._has_dali or header.format != "JPEG" or header.channels == 4:
            return False
        return (
            header.pixels <= self._max_batched_pixels and _END_OF_JPEG in source.data[-_JPEG_PADDING_BYTES:]
        )

    def decode_batch(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Return the pixels of each, decoded by DALI; None for those left to `decode_one`.

        Raises `RuntimeError` if the device is lost.
        """
        found: list[Tensor | None] = [None] * len(sources)
        # A batch fails as a whole; it is then retried image by image.
        for batch in _batch_then_singles(len(sources)):
            if self._has_dali and any(found[index] is None for index in batch):
                for index, pixels in zip(batch, self._try([sources[i] for i in batch]), strict=True):
                    found[index] = pixels
        return found

    def _try(self, sources: Sequence[Source]) -> Sequence[Tensor | None]:
        """Return the pixels of each; None for all that DALI refuses, which may be the fault of any of them."""
        assert self._jpegs is not None
        try:
            stored = self._jpegs.decode([source.data for source in sources], self._owned)
        except RuntimeError as error:
            self._require_device()
            log.debug("DALI refused a batch of %d: %s", len(sources), error)
            return [None] * len(sources)
        return [
            upright(pixels, header.orientation) if pixels.shape == (header.height, header.width, 3) else None
            for pixels, header in zip(stored, (source.header for source in sources), strict=True)
        ]

    def decode_one(self, source: Source) -> Tensor | EncoderError:
        """Return the pixels of an image or its error, decoded by Pillow in this thread.

        Raises `RuntimeError` if the device does not take them: that is not the image's fault.
        """
        pixels = decode_file(source)
        if isinstance(pixels, EncoderError):
            return pixels
        # Turned before it is copied: later work on it runs on this stream.
        return torch.from_numpy(pixels).to(self._torch_device)

    def start(self) -> None:
        """Wait until it is ready to decode."""

    def close(self) -> None:
        """End what works for it; a further use starts it again."""

    def _owned(self, samples: Sequence[Any]) -> list[Tensor]:
        """Return DALI's samples as tensors. Those on the CPU share one allocation, which lives as long as they do."""
        stored = [torch.utils.dlpack.from_dlpack(sample) for sample in samples]
        if self._torch_device.type == "cpu":
            return stored
        # DALI reuses GPU memory as soon as Python releases it, while torch's stream may still read it: return
        # copies that torch owns.
        owned = [sample.clone() for sample in stored]
        torch.cuda.current_stream(owned[0].device).synchronize()
        return owned

    def _require_device(self) -> None:
        """Raise what a lost GPU answers to every call: the images that DALI refused are then not to blame."""
        if self._torch_device.type == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()

    def _source(self, image: bytes) -> Source | EncoderError:
        try:
            header = read_header(image)
            check_limits(
                header, len(image), max_image_bytes=sys.maxsize, max_image_pixels=self._max_image_pixels
            )
        except InvalidImageError as error:
            return error
        return Source(b"", image, header)


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """Return `pixels` [H, W, 3] with an EXIF orientation applied, contiguous; what `exif_transpose` does."""
    if orientation == UPRIGHT:
        return pixels
    if not pixels.is_cuda:
        return torch.from_numpy(turned(pixels.numpy(), orientation))
    pixels = pixels.flip([axis for axis, step in enumerate(STEPS[orientation]) if step < 0])
    return (pixels.transpose(0, 1) if orientation >= FIRST_SWAPPED else pixels).contiguous()


def _batch_then_singles(count: int) -> list[list[int]]:
    singles = [[index] for index in range(count)]
    return [list(range(count)), *singles] if count > 1 else singles
