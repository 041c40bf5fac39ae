"""Resizing pixels to a grid and cutting them into patches: the interface, and its plain form in torch."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from encoder_contract.geometry import Geometry, Grid
from encoder_service.image.bicubic import HALF, PRECISION_BITS, filter_table


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
