"""Floating-point operations of one image in a vision tower, and the memory that a forward takes."""

import torch

from encoder_contract.geometry import Grid
from encoder_contract.tower_spec import TowerSpec


def flops(spec: TowerSpec, grid: Grid) -> int:
    """Multiplications and additions (2 per pair) of the products and the attention of one image.

    Counted as the model needs them: the patch convolution once (a still image, summed over time), attention inside
    windows where the model has windows, no padding, and nothing for the pointwise remainder.
    """
    patches, rows = grid.patches, grid.patches // spec.merge_unit
    embed = 2 * patches * spec.patch_values * spec.embed
    products = 2 * patches * spec.embed * (4 * spec.embed + spec.mlp_products * spec.intermediate)
    merged = spec.embed * spec.merge_unit
    mergers = 2 * rows * merged * (merged + spec.hidden) * (1 + spec.levels)
    return embed + spec.depth * products + mergers + _attention(spec, grid)


def activation_values(spec: TowerSpec) -> int:
    """Return the most values per patch that a forward holds at a time, as an upper bound.

    The residual, its norm, packed query, key and value, what attention makes of them, the MLP's inside (twice when it
    is gated), the rows of every level, and a merger's input and inside.
    """
    inside = (spec.mlp_products - 1) * spec.intermediate
    return 7 * spec.embed + inside + spec.width // spec.merge_unit + 2 * spec.embed


def batch_bytes(spec: TowerSpec, dtype: torch.dtype) -> int:
    """Return the bytes per patch that a batch takes outside of its forward: its patches before, its rows after.

    Its patches are at most those of two frames.
    """
    return spec.temporal_patch_size * spec.patch_values + -(-spec.width * dtype.itemsize // spec.merge_unit)


def _attention(spec: TowerSpec, grid: Grid) -> int:
    """Two products (scores, mixing) of each pair of patches that see each other, over all heads and blocks."""
    per_pair = 2 * 2 * spec.embed
    frame = grid.h * grid.w
    whole = per_pair * grid.t * frame**2
    if not spec.window:
        return spec.depth * whole
    blocks = len([number for number in spec.full_attention if number < spec.depth])
    windowed = per_pair * grid.t * _square_sum(grid.h, spec.window) * _square_sum(grid.w, spec.window)
    return blocks * whole + (spec.depth - blocks) * windowed


def _square_sum(length: int, window: int) -> int:
    """The sum of squares of the pieces into which `length` is cut."""
    return (length // window) * window**2 + (length % window) ** 2
