"""NVIDIA DALI's JPEG decoder, on the CPU or the GPU. It needs no torch."""

import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class DaliJpegs:
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
        self._options = _options(device)
        with dynamic.Device(device):
            self._context = dynamic.EvalContext(num_threads=threads)
        # A context belongs to one thread at a time; DALI spreads a batch over its own threads.
        self._lock = threading.Lock()

    def decode(self, images: Sequence[bytes], take: Callable[[Sequence[Any]], list[T]]) -> list[T]:
        """Return what `take` makes of DALI's samples, uint8 [H, W, 3] as stored, while DALI still keeps them.

        Raises `RuntimeError` if any of the JPEGs cannot be decoded.
        """
        with self._lock, self._context, self._dynamic.EvalMode.sync_full:
            batch = self._dynamic.decoders.image(
                self._dynamic.as_batch([np.frombuffer(image, np.uint8) for image in images]),
                device=self._device,
                output_type=self._rgb,
                # Smooth chroma on the GPU too, as in libjpeg and therefore Pillow.
                jpeg_fancy_upsampling=True,
                **self._options,
                # We apply the orientation that the grid was computed from instead.
                adjust_orientation=False,
            )
            taken = take(batch.tensors)
            del batch
        # A batch and its samples are in a cycle of objects: left to itself, Python's collector would let their pixels
        # add up to hundreds of megabytes.
        gc.collect(1)
        return taken


def _options(device: str) -> dict[str, bool | float]:
    """Return what DALI's own choices are replaced by.

    It would bind its threads to cores, every process on the host to the same ones; and leave the hardware engines of a
    GPU two thirds of what they can decode.
    """
    everywhere: dict[str, bool | float] = {"affine": False}
    return everywhere if device == "cpu" else everywhere | {"hw_decoder_load": 1.0}
