"""Layers that the towers share: patch embedding, rotary self-attention, and the processing of a block by tiles."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision.linear import Linear, frozen
from encoder_service.vision.pointwise import Norm, Pointwise
from encoder_service.vision.residual import Residual
from encoder_service.vision.segments import Attention, Segments
from encoder_service.vision.spec import TowerSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the packed patches of one forward pass: everything but the pixels, on the device.

    `rotations` [patches, ...] as `pointwise` wants them; `position` [patches, embed] or None; `segments` one per image,
    `windows` one per window or None; `order` and `inverse` [rows] or None (see `GridTables`). `tile` is how many
    patches the products and pointwise parts take at once, 0 for all: on the CPU a tile's intermediate values then
    stay in the cache between a product and what follows it. `projected` [patches, 3, heads, head size] then gathers
    the tiles' queries, keys and values for attention, in every block anew: memory fresh from the system costs more
    than what is written to it.
    """

    rotations: Tensor
    position: Tensor | None
    segments: Segments
    windows: Segments | None
    order: Tensor | None
    inverse: Tensor | None
    attend: Attention
    pointwise: Pointwise
    tile: int = 0
    projected: Tensor | None = None

    @property
    def patches(self) -> int:
        """Packed patches."""
        return self.rotations.shape[0]

    def cut(self, packed: Tensor) -> list[Tensor]:
        """Views of `packed` [patches, ...], tile by tile; the last may be shorter."""
        return list(torch.split(packed, self.tile)) if self.tile else [packed]


class TowerModule(nn.Module):
    """The network of a family, parameters under their names in checkpoints.

    `forward` takes uint8 packs [patches, channels × patch × patch] with the layout of each and returns the rows
    [rows, width] of each; it calls `between`, a third argument, before each block. `positions` is the learned position
    table [side², embed], None without one.
    """

    spec: TowerSpec
    blocks: nn.ModuleList

    @property
    def positions(self) -> Tensor | None:
        """The learned position table."""
        return None

    def align(self, multiple: int) -> None:
        """Widen, with zeros, what lies inside the blocks' MLPs to a multiple of so many columns; it is exact."""


class PatchProjection(nn.Module):
    """The convolution over one patch, under its name in checkpoints; `PatchEmbed` uses its folded form."""

    def __init__(self, spec: TowerSpec, *, bias: bool) -> None:
        super().__init__()
        shape = (spec.embed, spec.channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(spec.embed), requires_grad=False) if bias else None


class PatchEmbed(nn.Module):
    """uint8 patches → embeddings: one product that stands for rescaling, normalising and the convolution in time.

    A still image fills every temporal slot with the same frame, so the convolution's weights are summed over time.
    A value v becomes (v·r − mean)/std = (v − 128)·r/std + (128·r − mean)/std: the first factor goes into the
    weights, the second term into the bias. Bytes centred at 128 are exact in bfloat16 (8 significant bits) and keep
    the sums small. The folding is done in float64 and rounded once.
    """

    def __init__(self, spec: TowerSpec, *, bias: bool) -> None:
        super().__init__()
        self.proj = PatchProjection(spec, bias=bias)
        self._folded: Linear | None = None

    def fold(self, processor: ProcessorSettings, dtype: torch.dtype) -> None:
        """Replace the convolution by the folded product."""
        still = self.proj.weight.double().sum(dim=2)
        mean = torch.tensor(processor.mean, dtype=torch.float64, device=still.device)
        std = torch.tensor(processor.std, dtype=torch.float64, device=still.device)
        constant = (128 * processor.rescale_factor - mean) / std
        bias = torch.einsum("echw,c->e", still, constant)
        if self.proj.bias is not None:
            bias += self.proj.bias.double()
        weight = still * (processor.rescale_factor / std)[:, None, None]
        folded = Linear(weight[0].numel(), len(weight))
        folded.weight = frozen(weight.flatten(1).to(dtype))
        folded.bias = frozen(bias.to(dtype))
        self._folded = folded
        del self.proj

    def forward(self, patches: Tensor, layout: Layout, dtype: torch.dtype) -> Residual:
        """uint8 [patches, values] → embeddings with their positions, the stream that blocks advance."""
        assert self._folded is not None
        centred = [tile.to(dtype).sub_(128) for tile in layout.cut(patches)]
        if layout.position is None:
            return Residual([self._folded(tile) for tile in centred], layout.pointwise)
        # The table is cached for other images of this grid, so it must not be modified.
        positions = [tile.clone() for tile in layout.cut(layout.position)]
        hidden = Residual(positions, layout.pointwise)
        for number, tile in enumerate(centred):
            hidden.add(number, self._folded, tile)
        return hidden


class SelfAttention(nn.Module):
    """Full attention inside each segment, with queries and keys rotated by their patch's row and column."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.qkv = Linear(spec.embed, 3 * spec.embed)
        self.proj = Linear(spec.embed, spec.embed)
        self._heads = spec.heads
        self._head_size = spec.head_size
        self._scale = spec.head_size**-0.5

    def interleave(self) -> None:
        """Reorder queries and keys so that the two values of a rotated pair are neighbours.

        It is exact: their products are sums over a head's values, in whatever order.
        """
        pairs = torch.arange(self._head_size).view(2, -1).t().flatten()
        head = torch.arange(2 * self._heads)[:, None] * self._head_size + pairs
        values = torch.arange(head.numel(), self.qkv.weight.shape[0])
        order = torch.cat([head.flatten(), values]).to(self.qkv.weight.device)
        assert self.qkv.bias is not None
        self.qkv.weight = frozen(self.qkv.weight[order])
        self.qkv.bias = frozen(self.qkv.bias[order])

    def pad_heads(self, head_size: int) -> None:
        """Widen every head to `head_size` with zero weights, once, for kernels that prefer it.

        It is exact, zeros add nothing. Call it after `interleave`; the rotation of the added pairs does not matter.
        """
        extra = head_size - self._head_size
        assert self.qkv.bias is not None
        weight = self.qkv.weight.view(3, self._heads, self._head_size, -1)
        bias = self.qkv.bias.view(3, self._heads, self._head_size)
        self.qkv.weight = frozen(functional.pad(weight, (0, 0, 0, extra)).flatten(0, 2))
        self.qkv.bias = frozen(functional.pad(bias, (0, extra)).flatten())
        columns = self.proj.weight.view(-1, self._heads, self._head_size)
        self.proj.weight = frozen(functional.pad(columns, (0, extra)).flatten(1))
        self._head_size = head_size  # the scale stays that of the model's own head size

    def forward(self, hidden: Residual, norm: Norm, segments: Segments, layout: Layout) -> list[Tensor]:
        """Normalise and mix the stream → tiles [patches, embed], before the output projection."""
        query, key, value = self._project(hidden, norm, layout).unbind(1)
        mixed = layout.attend(query, key, value, segments, self._scale)
        return layout.cut(mixed.flatten(1))

    def _project(self, hidden: Residual, norm: Norm, layout: Layout) -> Tensor:
        """Queries, keys and values of all tiles [patches, 3, heads, head size], the first two rotated."""
        shape = (3, self._heads, self._head_size)
        packed, rotate = layout.projected, layout.pointwise.rotate
        if packed is None:
            whole: Tensor = self.qkv(hidden.normed(0, norm)).view(-1, *shape)
            turned = whole[:, :2]
            rotate(turned, layout.rotations, turned)
            return whole
        tiles = zip(layout.cut(layout.rotations), layout.cut(packed), strict=True)
        for number, (rotations, out) in enumerate(tiles):
            projected = self.qkv(hidden.normed(number, norm)).view(-1, *shape)
            rotate(projected[:, :2], rotations, out[:, :2])
            out[:, 2] = projected[:, 2]
        return packed
