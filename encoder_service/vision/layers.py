"""Layers that the towers share: patch embedding, products, rotary self-attention, and the residual stream by tiles.

A product is torch's linear layer, or weights packed once for the CPU's matrix unit. `Segments` are the images or
windows of packed rows, and `Attention` is the interface of attention over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_contract.processor import ProcessorSettings
from encoder_contract.tower_spec import TowerSpec
from encoder_service.vision.pointwise import Norm, Pointwise, Quantised


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive segments of packed rows; rows attend only within their segment.

    `lengths` are on the host, in rows; `bounds` is their running sum from 0 on the device, int32
    [len(lengths) + 1]; `longest` bounds every length. In a replayed CUDA graph only `bounds` is read, unless the
    segments are `fixed`: one segment of all rows, whose length is the same in every replay, so that a kernel may be
    planned for it alone.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    longest: int
    fixed: bool = False

    def __post_init__(self) -> None:
        assert not self.fixed or len(self.lengths) == 1, self.lengths

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Segments of these lengths; there is at least one row."""
        return cls(tuple(lengths), running_bounds(lengths, device), max(lengths))


def running_bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The running sum of `lengths` from 0, int32 [len(lengths) + 1] on `device`."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return moved(bounds, device)


def moved(made: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that was made on the host on `device`; the host does not wait for the device."""
    if device.type == "cuda":
        # Only from pinned memory does a copy never wait.
        return made.pin_memory().to(device, non_blocking=True)
    return made


class Attention(Protocol):
    """A backend. It never mixes segments, never synchronises host and device, and does not modify its inputs."""

    name: str
    graphs: bool  # whether bounds are read on the device, so that a CUDA graph can be replayed with different ones

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        """[rows, heads, head size] each (strided views are fine) → [rows, heads, head size], contiguous."""
        ...


class Linear(nn.Module):
    """`x @ weight.T + bias` with an activation or a sum into the residual as its epilogue.

    On the CPU the weights are reordered once into the blocks that oneDNN's product reads (through the operator that
    torch.compile itself emits), which saves that reordering at every call and applies the epilogue to the float32 sums
    before they are rounded. In float32 torch's own product is MKL's, which does without AVX-512 on AMD's processors:
    oneDNN's is 2.3 times as fast there.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(outputs, inputs))
        self.bias = frozen(torch.empty(outputs)) if bias else None
        self._packed: Tensor | None = None

    def widen_outputs(self, extra: int) -> None:
        """Add outputs that are always zero."""
        self.weight = frozen(functional.pad(self.weight, (0, 0, 0, extra)))
        if self.bias is not None:
            self.bias = frozen(functional.pad(self.bias, (0, extra)))

    def widen_inputs(self, extra: int) -> None:
        """Add inputs that count for nothing."""
        self.weight = frozen(functional.pad(self.weight, (0, extra)))

    def pack(self, rows: int) -> None:
        """Reorder the weights for products of about `rows` rows where that pays; the plain ones are dropped."""
        dtype = self.weight.dtype
        if self.weight.device.type == "cpu" and packing_available(dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, rows)
            self.weight = frozen(torch.empty(0, dtype=dtype))

    @property
    def adds(self) -> bool:
        """Whether `plus` sums as the product's epilogue, and not in a pass of its own."""
        return self._packed is not None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, inputs] → [rows, outputs]."""
        if self._packed is not None:
            return self._packed_product(x, "none", "")
        return functional.linear(x, self.weight, self.bias)

    def norm_for(
        self, pointwise: Pointwise, residual: Tensor, delta: Tensor | None, norm: Norm
    ) -> Tensor | Quantised:
        """Add `delta` to `residual` in place and return the norm of the sum, as this product takes it."""
        return pointwise.add_norm(residual, delta, norm)

    def gelu_tanh_for(self, product: "Linear", x: Tensor | Quantised) -> Tensor | Quantised:
        """The GELU of another product of `x` in its tanh form, as this product takes it."""
        return product.gelu_tanh(x)

    def gelu_tanh(self, x: Tensor | Quantised) -> Tensor:
        """The product's GELU in its tanh form."""
        assert isinstance(x, Tensor)
        if self._packed is not None:
            return self._packed_product(x, "gelu", "tanh")
        if x.is_cuda and x.dtype is not torch.float32 and self.bias is not None:
            # cuBLASLt's GELU epilogue is the tanh form; torch falls back to product + gelu_("tanh") without it.
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return functional.gelu(self(x), approximate="tanh")

    def gelu_erf(self, x: Tensor, pointwise: Pointwise) -> Tensor:
        """The product's GELU by the error function, which is no product's epilogue on CUDA."""
        if self._packed is not None:
            return self._packed_product(x, "gelu", "none")
        return pointwise.gelu_erf(self(x))

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` [rows, outputs] + the product; `residual` is used up."""
        if self._packed is not None:
            operator = torch.ops.mkldnn._linear_pointwise.binary
            total: Tensor = operator(x, residual, self._packed, self.bias, "add")
            return total
        return residual.add_(self(x))

    def _packed_product(self, x: Tensor, epilogue: str, algorithm: str) -> Tensor:
        operator = torch.ops.mkldnn._linear_pointwise
        product: Tensor = operator(x, self._packed, self.bias, epilogue, [], algorithm)
        return product


def frozen(values: Tensor) -> nn.Parameter:
    """Return values as a parameter that is never trained."""
    return nn.Parameter(values, requires_grad=False)


def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the packed product, and this CPU the instructions for the type."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Residual:
    """Sums of products, whose norms the next products take.

    Where a product cannot add to the stream as its epilogue, the next norm does, in one pass over both.
    """

    def __init__(self, tiles: Sequence[Tensor], pointwise: Pointwise) -> None:
        """`tiles` [patches, embed] are used up."""
        self._tiles = list(tiles)
        self._pending: list[Tensor | None] = [None] * len(self._tiles)
        self._pointwise = pointwise

    def __len__(self) -> int:
        return len(self._tiles)

    def add(self, number: int, product: Linear, x: Tensor | Quantised) -> None:
        """Add the product of `x` to a tile whose norm was taken since it was last added to."""
        assert self._pending[number] is None
        if product.adds:
            assert isinstance(x, Tensor)
            self._tiles[number] = product.plus(self._tiles[number], x)
        else:
            self._pending[number] = product(x)

    def normed(self, number: int, norm: Norm, product: Linear) -> Tensor | Quantised:
        """Return the norm of a tile, as `product` takes it."""
        delta, self._pending[number] = self._pending[number], None
        return product.norm_for(self._pointwise, self._tiles[number], delta, norm)

    def whole(self) -> Tensor:
        """Return the stream [patches, embed]."""
        for number, delta in enumerate(self._pending):
            if delta is not None:
                self._tiles[number].add_(delta)
                self._pending[number] = None
        return self._tiles[0] if len(self._tiles) == 1 else torch.cat(self._tiles)


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


class PatchProjection(nn.Module):
    """The convolution over one patch, under its name in checkpoints; `PatchEmbed` uses its folded form."""

    def __init__(self, spec: TowerSpec, *, bias: bool) -> None:
        super().__init__()
        shape = (spec.embed, spec.channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(spec.embed), requires_grad=False) if bias else None


class PatchEmbed(nn.Module):
    """uint8 patches → embeddings: one product that stands for rescaling, normalising and the convolution in time.

    A still image fills every temporal slot with the same frame, so the convolution's weights are summed over time. Two
    frames of a video have the product of all weights, over patches twice as wide: its sums are rounded otherwise.
    A value v becomes (v·r − mean)/std = (v − 128)·r/std + (128·r − mean)/std: the first factor goes into the
    weights, the second term into the bias. Bytes centred at 128 are exact in bfloat16 (8 significant bits) and keep
    the sums small. The folding is done in float64 and rounded once.
    """

    def __init__(self, spec: TowerSpec, *, bias: bool) -> None:
        super().__init__()
        self.proj = PatchProjection(spec, bias=bias)
        self._still_values = spec.patch_values
        self._still: Linear | None = None
        self._pair: Linear | None = None

    def fold(self, processor: ProcessorSettings, dtype: torch.dtype) -> None:
        """Replace the convolution by the folded products."""
        mean = torch.tensor(processor.mean, dtype=torch.float64, device=self.proj.weight.device)
        std = torch.tensor(processor.std, dtype=torch.float64, device=self.proj.weight.device)
        constant = (128 * processor.rescale_factor - mean) / std
        whole = self.proj.weight.double()
        bias = torch.einsum("ecthw,c->e", whole, constant)
        if self.proj.bias is not None:
            bias += self.proj.bias.double()
        scaled = whole * (processor.rescale_factor / std)[:, None, None, None]
        self._still = self._product(scaled.sum(dim=2), bias, dtype)
        self._pair = self._product(scaled, bias, dtype)
        del self.proj

    @staticmethod
    def _product(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Linear:
        folded = Linear(weight[0].numel(), len(weight))
        folded.weight = frozen(weight.flatten(1).to(dtype))
        folded.bias = frozen(bias.to(dtype))
        return folded

    def forward(self, patches: Tensor, layout: Layout, dtype: torch.dtype) -> Residual:
        """uint8 [patches, values], or [patches, 2 × values] of two frames → embeddings with their positions.

        They are the stream that blocks advance.
        """
        product = self._still if patches.shape[1] == self._still_values else self._pair
        assert product is not None
        centred = [tile.to(dtype).sub_(128) for tile in layout.cut(patches)]
        if layout.position is None:
            return Residual([product(tile) for tile in centred], layout.pointwise)
        # The table is cached for other images of this grid, so it must not be modified.
        positions = [tile.clone() for tile in layout.cut(layout.position)]
        hidden = Residual(positions, layout.pointwise)
        for number, tile in enumerate(centred):
            hidden.add(number, product, tile)
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
            whole: Tensor = self.qkv(hidden.normed(0, norm, self.qkv)).view(-1, *shape)
            turned = whole[:, :2]
            rotate(turned, layout.rotations, turned)
            return whole
        tiles = zip(layout.cut(layout.rotations), layout.cut(packed), strict=True)
        for number, (rotations, out) in enumerate(tiles):
            projected = self.qkv(hidden.normed(number, norm, self.qkv)).view(-1, *shape)
            rotate(projected[:, :2], rotations, out[:, :2])
            out[:, 2] = projected[:, 2]
        return packed
