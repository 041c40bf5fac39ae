"""Pillow's antialiased bicubic filter in its own integers: what each pixel of a resized row is a sum of.

The arithmetic is that of `precompute_coeffs`, `normalize_coeffs_8bpc` and `bicubic_filter` in Pillow's Resample.c.
A byte is the sum of bytes times weights, half a unit added, shifted right by `PRECISION_BITS` and clamped: integers,
so any order of any machine gives the same bits.
"""

from threading import Lock

import numpy as np
import torch
from cachetools import LRUCache, cached
from numpy.typing import NDArray
from torch import Tensor

PRECISION_BITS = 22  # what 32 leave beside a byte, and two for a sum that overshoots or is negative
HALF = 1 << PRECISION_BITS - 1
_SUPPORT = 2.0  # pixels to either side, where nothing is shrunk
_MAX_TABLE_BYTES = 32 << 20  # a side of 1280 pixels takes 26 KB, the longest of all about 4 MB


def filter_table(size: int, target: int, device: torch.device) -> Tensor:
    """Return what resizes `size` pixels to `target`: int32 [1 + taps, target] on `device`, not to be changed.

    Row 0 is the first pixel that counts for each resized one, and row 1 + k the weight of the k-th from there; all
    of them exist.
    """
    table = _table(size, target)
    if device.type == "cpu":
        return table
    # Kept on the host, for a copy is cheaper than to wait for another stream's. From pinned memory it never waits.
    return table.pin_memory().to(device, non_blocking=True)


@cached(LRUCache(_MAX_TABLE_BYTES, getsizeof=lambda table: table.nbytes), lock=Lock())
def _table(size: int, target: int) -> Tensor:
    scale = size / target
    stretch = max(scale, 1.0)
    centre = (np.arange(target) + 0.5) * scale
    first = (centre - _SUPPORT * stretch + 0.5).astype(np.int32).clip(0)
    end = (centre + _SUPPORT * stretch + 0.5).astype(np.int32).clip(max=size)
    taps = int((end - first).max())
    start = np.minimum(first, size - taps)
    place = start + np.arange(taps)[:, None]
    weights = np.where((place >= first) & (place < end), _cubic((place - centre + 0.5) * (1 / stretch)), 0.0)
    # One after the other, as Pillow adds them: numpy's own sum goes by pairs and rounds otherwise.
    weights /= weights.cumsum(axis=0)[-1]
    rounded = np.trunc(weights * (1 << PRECISION_BITS) + np.copysign(0.5, weights))
    return torch.from_numpy(np.vstack((start[None], rounded)).astype(np.int32))


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' filter with a = −½, zero from a distance of 2 on."""
    x, a = np.abs(distance), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
