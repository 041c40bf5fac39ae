"""Upright pixels to patches, as the model's Hugging Face image processor makes them.

Images are resized to the grid with Pillow's antialiased bicubic filter on bytes, and cut into patches in merge order.
Patches stay uint8: rescaling and normalisation are folded into the vision tower's first product. Which of the two
Hugging Face processors this equals, and how closely, is in docs/decisions/processor.md.

The arithmetic is that of `precompute_coeffs`, `normalize_coeffs_8bpc` and `bicubic_filter` in Pillow's Resample.c. A
byte is the sum of bytes times weights, half a unit added, shifted right by `PRECISION_BITS` and clamped: integers, so
any order of any machine gives the same bits.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from cachetools import LRUCache, cached
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from encoder_contract.geometry import Geometry, Grid
from encoder_contract.video import Frames


class Resize(Protocol):
    """An implementation, for the patches of one geometry.

    On a GPU all give the same bits: those of Pillow's bicubic filter, rows before columns.
    """

    name: str

    def to_patches(self, images: Tensor, grid: Grid) -> Tensor:
        """Resize images uint8 [N, H, W, 3] to a grid; return uint8 [N, grid.patches, 3 × patch_size²].

        Patches come in merge order (the merge_size² patches of a token are neighbours), channel first inside a patch.
        """
        ...


class PlainResize:
    """torch's operators: on a GPU exact, on the CPU torch's own resize of bytes, which is within a level of that."""

    name = "torch"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def to_patches(self, images: Tensor, grid: Grid) -> Tensor:
        """See `Resize`."""
        if images.is_cuda:
            return exact_patches(images, grid, self._geometry)
        size, channels_first = _size(grid, self._geometry), images.permute(0, 3, 1, 2)
        made = interpolate(channels_first, size=size, mode="bicubic", antialias=True)
        return _in_patches(made, grid, self._geometry)


def exact_patches(images: Tensor, grid: Grid, geometry: Geometry) -> Tensor:
    """What `Resize.to_patches` gives on a GPU, on any device: a channel at a time, for a third of the memory."""
    size = _size(grid, geometry)
    return _in_patches(
        torch.stack([resized(images[..., channel], size) for channel in range(3)], dim=1), grid, geometry
    )


def _size(grid: Grid, geometry: Geometry) -> tuple[int, int]:
    return grid.h * geometry.patch_size, grid.w * geometry.patch_size


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images uint8 [N, H, W], of one channel, resized to `size` (height, width), with the bits of Pillow.

    Rows first, rounded to bytes before the columns: in one pass, overshoots of the first direction that Pillow
    clamps would reach the second.
    """
    for axis, target in ((2, size[1]), (1, size[0])):
        images = _resized_along(images, axis, target)
    return images


def _resized_along(images: Tensor, axis: int, target: int) -> Tensor:
    table = filter_table(images.shape[axis], target, images.device)
    weights = table[1:] if axis == 2 else table[1:, :, None]
    total = images.index_select(axis, table[0]) * weights[0]
    for tap in range(1, len(weights)):
        total += images.index_select(axis, table[0] + tap) * weights[tap]
    return total.add_(HALF).bitwise_right_shift_(PRECISION_BITS).clamp_(0, 255).byte()


def _in_patches(images: Tensor, grid: Grid, geometry: Geometry) -> Tensor:
    """Return images uint8 [N, 3, H, W] of a grid's size as patches; see `Resize`."""
    patch, merge = geometry.patch_size, geometry.merge_size
    blocks = images.reshape(-1, 3, grid.h // merge, merge, patch, grid.w // merge, merge, patch)
    # The only copy: [image, token row, token column, row in token, column in token, channel, y, x].
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, grid.patches, 3 * patch * patch)


# Bounds the working memory of a call on a GPU.
_MAX_PIXELS_PER_CALL = 16_000_000

# The most device memory that a source's pixel takes until it is patches, bytes: twice 3 as it was decoded and beside
# others of its size, and 6 more in the kernels, 12 in the plain form; sides are rounded up (`test_patches.py`).
RESIZED_BYTES_PER_PIXEL = 20


def to_patches(pixels: Sequence[Tensor], grids: Sequence[Grid], resize: Resize) -> list[Tensor]:
    """Return, for each image, its patches: uint8 [grid.patches, 3 × patch_size²], on the device of its pixels.

    `pixels` are uint8 [H, W, 3]; `grids` say what each is resized to. Patches come in merge order (the
    merge_size² patches of a token are neighbours), channel first inside a patch: the rows of the Hugging Face
    processor's `pixel_values` for one of its two equal temporal slots, before rescaling and normalisation. An
    image's patches have the same bits whatever else is in the call.

    Pixels [2, H, W, 3] are two frames of a video: their patches are [grid.patches, 3 × 2 × patch_size²], the rows of
    `pixel_values_videos`.
    """
    if any(image.dim() == 4 for image in pixels):
        return [
            _pair_patches(image, grid, resize) if image.dim() == 4 else to_patches([image], [grid], resize)[0]
            for image, grid in zip(pixels, grids, strict=True)
        ]
    patches: dict[int, Tensor] = {}
    for indices in _calls(pixels, grids, together=bool(pixels) and pixels[0].is_cuda):
        same = resize.to_patches(_stacked([pixels[index] for index in indices]), grids[indices[0]])
        patches |= zip(indices, same, strict=True)
    return [patches[index] for index in range(len(pixels))]


def resized_first(frames: Tensor, named: Frames | None) -> Tensor:
    """Return frames uint8 [2, H, W, 3] in the size that their name says they have before they are resized to a grid.

    That is the arithmetic of torchvision's `resize`, which SGLang calls: in float32, rounded to bytes. A channel at a
    time, for a third of the memory.
    """
    if named is None or named.bilinear is None or tuple(frames.shape[1:3]) == named.bilinear:
        return frames
    size = named.bilinear
    channels = (
        interpolate(frames[..., channel][:, None].float(), size=size, mode="bilinear", antialias=True)
        for channel in range(3)
    )
    return torch.stack([made[:, 0].round().byte() for made in channels], dim=-1)


def _pair_patches(frames: Tensor, grid: Grid, resize: Resize) -> Tensor:
    """Return the patches of two frames uint8 [2, H, W, 3]: each channel of the first, then of the second."""
    first, second = to_patches(list(frames), [grid, grid], resize)
    slots = torch.stack([first.view(grid.patches, 3, -1), second.view(grid.patches, 3, -1)], dim=2)
    return slots.flatten(1)


def _calls(pixels: Sequence[Tensor], grids: Sequence[Grid], *, together: bool) -> Iterator[list[int]]:
    """Yield the indices to process in one call: equal in size and grid, or, unless `together`, single.

    A call has a fixed cost on a GPU. On the CPU each image goes alone: one image comes out of the resize channel
    first, a batch does not, and patches are cut eight times faster from the former.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for index, (image, grid) in enumerate(zip(pixels, grids, strict=True)):
        alike[(image.shape, grid) if together else index].append(index)
    for indices in alike.values():
        height, width, _ = pixels[indices[0]].shape
        most = max(1, _MAX_PIXELS_PER_CALL // (height * width))
        yield from (indices[start : start + most] for start in range(0, len(indices), most))


def _stacked(images: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(images)) if len(images) > 1 else images[0][None]


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
