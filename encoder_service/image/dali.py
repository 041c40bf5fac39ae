"""NVIDIA DALI's JPEG decoder: nvJPEG on a GPU. Tests run it on its CPU backend, which has the same interface."""

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from encoder_contract.orientation import FIRST_SWAPPED, UPRIGHT
from encoder_service.image.pillow import STEPS, sample_jpeg
from encoder_service.image.source import Source

log = logging.getLogger(__name__)

# Compute capabilities of GPUs that have JPEG engines: A100 and A30, H100 and H200, B200 and B300.
_WITH_JPEG_ENGINES = ((8, 0), (9, 0), (10, 0), (10, 3))
DALI_BYTES = 768 << 20
"""GPU memory that DALI's decoders keep; they pin as much host memory. An estimate of nvJPEG's buffers, not measured."""


class DaliJpegs:
    """Decodes JPEGs with DALI's dynamic mode, which unlike a DALI pipeline survives a bad image.

    The pixels are on `device`. Thread-safe: DALI decodes one batch at a time, on its own `threads` threads. Raises
    `ValueError` if DALI is not installed.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        # DALI then prints only errors to standard error, no warnings about odd images. Errors cannot be turned off;
        # `Source.is_whole_jpeg` already keeps ordinary bad files away from DALI.
        os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "1")
        try:
            import nvidia.dali as dali
            import nvidia.dali.experimental.dynamic as dynamic
        except ImportError as error:
            raise ValueError(f"the DALI decoder is not installed: {error}") from error

        place = str(device).replace("cuda", "gpu")
        self.name = f"DALI {dali.__version__} ({place})"
        self._torch_device = device
        self._device = place
        self._dynamic: Any = dynamic
        self._rgb = dali.types.RGB
        self._options = _options(device)
        with dynamic.Device(place):
            self._context = dynamic.EvalContext(num_threads=threads)
        self._lock = threading.Lock()  # one thread at a time may use the context

    def start(self, max_files: int) -> None:
        """Create the decoders for batches of up to `max_files` files, and warn if JPEG engines cannot be used.

        DALI keeps a decoder for each power of two and needs at least 0.1 s to create one. Creating them now keeps that
        time out of requests.
        """
        # The GPU's JPEG engines decode the first of these, CUDA kernels the second.
        files = cycle([sample_jpeg(progressive=progressive) for progressive in (False, True)])
        try:
            for power in range(max_files.bit_length()):
                self._decode(list(islice(files, 1 << power)))
        except RuntimeError as error:
            self._require_device()
            log.warning("%s cannot decode JPEGs here, so Pillow decodes them: %s", self.name, error)
        if self._torch_device.type == "cuda" and (
            reason := no_hardware_jpeg(torch.cuda.get_device_capability(self._torch_device))
        ):
            log.warning("%s", reason)

    def decode(self, sources: Sequence[Source]) -> list[Tensor | None]:
        """Return the upright pixels of each, uint8 [H, W, 3] on the device; None for those that DALI refuses.

        Raises `RuntimeError` if the device is lost.
        """
        found: list[Tensor | None] = [None] * len(sources)
        # A batch fails as a whole. Its images are then retried one by one.
        for batch in _batch_then_singles(len(sources)):
            if any(found[index] is None for index in batch):
                for index, pixels in zip(batch, self._try([sources[i] for i in batch]), strict=True):
                    found[index] = pixels
        return found

    def _try(self, sources: Sequence[Source]) -> Sequence[Tensor | None]:
        """Return the pixels of each image; None for all if DALI refuses the batch because of any of them."""
        try:
            stored = self._decode([source.data for source in sources])
        except RuntimeError as error:
            self._require_device()
            log.debug("DALI refused a batch of %d: %s", len(sources), error)
            return [None] * len(sources)
        return [
            upright(pixels, header.orientation) if pixels.shape == (header.height, header.width, 3) else None
            for pixels, header in zip(stored, (source.header for source in sources), strict=True)
        ]

    def _decode(self, files: Sequence[bytes]) -> list[Tensor]:
        """Return the pixels of each file, not yet upright. Raises `RuntimeError` if any file cannot be decoded."""
        with self._lock, self._context, self._dynamic.EvalMode.sync_full:
            batch = self._dynamic.decoders.image(
                self._dynamic.as_batch([np.frombuffer(file, np.uint8) for file in files]),
                device=self._device,
                output_type=self._rgb,
                # Smooth chroma upsampling, which libjpeg and therefore Pillow do too.
                jpeg_fancy_upsampling=True,
                **self._options,
                # `upright` applies the orientation that our header parser read: the grid was computed from it.
                adjust_orientation=False,
            )
            pixels = self._owned(batch.tensors)
            del batch
        # A batch and its samples form a reference cycle. Without this call the garbage collector would let hundreds
        # of megabytes of pixels accumulate.
        gc.collect(1)
        return pixels

    def _owned(self, samples: Sequence[Any]) -> list[Tensor]:
        """Return DALI's samples as tensors. On the CPU they share one allocation, which lives as long as they do."""
        stored = [torch.utils.dlpack.from_dlpack(sample) for sample in samples]
        if self._torch_device.type == "cpu":
            return stored
        # DALI reuses GPU memory as soon as Python releases it, but torch's stream may still be reading it then. So
        # return copies that torch owns.
        owned = [sample.clone() for sample in stored]
        torch.cuda.current_stream(owned[0].device).synchronize()
        return owned

    def _require_device(self) -> None:
        """Raise the `RuntimeError` of a lost GPU: then the images that DALI refused are not to blame."""
        if self._torch_device.type == "cuda":
            torch.cuda.current_stream(self._torch_device).synchronize()


def no_hardware_jpeg(capability: tuple[int, int], library: str = "libnvcuvid.so.1") -> str:
    """Return why a GPU of this compute capability cannot use its JPEG engines; empty if it can or has none."""
    if capability not in _WITH_JPEG_ENGINES:
        return ""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return (
            f"the GPU's JPEG engines cannot be used, which makes decoding slower: {error}. In a container, set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        )
    return ""


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """Return `pixels` [H, W, 3] with an EXIF orientation applied as `exif_transpose` does, contiguous."""
    if orientation == UPRIGHT:
        return pixels
    pixels = pixels.flip([axis for axis, step in enumerate(STEPS[orientation]) if step < 0])
    return (pixels.transpose(0, 1) if orientation >= FIRST_SWAPPED else pixels).contiguous()


def _batch_then_singles(count: int) -> list[list[int]]:
    singles = [[index] for index in range(count)]
    return [list(range(count)), *singles] if count > 1 else singles


def _options(device: torch.device) -> dict[str, bool | float]:
    """Return the options that differ from DALI's defaults.

    By default DALI binds its threads to cores, and every process on the host to the same ones. It also gives the GPU's
    JPEG engines only two thirds of the images that they can decode.
    """
    options: dict[str, bool | float] = {"affine": False}
    return options if device.type == "cpu" else options | {"hw_decoder_load": 1.0}
