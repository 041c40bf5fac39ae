"""The operations between the products, in plain torch: residual sum and norm, rotation, GELU."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_contract.geometry import Grid
from encoder_contract.tower_spec import TowerSpec


class Norm(nn.Module):
    """The parameters of a norm over the last dimension, `width` values: LayerNorm, or RMSNorm with `rms`."""

    def __init__(self, width: int, *, rms: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = None if rms else nn.Parameter(torch.empty(width), requires_grad=False)
        self.rms = rms
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same shape, computed in float32 and rounded once."""
        if self.rms:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Pointwise(Protocol):
    """An implementation of these operations. It equals `PlainPointwise` up to one rounding in the last place."""

    name: str

    def rotations(self, grid: Grid, spec: TowerSpec) -> Tensor:
        """Return what `rotate` needs for the patches of a grid, [patches, ...] in merge order, on the CPU."""
        ...

    def rotate(self, values: Tensor, bias: Tensor, rotations: Tensor, out: Tensor) -> None:
        """Add `bias` and rotate neighbouring pairs of the last dimension, in float32; round once.

        `values` and `out` are [patches, 2, heads, head size], the queries and keys of a packed tensor. `bias` is
        float32 [2, heads, head size]. `out` may be `values`.
        """
        ...

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add `delta` to `residual` in place, both [rows, width], and return the norm of the sum."""
        ...

    def gelu_erf(self, x: Tensor) -> Tensor:
        """Return the erf GELU of `x`; this may overwrite `x`."""
        ...


class PlainPointwise:
    """torch's own operators."""

    name = "torch"

    def rotations(self, grid: Grid, spec: TowerSpec) -> Tensor:
        """Return rotations complex64 [patches, 1, 1, head size / 2]: first for the row, then for the column.

        As in the axial rotary embedding of `transformers`, cosine and sine are computed in float32.
        """
        row, column = patch_coordinates(grid, spec.merge_size)
        frequencies = rotary_frequencies(spec)
        angle = torch.cat([axis.float()[:, None] * frequencies for axis in (row, column)], dim=1)
        return torch.complex(angle.cos(), angle.sin())[:, None, None]

    def rotate(self, values: Tensor, bias: Tensor, rotations: Tensor, out: Tensor) -> None:
        """See `Pointwise`. The rotation is one complex product."""
        pairs = values.float().add_(bias).view(*values.shape[:-1], -1, 2)
        rotated = torch.view_as_complex(pairs).mul_(rotations)
        out.copy_(torch.view_as_real(rotated).flatten(-2))

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Pointwise`."""
        normed: Tensor = norm(residual if delta is None else residual.add_(delta))
        return normed

    def gelu_erf(self, x: Tensor) -> Tensor:
        """See `Pointwise`."""
        return functional.gelu(x)


def rotary_frequencies(spec: TowerSpec) -> Tensor:
    """Return θ^(−2i/(head size/2)) for the pairs of one axis, float32 [head size / 4]."""
    half = spec.head_size // 2
    return 1.0 / (spec.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))


def patch_coordinates(
    grid: Grid, merge_size: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return row and column of each patch [patches] in merge order: the patches of one merged row are neighbours."""
    shape = (grid.h // merge_size, merge_size, grid.w // merge_size, merge_size)
    rows = torch.arange(grid.h, device=device).view(shape[0], shape[1], 1, 1).expand(shape)
    columns = torch.arange(grid.w, device=device).view(1, 1, shape[2], shape[3]).expand(shape)
    flat = [axis.transpose(1, 2).reshape(-1).repeat(grid.t) for axis in (rows, columns)]
    return flat[0], flat[1]
