"""The vision tower of Qwen2.5-VL: attention inside windows, in a few blocks over the whole image."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_service.vision.family import Family
from encoder_service.vision.layers import Layout, PatchEmbed, SelfAttention, TowerModule
from encoder_service.vision.linear import Linear
from encoder_service.vision.spec import TowerSpec


class Mlp(nn.Module):
    """Gated: silu(gate) × up, then down."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.embed, spec.intermediate)
        self.up_proj = Linear(spec.embed, spec.intermediate)
        self.down_proj = Linear(spec.intermediate, spec.embed)

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` + the MLP of `x`, all [patches, embed]; `residual` is used up."""
        return self.down_proj.plus(residual, functional.silu(self.gate_proj(x)).mul_(self.up_proj(x)))


class Block(nn.Module):
    """One transformer block over the residual stream, whole or windowed."""

    def __init__(self, spec: TowerSpec, *, windowed: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(spec.embed, eps=1e-6)
        self.norm2 = nn.RMSNorm(spec.embed, eps=1e-6)
        self.attn = SelfAttention(spec)
        self.mlp = Mlp(spec)
        self._windowed = windowed

    def forward(self, hidden: list[Tensor], layout: Layout) -> None:
        """Advance the residual stream, tiles [patches, embed], in place."""
        segments = layout.windows if self._windowed else layout.segments
        assert segments is not None
        mixed = self.attn(hidden, self.norm1, segments, layout)
        for number, tile in enumerate(mixed):
            residual = self.attn.proj.plus(hidden[number], tile)
            hidden[number] = self.mlp.plus(residual, self.norm2(residual))


class Merger(nn.Module):
    """Neighbouring patches → one row of the language model's width."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self._merged = spec.embed * spec.merge_unit
        self.ln_q = nn.RMSNorm(spec.embed, eps=1e-6)
        # Numbered as in checkpoints: 0 and 2 are products, 1 the activation between them.
        self.mlp = nn.ModuleDict(
            {"0": Linear(self._merged, self._merged), "2": Linear(self._merged, spec.hidden)}
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[patches, embed] → [rows, hidden]."""
        normed = self.ln_q(hidden).view(-1, self._merged)
        rows: Tensor = self.mlp["2"](self.mlp["0"](normed, "gelu_erf"))
        return rows


class Qwen25VLTower(TowerModule):
    """uint8 patches of any images → their rows, the window order undone."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbed(spec, bias=False)
        self.blocks = nn.ModuleList(
            Block(spec, windowed=number not in spec.full_attention) for number in range(spec.depth)
        )
        self.merger = Merger(spec)

    def forward(self, packs: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
        """uint8 packs [patches, channels × patch × patch] → [rows, width] of each, block by block in step."""
        streams = [self._embed(*pack) for pack in zip(packs, layouts, strict=True)]
        for block in self.blocks:
            for hidden, layout in zip(streams, layouts, strict=True):
                block(hidden, layout)
        return [
            self.merger(torch.cat(hidden))[layout.inverse]
            for hidden, layout in zip(streams, layouts, strict=True)
        ]

    def _embed(self, patches: Tensor, layout: Layout) -> list[Tensor]:
        unit = self.spec.merge_unit
        ordered = patches.view(-1, unit * patches.shape[1])[layout.order].view(-1, patches.shape[1])
        tiles: list[Tensor] = self.patch_embed(ordered, layout, self.merger.ln_q.weight.dtype)
        return tiles


FAMILY = Family(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    defaults={
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    build=Qwen25VLTower,
)
