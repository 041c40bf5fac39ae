"""Upright pixels to patches, as the model's Hugging Face image processor makes them.

An image is resized to its grid with Pillow's antialiased bicubic filter on bytes, and cut into patches in merge order.
Patches stay uint8, because rescaling and normalisation are folded into the vision tower's first product.
docs/decisions/processor.md says which of the two Hugging Face processors this equals, and how closely.

The arithmetic is that of `precompute_coeffs`, `normalize_coeffs_8bpc` and `bicubic_filter` in Pillow's Resample.c. A
byte is the sum of bytes times weights, plus half a unit, shifted right by `PRECISION_BITS`, and clamped. These are
integers, so every order of summation on every machine gives the same bits.
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
    """An implementation of resizing and cutting, for one geometry.

    On a GPU all implementations give the same bits: those of Pillow's bicubic filter, rows before columns.
    """

    name: str

    def to_patches(self, images: Tensor, grid: Grid) -> Tensor:
        """Resize images uint8 [N, H, W, 3] to a grid; return uint8 [N, grid.patches, 3 × patch_size²].

        Patches are in merge order (the merge_size² patches of a token are neighbours), channel first inside a patch.
        """
        ...


class PlainResize:
    """torch's operators: exact on a GPU; on the CPU torch's own resize of bytes, which differs by at most a level."""

    name = "torch"

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def to_patches(self, images: Tensor, grid: Grid) -> Tensor:
        """See `Resize`."""
        if images.is_cuda:
            return exact_patches(images, grid, self._geometry)
        size, channels_first = _size(grid, self._geometry), images.permute(0, 3, 1, 2)
        resized = interpolate(channels_first, size=size, mode="bicubic", antialias=True)
        return _cut(resized, grid, self._geometry)


def exact_patches(images: Tensor, grid: Grid, geometry: Geometry) -> Tensor:
    """Return what `Resize.to_patches` returns on a GPU, on any device.

    Channels are resized one by one, which takes a third of the memory.
    """
    size = _size(grid, geometry)
    resized = torch.stack([resize_exactly(images[..., channel], size) for channel in range(3)], dim=1)
    return _cut(resized, grid, geometry)


def _size(grid: Grid, geometry: Geometry) -> tuple[int, int]:
    return grid.h * geometry.patch_size, grid.w * geometry.patch_size


def resize_exactly(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images uint8 [N, H, W] of one channel to `size` (height, width), with the bits of Pillow.

    Rows are resized first and rounded to bytes before the columns. In one pass, overshoots of the first direction,
    which Pillow clamps, would reach the second.
    """
    for axis, target in ((2, size[1]), (1, size[0])):
        images = _resize_along(images, axis, target)
    return images


def _resize_along(images: Tensor, axis: int, target: int) -> Tensor:
    table = filter_table(images.shape[axis], target, images.device)
    weights = table[1:] if axis == 2 else table[1:, :, None]
    total = images.index_select(axis, table[0]) * weights[0]
    for tap in range(1, len(weights)):
        total += images.index_select(axis, table[0] + tap) * weights[tap]
    return total.add_(HALF).bitwise_right_shift_(PRECISION_BITS).clamp_(0, 255).byte()


def _cut(images: Tensor, grid: Grid, geometry: Geometry) -> Tensor:
    """Cut images uint8 [N, 3, H, W] of the grid's size into patches; see `Resize`."""
    patch, merge = geometry.patch_size, geometry.merge_size
    blocks = images.reshape(-1, 3, grid.h // merge, merge, patch, grid.w // merge, merge, patch)
    # Copied once, as [image, token row, token column, row in token, column in token, channel, y, x].
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, grid.patches, 3 * patch * patch)


# Bounds the working memory of one call on a GPU.
_MAX_PIXELS_PER_CALL = 16_000_000

# An upper bound on the bytes of device memory that a pixel of a source takes until it is cut into patches
# (`test_patches.py`): 3 as decoded, 3 stacked with images of the same size, and 6 more in the kernels or 12 in torch's
# operators. Sides are rounded up.
RESIZED_BYTES_PER_PIXEL = 20


def to_patches(pixels: Sequence[Tensor], grids: Sequence[Grid], resize: Resize) -> list[Tensor]:
    """Return the patches of each image: uint8 [grid.patches, 3 × patch_size²], on the device of its pixels.

    `pixels` are uint8 [H, W, 3]; each image is resized to its grid. Patches are in merge order (the merge_size² patches
    of a token are neighbours), channel first inside a patch. They are the rows of the Hugging Face processor's
    `pixel_values` for one of its two equal temporal slots, before rescaling and normalisation. The other images of the
    call do not change the bits of an image's patches.

    Pixels [2, H, W, 3] are two frames of a video. Their patches are [grid.patches, 3 × 2 × patch_size²], the rows of
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


def resize_bilinear(frames: Tensor, named: Frames | None) -> Tensor:
    """Resize frames uint8 [2, H, W, 3] to the size that their name asks for before the resize to the grid, if any.

    SGLang does this with torchvision's `resize`: in float32, rounded to bytes. Channels are resized one by one, which
    takes a third of the memory.
    """
    if named is None or named.bilinear is None or tuple(frames.shape[1:3]) == named.bilinear:
        return frames
    size = named.bilinear
    channels = (
        interpolate(frames[..., channel][:, None].float(), size=size, mode="bilinear", antialias=True)
        for channel in range(3)
    )
    return torch.stack([channel[:, 0].round().byte() for channel in channels], dim=-1)


def _pair_patches(frames: Tensor, grid: Grid, resize: Resize) -> Tensor:
    """Return the patches of two frames uint8 [2, H, W, 3]: for each channel, the first frame, then the second."""
    first, second = to_patches(list(frames), [grid, grid], resize)
    slots = torch.stack([first.view(grid.patches, 3, -1), second.view(grid.patches, 3, -1)], dim=2)
    return slots.flatten(1)


def _calls(pixels: Sequence[Tensor], grids: Sequence[Grid], *, together: bool) -> Iterator[list[int]]:
    """Yield the indices of the images to process in one call: of equal size and grid if `together`, else one by one.

    On a GPU each call has a fixed cost. On the CPU each image gets its own call: torch returns a single resized image
    channel first but not a batch, and cutting patches from a channel-first image is eight times faster.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for index, (image, grid) in enumerate(zip(pixels, grids, strict=True)):
        alike[(image.shape, grid) if together else index].append(index)
    for indices in alike.values():
        height, width, _ = pixels[indices[0]].shape
        count = max(1, _MAX_PIXELS_PER_CALL // (height * width))
        yield from (indices[start : start + count] for start in range(0, len(indices), count))


def _stacked(images: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(images)) if len(images) > 1 else images[0][None]


PRECISION_BITS = 22  # of 32 bits, a byte takes 8, and sums that overshoot or are negative take 2
HALF = 1 << PRECISION_BITS - 1
_SUPPORT = 2.0  # pixels to either side; more when shrinking
_MAX_TABLE_BYTES = 32 << 20  # a side of 1280 pixels takes 26 KB, the longest possible side about 4 MB


def filter_table(size: int, target: int, device: torch.device) -> Tensor:
    """Return the table that resizes `size` pixels to `target`: int32 [1 + taps, target] on `device`. Do not modify it.

    Row 0 is the first source pixel for each target pixel, and row 1 + k the weight of the k-th pixel from there. All
    these pixels exist.
    """
    table = _table(size, target)
    if device.type == "cpu":
        return table
    # Tables are kept on the host: copying one is cheaper than waiting for another stream that made it. The copy from
    # pinned memory never waits.
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
    # Add them one after the other, as Pillow does: numpy's `sum` adds in pairs, which rounds differently.
    weights /= weights.cumsum(axis=0)[-1]
    rounded = np.trunc(weights * (1 << PRECISION_BITS) + np.copysign(0.5, weights))
    return torch.from_numpy(np.vstack((start[None], rounded)).astype(np.int32))


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Evaluate Keys' filter with a = −½; it is zero from a distance of 2 on."""
    x, a = np.abs(distance), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
