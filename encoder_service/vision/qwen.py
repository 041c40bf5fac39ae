"""The towers of Qwen3-VL (dense and mixture of experts), Qwen2.5-VL and Qwen3.5; `TOWERS` lists them.

Their dimensions are in `encoder_contract.tower_spec`. Qwen3-VL has full attention and DeepStack levels. Qwen2.5-VL has
attention inside windows, in a few blocks over the whole image. Qwen3.5 is Qwen3-VL without DeepStack levels.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_contract.tower_spec import QWEN2_5_VL, QWEN3_5, QWEN3_VL, TowerSpec
from encoder_service.vision.layers import Layout, Linear, PatchEmbed, Residual, SelfAttention, TowerModule
from encoder_service.vision.pointwise import Norm, Pointwise


class Qwen3VLMlp(nn.Module):
    """Two products with a tanh GELU between them."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.linear_fc1 = Linear(spec.embed, spec.intermediate)
        self.linear_fc2 = Linear(spec.intermediate, spec.embed)

    def add_to(self, hidden: Residual, number: int, norm: Norm) -> None:
        """Add to a tile of the stream the MLP of its norm."""
        hidden.add(number, self.linear_fc2, self.linear_fc1.gelu_tanh(hidden.normed(number, norm)))

    def align(self, multiple: int) -> None:
        """Widen the values between the products to a multiple of so many columns: the GELU of 0 is 0."""
        extra = -self.linear_fc1.weight.shape[0] % multiple
        self.linear_fc1.widen_outputs(extra)
        self.linear_fc2.widen_inputs(extra)


class Qwen3VLBlock(nn.Module):
    """One transformer block over the residual stream."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.norm1 = Norm(spec.embed)
        self.norm2 = Norm(spec.embed)
        self.attn = SelfAttention(spec)
        self.mlp = Qwen3VLMlp(spec)

    def forward(self, hidden: Residual, layout: Layout) -> None:
        """Advance the residual stream."""
        mixed = self.attn(hidden, self.norm1, layout.segments, layout)
        for number, tile in enumerate(mixed):
            hidden.add(number, self.attn.proj, tile)
            self.mlp.add_to(hidden, number, self.norm2)


class Qwen3VLMerger(nn.Module):
    """Neighbouring patches → one row of the language model's width; a DeepStack merger normalises after the merge."""

    def __init__(self, spec: TowerSpec, *, after_merge: bool) -> None:
        super().__init__()
        self._merged = spec.embed * spec.merge_unit
        self._after_merge = after_merge
        self.norm = Norm(self._merged if after_merge else spec.embed)
        self.linear_fc1 = Linear(self._merged, self._merged)
        self.linear_fc2 = Linear(self._merged, spec.hidden)

    def forward(self, hidden: Tensor, pointwise: Pointwise) -> Tensor:
        """[patches, embed] → [rows, hidden]."""
        grouped = hidden.view(-1, self._merged) if self._after_merge else hidden
        normed = pointwise.add_norm(grouped, None, self.norm).view(-1, self._merged)
        rows: Tensor = self.linear_fc2(self.linear_fc1.gelu_erf(normed, pointwise))
        return rows


class Qwen3VLTower(TowerModule):
    """uint8 patches of any images → their rows, [main | DeepStack level 0 | ...]."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbed(spec, bias=True)
        # Of values that are yet to come: to draw some, torch imports its compiler, seconds of a start.
        size = spec.position_side**2, spec.embed
        self.pos_embed = nn.Embedding(*size, _weight=torch.empty(size))
        self.blocks = nn.ModuleList(Qwen3VLBlock(spec) for _ in range(spec.depth))
        self.merger = Qwen3VLMerger(spec, after_merge=False)
        if spec.deepstack:
            self.deepstack_merger_list = nn.ModuleList(
                Qwen3VLMerger(spec, after_merge=True) for _ in spec.deepstack
            )

    @property
    def positions(self) -> Tensor:
        """The learned position table [side², embed]."""
        return self.pos_embed.weight

    def forward(
        self,
        packs: Sequence[Tensor],
        layouts: Sequence[Layout],
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """uint8 packs [patches, channels × patch × patch] → [rows, width] of each, block by block in step."""
        spec = self.spec
        dtype = self.pos_embed.weight.dtype
        streams = [self.patch_embed(*pack, dtype) for pack in zip(packs, layouts, strict=True)]
        rows = [
            torch.empty(len(pack) // spec.merge_unit, spec.width, dtype=dtype, device=pack.device)
            for pack in packs
        ]
        for number, block in enumerate(self.blocks):
            between()
            for hidden, layout in zip(streams, layouts, strict=True):
                block(hidden, layout)
            if number in spec.deepstack:
                level = spec.deepstack.index(number)
                self._merge(self.deepstack_merger_list[level], streams, layouts, rows, 1 + level)
        self._merge(self.merger, streams, layouts, rows, 0)
        return rows

    def align(self, multiple: int) -> None:
        """See `TowerModule`."""
        for part in self.modules():
            if isinstance(part, Qwen3VLMlp):
                part.align(multiple)

    def _merge(
        self,
        merger: nn.Module,
        streams: Sequence[Residual],
        layouts: Sequence[Layout],
        rows: Sequence[Tensor],
        part: int,
    ) -> None:
        columns = slice(part * self.spec.hidden, (part + 1) * self.spec.hidden)
        for hidden, layout, out in zip(streams, layouts, rows, strict=True):
            out[:, columns] = merger(hidden.whole(), layout.pointwise)


class Qwen25VLMlp(nn.Module):
    """Gated: silu(gate) × up, then down."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.embed, spec.intermediate)
        self.up_proj = Linear(spec.embed, spec.intermediate)
        self.down_proj = Linear(spec.intermediate, spec.embed)

    def add_to(self, hidden: Residual, number: int, norm: Norm) -> None:
        """Add to a tile of the stream the MLP of its norm."""
        x = hidden.normed(number, norm)
        hidden.add(number, self.down_proj, functional.silu(self.gate_proj(x)).mul_(self.up_proj(x)))

    def align(self, multiple: int) -> None:
        """Widen the gated values to a multiple of so many columns: silu(0) × 0 adds 0 to the last product."""
        extra = -self.gate_proj.weight.shape[0] % multiple
        self.gate_proj.widen_outputs(extra)
        self.up_proj.widen_outputs(extra)
        self.down_proj.widen_inputs(extra)


class Qwen25VLBlock(nn.Module):
    """One transformer block over the residual stream, whole or windowed."""

    def __init__(self, spec: TowerSpec, *, windowed: bool) -> None:
        super().__init__()
        self.norm1 = Norm(spec.embed, rms=True)
        self.norm2 = Norm(spec.embed, rms=True)
        self.attn = SelfAttention(spec)
        self.mlp = Qwen25VLMlp(spec)
        self._windowed = windowed

    def forward(self, hidden: Residual, layout: Layout) -> None:
        """Advance the residual stream."""
        segments = layout.windows if self._windowed else layout.segments
        assert segments is not None
        mixed = self.attn(hidden, self.norm1, segments, layout)
        for number, tile in enumerate(mixed):
            hidden.add(number, self.attn.proj, tile)
            self.mlp.add_to(hidden, number, self.norm2)


class Qwen25VLMerger(nn.Module):
    """Neighbouring patches → one row of the language model's width."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self._merged = spec.embed * spec.merge_unit
        self.ln_q = Norm(spec.embed, rms=True)
        # Numbered as in checkpoints: 0 and 2 are products, 1 the activation between them.
        self.mlp = nn.ModuleDict(
            {"0": Linear(self._merged, self._merged), "2": Linear(self._merged, spec.hidden)}
        )

    def forward(self, hidden: Tensor, pointwise: Pointwise) -> Tensor:
        """[patches, embed] → [rows, hidden]."""
        normed = pointwise.add_norm(hidden, None, self.ln_q).view(-1, self._merged)
        first, second = self.mlp["0"], self.mlp["2"]
        assert isinstance(first, Linear)
        rows: Tensor = second(first.gelu_erf(normed, pointwise))
        return rows


class Qwen25VLTower(TowerModule):
    """uint8 patches of any images → their rows, the window order undone."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbed(spec, bias=False)
        self.blocks = nn.ModuleList(
            Qwen25VLBlock(spec, windowed=number not in spec.full_attention) for number in range(spec.depth)
        )
        self.merger = Qwen25VLMerger(spec)

    def forward(
        self,
        packs: Sequence[Tensor],
        layouts: Sequence[Layout],
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """uint8 packs [patches, channels × patch × patch] → [rows, width] of each, block by block in step."""
        streams = [self._embed(*pack) for pack in zip(packs, layouts, strict=True)]
        for block in self.blocks:
            between()
            for hidden, layout in zip(streams, layouts, strict=True):
                block(hidden, layout)
        return [
            self.merger(hidden.whole(), layout.pointwise)[layout.inverse]
            for hidden, layout in zip(streams, layouts, strict=True)
        ]

    def align(self, multiple: int) -> None:
        """See `TowerModule`."""
        for part in self.modules():
            if isinstance(part, Qwen25VLMlp):
                part.align(multiple)

    def _embed(self, patches: Tensor, layout: Layout) -> Residual:
        unit = self.spec.merge_unit
        ordered = patches.view(-1, unit * patches.shape[1])[layout.order].view(-1, patches.shape[1])
        embedded: Residual = self.patch_embed(ordered, layout, self.merger.ln_q.weight.dtype)
        return embedded


TOWERS: Mapping[str, Callable[[TowerSpec], TowerModule]] = {
    QWEN3_VL.name: Qwen3VLTower,
    QWEN2_5_VL.name: Qwen25VLTower,
    QWEN3_5.name: Qwen3VLTower,
}
"""What makes the module of a family, with the checkpoint's tensor names."""
