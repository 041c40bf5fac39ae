"""Preprocessing: upright pixels to patches, as the model's Hugging Face image processor makes them.

Images are resized to the grid with Pillow's antialiased bicubic filter on bytes, and cut into patches in
merge order. Patches stay uint8: rescaling and normalisation are folded into the vision tower's first product.
Which of the two Hugging Face processors this equals, and how closely, is in docs/decisions/processor.md.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from encoder_contract.geometry import Geometry, Grid

# Bounds the float32 working memory of a call on a GPU: 12 bytes per pixel, before and after each pass.
_MAX_PIXELS_PER_CALL = 16_000_000


def to_patches(pixels: Sequence[Tensor], grids: Sequence[Grid], geometry: Geometry) -> list[Tensor]:
    """Return, for each image, its patches: uint8 [grid.patches, 3 × patch_size²], on the device of its pixels.

    `pixels` are uint8 [H, W, 3]; `grids` say what each is resized to. Patches come in merge order (the
    merge_size² patches of a token are neighbours), channel first inside a patch: the rows of the Hugging Face
    processor's `pixel_values` for one of its two equal temporal slots, before rescaling and normalisation. An
    image's patches have the same bits whatever else is in the call.
    """
    patches: dict[int, Tensor] = {}
    for indices in _calls(pixels, grids, together=bool(pixels) and pixels[0].is_cuda):
        same = _patches_of([pixels[index] for index in indices], grids[indices[0]], geometry)
        patches |= zip(indices, same, strict=True)
    return [patches[index] for index in range(len(pixels))]


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


def _patches_of(images: Sequence[Tensor], grid: Grid, geometry: Geometry) -> Tensor:
    """Return [N, patches, 3 × patch_size²] of images [H, W, 3] that are equal in size."""
    stored = torch.stack(tuple(images)) if len(images) > 1 else images[0][None]
    size = (grid.h * geometry.patch_size, grid.w * geometry.patch_size)
    resized = _resized(stored.permute(0, 3, 1, 2), size)
    patch, merge = geometry.patch_size, geometry.merge_size
    blocks = resized.reshape(-1, 3, grid.h // merge, merge, patch, grid.w // merge, merge, patch)
    # The only copy: [image, token row, token column, row in token, column in token, channel, y, x].
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, grid.patches, 3 * patch * patch)


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 [N, 3, H, W] resized to `size` (height, width) by Pillow's bicubic filter."""
    if images.is_cuda:
        return _resized_in_float(images, size)
    return interpolate(images, size=size, mode="bicubic", antialias=True)


def _resized_in_float(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize rows, then columns, rounding to bytes after each as Pillow does.

    In one pass, overshoots of the first direction that Pillow clamps would reach the second: up to 24 levels
    of 255 off at hard edges.
    """
    for target in ((images.shape[2], size[1]), size):
        images = (
            interpolate(images.float(), size=target, mode="bicubic", antialias=True).round_().clamp_(0, 255)
        )
    return images.byte()
