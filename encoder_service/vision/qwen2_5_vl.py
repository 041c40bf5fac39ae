"""The vision tower of Qwen2.5-VL: attention inside windows, in a few blocks over the whole image."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional

from encoder_service.vision.family import Family
from encoder_service.vision.layers import Layout, PatchEmbed, SelfAttention, TowerModule
from encoder_service.vision.linear import Linear
from encoder_service.vision.pointwise import Norm, Pointwise
from encoder_service.vision.residual import Residual
from encoder_service.vision.spec import TowerSpec


class Mlp(nn.Module):
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


class Block(nn.Module):
    """One transformer block over the residual stream, whole or windowed."""

    def __init__(self, spec: TowerSpec, *, windowed: bool) -> None:
        super().__init__()
        self.norm1 = Norm(spec.embed, rms=True)
        self.norm2 = Norm(spec.embed, rms=True)
        self.attn = SelfAttention(spec)
        self.mlp = Mlp(spec)
        self._windowed = windowed

    def forward(self, hidden: Residual, layout: Layout) -> None:
        """Advance the residual stream."""
        segments = layout.windows if self._windowed else layout.segments
        assert segments is not None
        mixed = self.attn(hidden, self.norm1, segments, layout)
        for number, tile in enumerate(mixed):
            hidden.add(number, self.attn.proj, tile)
            self.mlp.add_to(hidden, number, self.norm2)


class Merger(nn.Module):
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
            Block(spec, windowed=number not in spec.full_attention) for number in range(spec.depth)
        )
        self.merger = Merger(spec)

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
            if isinstance(part, Mlp):
                part.align(multiple)

    def _embed(self, patches: Tensor, layout: Layout) -> Residual:
        unit = self.spec.merge_unit
        ordered = patches.view(-1, unit * patches.shape[1])[layout.order].view(-1, patches.shape[1])
        embedded: Residual = self.patch_embed(ordered, layout, self.merger.ln_q.weight.dtype)
        return embedded


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
