"""Preprocessing: upright pixels to patches, as the model's Hugging Face image processor makes them.

Images are resized to the grid with Pillow's antialiased bicubic filter on bytes, and cut into patches in
merge order. Patches stay uint8: rescaling and normalisation are folded into the vision tower's first product.
Which of the two Hugging Face processors this equals, and how closely, is in docs/decisions/processor.md.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from encoder_contract.geometry import Grid
from encoder_service.image.resize import Resize

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
    """
    patches: dict[int, Tensor] = {}
    for indices in _calls(pixels, grids, together=bool(pixels) and pixels[0].is_cuda):
        same = resize.to_patches(_stacked([pixels[index] for index in indices]), grids[indices[0]])
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


def _stacked(images: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(images)) if len(images) > 1 else images[0][None]
