"""Layers that the towers share: patch embedding, rotary self-attention, and the processing of a block by tiles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision.attention import Attention, Segments
from encoder_service.vision.linear import Linear
from encoder_service.vision.spec import TowerSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the packed patches of one forward pass: everything but the pixels, on the device.

    `rotary` complex64 [patches, 1, 1, head size / 2]; `position` [patches, embed] or None; `segments` one per image,
    `windows` one per window or None; `order` and `inverse` [rows] or None (see `GridTables`). `tile` is how many
    patches the products and pointwise parts take at once, 0 for all: on the CPU a tile's intermediate values then
    stay in the cache between a product and what follows it. `projected` [patches, 3, heads, head size] then gathers
    the tiles' queries, keys and values for attention, in every block anew: memory fresh from the system costs more
    than what is written to it.
    """

    rotary: Tensor
    position: Tensor | None
    segments: Segments
    windows: Segments | None
    order: Tensor | None
    inverse: Tensor | None
    attend: Attention
    rotate: "Rotation"
    tile: int = 0
    projected: Tensor | None = None

    @property
    def patches(self) -> int:
        """Packed patches."""
        return self.rotary.shape[0]

    def cut(self, packed: Tensor) -> list[Tensor]:
        """Views of `packed` [patches, ...], tile by tile; the last may be shorter."""
        return list(torch.split(packed, self.tile)) if self.tile else [packed]


class TowerModule(nn.Module):
    """The network of a family, parameters under their names in checkpoints.

    `forward` takes uint8 packs [patches, channels × patch × patch] with the layout of each and returns the rows
    [rows, width] of each. `positions` is the learned position table [side², embed], None without one.
    """

    spec: TowerSpec

    @property
    def positions(self) -> Tensor | None:
        """The learned position table."""
        return None


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
        folded.weight = _frozen(weight.flatten(1).to(dtype))
        folded.bias = _frozen(bias.to(dtype))
        self._folded = folded
        del self.proj

    def forward(self, patches: Tensor, layout: Layout, dtype: torch.dtype) -> list[Tensor]:
        """uint8 [patches, values] → embeddings with their positions, a list of tiles [patches, embed]."""
        assert self._folded is not None
        centred = [tile.to(dtype).sub_(128) for tile in layout.cut(patches)]
        if layout.position is None:
            return [self._folded(tile) for tile in centred]
        positions = layout.cut(layout.position)
        # The table is cached for other images of this grid, so it must not be modified.
        return [self._folded.plus(at.clone(), tile) for at, tile in zip(positions, centred, strict=True)]


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
        self.qkv.weight = _frozen(self.qkv.weight[order])
        self.qkv.bias = _frozen(self.qkv.bias[order])

    def pad_heads(self, head_size: int) -> None:
        """Widen every head to `head_size` with zero weights, once, for kernels that prefer it.

        It is exact, zeros add nothing. Call it after `interleave`; the rotation of the added pairs does not matter.
        """
        extra = head_size - self._head_size
        assert self.qkv.bias is not None
        weight = self.qkv.weight.view(3, self._heads, self._head_size, -1)
        bias = self.qkv.bias.view(3, self._heads, self._head_size)
        self.qkv.weight = _frozen(functional.pad(weight, (0, 0, 0, extra)).flatten(0, 2))
        self.qkv.bias = _frozen(functional.pad(bias, (0, extra)).flatten())
        columns = self.proj.weight.view(-1, self._heads, self._head_size)
        self.proj.weight = _frozen(functional.pad(columns, (0, extra)).flatten(1))
        self._head_size = head_size  # the scale stays that of the model's own head size

    def forward(
        self, hidden: Sequence[Tensor], norm: nn.Module, segments: Segments, layout: Layout
    ) -> list[Tensor]:
        """Normalise and mix tiles [patches, embed] → tiles [patches, embed], before the output projection."""
        query, key, value = self._project(hidden, norm, layout).unbind(1)
        mixed = layout.attend(query, key, value, segments, self._scale)
        return layout.cut(mixed.flatten(1))

    def _project(self, hidden: Sequence[Tensor], norm: nn.Module, layout: Layout) -> Tensor:
        """Queries, keys and values of all tiles [patches, 3, heads, head size], the first two rotated."""
        shape = (3, self._heads, self._head_size)
        packed = layout.projected
        if packed is None:
            whole: Tensor = self.qkv(norm(hidden[0])).view(-1, *shape)
            turned = whole[:, :2]
            layout.rotate(turned, layout.rotary, turned)
            return whole
        for tile, rotary, out in zip(hidden, layout.cut(layout.rotary), layout.cut(packed), strict=True):
            projected = self.qkv(norm(tile)).view(-1, *shape)
            layout.rotate(projected[:, :2], rotary, out[:, :2])
            out[:, 2] = projected[:, 2]
        return packed


# (values [patches, 2, heads, head size], rotary, out): rotate neighbouring pairs of the last dimension in float32.
Rotation = Callable[[Tensor, Tensor, Tensor], None]


def rotate(values: Tensor, rotary: Tensor, out: Tensor) -> None:
    """Rotate by one complex product; `out` may be `values`."""
    pairs = values.float().view(*values.shape[:-1], -1, 2)
    rotated = torch.view_as_complex(pairs).mul_(rotary)
    out.copy_(torch.view_as_real(rotated).flatten(-2))


def compiled_rotation() -> Rotation:
    """`rotate` in place as one kernel: without it the float32 copies cost three passes over queries and keys."""

    def rotate_in_place(values: Tensor, turns: Tensor) -> None:
        cosine, sine = turns.unbind(-1)
        pairs = values.view(*values.shape[:-1], -1, 2).float()
        first, second = pairs.unbind(-1)
        rotated = torch.stack((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
        values.copy_(rotated.flatten(-2))

    kernel = torch.compile(rotate_in_place, dynamic=True)

    def rotation(values: Tensor, rotary: Tensor, out: Tensor) -> None:
        assert out is values
        kernel(values, torch.view_as_real(rotary))

    return rotation


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
