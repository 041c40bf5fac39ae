"""The vision tower of Qwen2.5-VL: attention inside windows, in a few blocks over the whole image."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_service.vision.layers import Layout, PatchEmbed, SelfAttention, tiles
from encoder_service.vision.linear import Linear
from encoder_service.vision.spec import TowerSpec


class Mlp(nn.Module):
    """Gated: silu(gate) × up, then down."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.embed, spec.intermediate)
        self.up_proj = Linear(spec.embed, spec.intermediate)
        self.down_proj = Linear(spec.intermediate, spec.embed)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the MLP of `x` to `residual`, both [patches, embed]."""
        self.down_proj.add_to(residual, functional.silu(self.gate_proj(x)).mul_(self.up_proj(x)))


class Block(nn.Module):
    """One transformer block over the residual stream, whole or windowed."""

    def __init__(self, spec: TowerSpec, *, windowed: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(spec.embed, eps=1e-6)
        self.norm2 = nn.RMSNorm(spec.embed, eps=1e-6)
        self.attn = SelfAttention(spec)
        self.mlp = Mlp(spec)
        self._windowed = windowed

    def forward(self, hidden: Tensor, layout: Layout) -> None:
        """Advance `hidden` [patches, embed] in place."""
        segments = layout.windows if self._windowed else layout.segments
        assert segments is not None
        cuts = list(tiles(len(hidden), layout.tile))
        parts = [self.attn.project(self.norm1(hidden[cut]), layout.rotary[cut]) for cut in cuts]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts)
        mixed = self.attn.attend(projected, segments, layout.attend)
        for cut in cuts:
            self.attn.proj.add_to(hidden[cut], mixed[cut])
            self.mlp.add_to(hidden[cut], self.norm2(hidden[cut]))


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


class Qwen25VLTower(nn.Module):
    """Packed uint8 patches of any images → their rows, the window order undone."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = PatchEmbed(spec, bias=False)
        self.blocks = nn.ModuleList(
            Block(spec, windowed=number not in spec.full_attention) for number in range(spec.depth)
        )
        self.merger = Merger(spec)

    def forward(self, patches: Tensor, layout: Layout) -> Tensor:
        """uint8 [patches, channels × patch × patch] → [rows, width]."""
        assert layout.order is not None
        assert layout.inverse is not None
        unit = self.spec.merge_unit
        ordered = patches.view(-1, unit * patches.shape[1])[layout.order].view(-1, patches.shape[1])
        hidden = self.patch_embed(ordered, None, self.merger.ln_q.weight.dtype)
        for block in self.blocks:
            block(hidden, layout)
        rows: Tensor = self.merger(hidden)[layout.inverse]
        return rows
