"""Layers that the towers share: patch embedding, linear layers, rotary self-attention, and the tiled residual stream.

A linear layer is torch's, or uses weights that were packed once for the CPU's matrix unit. `Segments` are the images or
windows in packed rows, and `Attention` is the interface of attention over them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_contract.processor import ProcessorSettings
from encoder_contract.tower_spec import TowerSpec
from encoder_service.vision.pointwise import Norm, Pointwise


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive segments of packed rows; a row attends only to rows of its segment.

    `lengths` are on the host, in rows. `bounds` is their running sum from 0 on the device, int32 [len(lengths) + 1].
    `longest` bounds every length. A replayed CUDA graph reads only `bounds`.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Return segments of these lengths, which have at least one row."""
        return cls(tuple(lengths), to_device(running_bounds(lengths), device), max(lengths))


def running_bounds(lengths: Sequence[int]) -> Tensor:
    """Return the running sum of `lengths` from 0, int32 [len(lengths) + 1] on the host."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to `device` without waiting for the device."""
    return pinned_for(tensor, device).to(device, non_blocking=True)


def pinned_for(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host in pinned memory if `device` is a GPU: only a copy from there never waits."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


class Attention(Protocol):
    """An attention backend. It never mixes segments, synchronises host and device, or modifies its inputs."""

    name: str
    graphs: bool  # whether it reads the bounds on the device, so that a CUDA graph can be replayed with other bounds
    persistent: bool  # whether a call launches one program for each processor, whatever its segments are

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        between: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """[rows, heads, head size] each (strided views are fine) → [rows, heads, head size], contiguous.

        On the CPU, `between` is called between the parts of a long segment.
        """
        ...


class Linear(nn.Module):
    """`x @ weight.T + bias`, with an activation or the addition to the residual as its epilogue.

    On the CPU, `pack` reorders the weights once into the blocks that oneDNN's product reads, through the operator that
    torch.compile emits. That saves the reordering at every call, and the epilogue works on the float32 sums before they
    are rounded. In float32, torch's own product is MKL's, which does not use AVX-512 on AMD's processors: oneDNN's is
    2.3 times as fast there.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = frozen(torch.empty(outputs, inputs))
        self.bias = frozen(torch.empty(outputs)) if bias else None
        self._packed: Tensor | None = None

    def widen_outputs(self, extra: int) -> None:
        """Add `extra` outputs that are always zero."""
        self.weight = frozen(functional.pad(self.weight, (0, 0, 0, extra)))
        if self.bias is not None:
            self.bias = frozen(functional.pad(self.bias, (0, extra)))

    def widen_inputs(self, extra: int) -> None:
        """Add `extra` inputs with zero weights."""
        self.weight = frozen(functional.pad(self.weight, (0, extra)))

    def pack(self, rows: int) -> None:
        """Reorder the weights for products of about `rows` rows where the CPU supports it, and drop the plain ones."""
        dtype = self.weight.dtype
        if self.weight.device.type == "cpu" and packing_available(dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, rows)
            self.weight = frozen(torch.empty(0, dtype=dtype))

    @property
    def adds(self) -> bool:
        """Whether `plus` adds in the product's epilogue rather than in a separate pass."""
        return self._packed is not None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, inputs] → [rows, outputs]."""
        if self._packed is not None:
            return self._packed_product(x, "none", "")
        return functional.linear(x, self.weight, self.bias)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """Return the tanh GELU of the product."""
        if self._packed is not None:
            return self._packed_product(x, "gelu", "tanh")
        if x.is_cuda and x.dtype is not torch.float32 and self.bias is not None:
            # cuBLASLt's GELU epilogue is the tanh form. Without cuBLASLt torch falls back to product + gelu_("tanh").
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return functional.gelu(self(x), approximate="tanh")

    def gelu_erf(self, x: Tensor, pointwise: Pointwise) -> Tensor:
        """Return the erf GELU of the product. On CUDA no product has it as its epilogue."""
        if self._packed is not None:
            return self._packed_product(x, "gelu", "none")
        return pointwise.gelu_erf(self(x))

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` [rows, outputs] + the product; this may overwrite `residual`."""
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
    """Return the values as a parameter without gradients."""
    return nn.Parameter(values, requires_grad=False)


def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the packed product, and this CPU has the instructions for the type."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class Residual:
    """The residual stream, in tiles. Layers add their products to it and take its norm.

    If a product cannot be added in its epilogue, the next norm adds it, in one pass over both.
    """

    def __init__(self, tiles: Sequence[Tensor], pointwise: Pointwise) -> None:
        """`tiles` [patches, embed] are modified in place."""
        self._tiles = list(tiles)
        self._pending: list[Tensor | None] = [None] * len(self._tiles)
        self._pointwise = pointwise

    def __len__(self) -> int:
        return len(self._tiles)

    def add(self, number: int, product: Linear, x: Tensor) -> None:
        """Add the product of `x` to a tile; `normed` must have been called since the last addition."""
        assert self._pending[number] is None
        if product.adds:
            self._tiles[number] = product.plus(self._tiles[number], x)
        else:
            self._pending[number] = product(x)

    def normed(self, number: int, norm: Norm) -> Tensor:
        """Return the norm of a tile."""
        delta, self._pending[number] = self._pending[number], None
        return self._pointwise.add_norm(self._tiles[number], delta, norm)

    def whole(self) -> Tensor:
        """Return the stream [patches, embed]."""
        for number, delta in enumerate(self._pending):
            if delta is not None:
                self._tiles[number].add_(delta)
                self._pending[number] = None
        return self._tiles[0] if len(self._tiles) == 1 else torch.cat(self._tiles)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The layout of the packed patches of one forward: everything but the pixels, on the device.

    `rotations` [patches, ...] are those of `pointwise`; `position` is [patches, embed] or None. `segments` has one
    segment per image, `windows` one per window or is None. `order` and `inverse` are [rows] or None (see `GridTables`).

    `tile` is how many patches the products and pointwise operations process at a time, 0 for all: on the CPU a tile's
    intermediate values then stay in the cache between a product and the next operation. If there are tiles, `projected`
    [patches, 3, heads, head size] collects their queries, keys and values for attention. All blocks reuse it, because
    fresh memory from the system costs more than the writes.
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
        """The number of packed patches."""
        return self.rotations.shape[0]

    def cut(self, packed: Tensor) -> list[Tensor]:
        """Return views of `packed` [patches, ...], one per tile; the last may be shorter."""
        return list(torch.split(packed, self.tile)) if self.tile else [packed]


class PatchProjection(nn.Module):
    """The convolution over one patch, under its name in checkpoints. `PatchEmbed` replaces it by folded products."""

    def __init__(self, spec: TowerSpec, *, bias: bool) -> None:
        super().__init__()
        shape = (spec.embed, spec.channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(spec.embed), requires_grad=False) if bias else None


class PatchEmbed(nn.Module):
    """uint8 patches → embeddings: one product replaces rescaling, normalising and the convolution over time.

    A still image fills every temporal slot with the same frame, so the convolution's weights are summed over time. Two
    frames of a video use the product with all weights, over patches twice as wide; its sums are rounded differently.
    A value v becomes (v·r − mean)/std = (v − 128)·r/std + (128·r − mean)/std: the first factor is folded into the
    weights, the second term into the bias. Bytes centred at 128 are exact in bfloat16 (8 significant bits) and keep the
    sums small. The folding is done in float64 and rounded once.
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

    def forward(self, patches: Tensor, layout: PackedBatch, dtype: torch.dtype) -> Residual:
        """uint8 [patches, values], or [patches, 2 × values] of two frames → embeddings plus positions, as a stream."""
        product = self._still if patches.shape[1] == self._still_values else self._pair
        assert product is not None
        centred = [tile.to(dtype).sub_(128) for tile in layout.cut(patches)]
        if layout.position is None:
            return Residual([product(tile) for tile in centred], layout.pointwise)
        # The cached table is shared with other images of this grid: do not modify it.
        positions = [tile.clone() for tile in layout.cut(layout.position)]
        hidden = Residual(positions, layout.pointwise)
        for number, tile in enumerate(centred):
            hidden.add(number, product, tile)
        return hidden


class SelfAttention(nn.Module):
    """Full attention within each segment. Queries and keys are rotated by the row and column of their patch.

    Their bias is added with the rotation, in float32. In trained towers it is the larger part of many keys: products
    that are rounded before it is added lose less.
    """

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.qkv = Linear(spec.embed, 3 * spec.embed)
        self.proj = Linear(spec.embed, spec.embed)
        self._heads = spec.heads
        self._head_size = spec.head_size
        self._scale = spec.head_size**-0.5
        self._bias = torch.empty(0)  # of queries and keys, float32 [2, heads, head size]

    def interleave(self) -> None:
        """Reorder queries and keys so that the two values of a rotated pair are neighbours.

        Exact, because their products sum over a head's values and both get the same order.
        """
        pairs = torch.arange(self._head_size).view(2, -1).t().flatten()
        head = torch.arange(2 * self._heads)[:, None] * self._head_size + pairs
        values = torch.arange(head.numel(), self.qkv.weight.shape[0])
        order = torch.cat([head.flatten(), values]).to(self.qkv.weight.device)
        assert self.qkv.bias is not None
        self.qkv.weight = frozen(self.qkv.weight[order])
        self.qkv.bias = frozen(self.qkv.bias[order])

    def split_bias(self) -> None:
        """Move the bias of queries and keys from the product to the rotation."""
        assert self.qkv.bias is not None
        bias = self.qkv.bias.view(3, self._heads, self._head_size)
        self._bias = bias[:2].float().clone()
        self.qkv.bias = frozen(torch.cat([torch.zeros_like(bias[:2]), bias[2:]]).flatten())

    def forward(
        self,
        hidden: Residual,
        norm: Norm,
        segments: Segments,
        layout: PackedBatch,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Return the attention of the stream's norm, as tiles [patches, embed], before the output projection.

        `between` is called before each tile, and between the parts of the attention.
        """
        query, key, value = self._project(hidden, norm, layout, between).unbind(1)
        mixed = layout.attend(query, key, value, segments, self._scale, between)
        return layout.cut(mixed.flatten(1))

    def _project(
        self, hidden: Residual, norm: Norm, layout: PackedBatch, between: Callable[[], None]
    ) -> Tensor:
        """Return queries, keys and values of all tiles [patches, 3, heads, head size], the first two rotated."""
        shape = (3, self._heads, self._head_size)
        packed, rotate = layout.projected, layout.pointwise.rotate
        if packed is None:
            between()
            whole: Tensor = self.qkv(hidden.normed(0, norm)).view(-1, *shape)
            queries_and_keys = whole[:, :2]
            rotate(queries_and_keys, self._bias, layout.rotations, queries_and_keys)
            return whole
        tiles = zip(layout.cut(layout.rotations), layout.cut(packed), strict=True)
        for number, (rotations, out) in enumerate(tiles):
            between()
            projected = self.qkv(hidden.normed(number, norm)).view(-1, *shape)
            rotate(projected[:, :2], self._bias, rotations, out[:, :2])
            out[:, 2] = projected[:, 2]
        return packed
