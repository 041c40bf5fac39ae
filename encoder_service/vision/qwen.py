"""The network of every family: Qwen3-VL (dense and mixture of experts), Qwen2.5-VL, Qwen3.5, Qwen4-Exp.

Its dimensions are in `encoder_contract.tower_spec`; `FORMS` has the other differences between families. Qwen3-VL has
DeepStack levels. Qwen2.5-VL has gated MLPs and attends within windows, in a few blocks over the whole image. Qwen3.5
and Qwen4-Exp are Qwen3-VL without DeepStack levels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from encoder_contract.tower_spec import QWEN2_5_VL, QWEN3_5, QWEN3_VL, TowerSpec
from encoder_service.vision.layers import Linear, PackedBatch, PatchEmbed, Residual, SelfAttention
from encoder_service.vision.pointwise import Norm, Pointwise


@dataclass(frozen=True, slots=True)
class FamilyForm:
    """The properties of a family's network that its dimensions do not tell.

    `names` maps parts of our tensor names, which are those of Qwen3-VL, to the names in the family's checkpoints.
    """

    rms: bool = False
    patch_bias: bool = True
    names: Mapping[str, str] = field(default_factory=dict)

    def name_in_checkpoint(self, name: str) -> str:
        """Return the name of one of our tensors in the family's checkpoints."""
        for own, stored in self.names.items():
            name = name.replace(own, stored)
        return name


FORMS = {
    QWEN3_VL.name: FamilyForm(),
    QWEN2_5_VL.name: FamilyForm(
        rms=True,
        patch_bias=False,
        names={
            ".mlp.linear_fc1.": ".mlp.up_proj.",
            ".mlp.linear_fc2.": ".mlp.down_proj.",
            "merger.norm.": "merger.ln_q.",
            "merger.linear_fc1.": "merger.mlp.0.",
            "merger.linear_fc2.": "merger.mlp.2.",
        },
    ),
    QWEN3_5.name: FamilyForm(),
}


class Mlp(nn.Module):
    """Two linear layers with a tanh GELU between them; or gated: silu(gate) × the first, then the second."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.embed, spec.intermediate) if spec.gated else None
        self.linear_fc1 = Linear(spec.embed, spec.intermediate)
        self.linear_fc2 = Linear(spec.intermediate, spec.embed)

    def add_to(self, hidden: Residual, number: int, norm: Norm) -> None:
        """Add the MLP of a tile's norm to the tile."""
        x = hidden.normed(number, norm)
        if self.gate_proj is None:
            inside = self.linear_fc1.gelu_tanh(x)
        else:
            inside = functional.silu(self.gate_proj(x)).mul_(self.linear_fc1(x))
        hidden.add(number, self.linear_fc2, inside)

    def align(self, multiple: int) -> None:
        """Widen the values between the layers to a `multiple` of columns. Exact, because the activation of 0 is 0."""
        extra = -self.linear_fc1.weight.shape[0] % multiple
        if self.gate_proj is not None:
            self.gate_proj.widen_outputs(extra)
        self.linear_fc1.widen_outputs(extra)
        self.linear_fc2.widen_inputs(extra)


class Block(nn.Module):
    """One transformer block over the residual stream, with attention over whole images or within windows."""

    def __init__(self, spec: TowerSpec, *, rms: bool, windowed: bool) -> None:
        super().__init__()
        self.norm1 = Norm(spec.embed, rms=rms)
        self.norm2 = Norm(spec.embed, rms=rms)
        self.attn = SelfAttention(spec)
        self.mlp = Mlp(spec)
        self._windowed = windowed

    def forward(self, hidden: Residual, layout: PackedBatch, between: Callable[[], None]) -> None:
        """Add attention and MLP to the residual stream. `between` is called before each tile."""
        segments = layout.windows if self._windowed else layout.segments
        assert segments is not None
        mixed = self.attn(hidden, self.norm1, segments, layout, between)
        for number, tile in enumerate(mixed):
            between()
            hidden.add(number, self.attn.proj, tile)
            self.mlp.add_to(hidden, number, self.norm2)


class Merger(nn.Module):
    """Neighbouring patches → one row of the language model's width. DeepStack mergers normalise after merging."""

    def __init__(self, spec: TowerSpec, *, rms: bool, after_merge: bool) -> None:
        super().__init__()
        self._merged = spec.embed * spec.merge_unit
        self._after_merge = after_merge
        self.norm = Norm(self._merged if after_merge else spec.embed, rms=rms)
        self.linear_fc1 = Linear(self._merged, self._merged)
        self.linear_fc2 = Linear(self._merged, spec.hidden)

    def forward(self, hidden: Tensor, pointwise: Pointwise) -> Tensor:
        """[patches, embed] → [rows, hidden]."""
        grouped = hidden.view(-1, self._merged) if self._after_merge else hidden
        normed = pointwise.add_norm(grouped, None, self.norm).view(-1, self._merged)
        rows: Tensor = self.linear_fc2(self.linear_fc1.gelu_erf(normed, pointwise))
        return rows


class TowerModule(nn.Module):
    """uint8 patches of images → their rows, [main | DeepStack level 0 | ...]."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        form = FORMS[spec.architecture]
        self.spec = spec
        self.patch_embed = PatchEmbed(spec, bias=form.patch_bias)
        self.pos_embed: nn.Embedding | None = None
        if spec.position_side:
            # Loading replaces the values. To initialise them torch would import its compiler, which takes seconds.
            size = spec.position_side**2, spec.embed
            self.pos_embed = nn.Embedding(*size, _weight=torch.empty(size))
        self.blocks = nn.ModuleList(
            Block(spec, rms=form.rms, windowed=bool(spec.window) and number not in spec.full_attention)
            for number in range(spec.depth)
        )
        self.merger = Merger(spec, rms=form.rms, after_merge=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(spec, rms=form.rms, after_merge=True) for _ in spec.deepstack
        )

    @property
    def positions(self) -> Tensor | None:
        """The learned position table [side², embed], or None."""
        return None if self.pos_embed is None else self.pos_embed.weight

    def name_in_checkpoint(self, name: str) -> str:
        """Return the name of one of our tensors in the family's checkpoints."""
        return FORMS[self.spec.architecture].name_in_checkpoint(name)

    def align(self, multiple: int) -> None:
        """Widen the inside of the blocks' MLPs with zeros to a `multiple` of columns. This is exact."""
        for part in self.modules():
            if isinstance(part, Mlp):
                part.align(multiple)

    def forward(
        self,
        packs: Sequence[Tensor],
        layouts: Sequence[PackedBatch],
        between: Callable[[], None] = lambda: None,
        *,
        into: Sequence[Tensor] = (),
    ) -> Sequence[Tensor]:
        """uint8 packs [patches, channels × (2 ×) patch × patch] → [rows, width] of each pack.

        All packs pass a block before the next block. `between` is called before each tile in each block. The rows are
        written to the tensors of `into`, if given.
        """
        spec = self.spec
        dtype = self.merger.norm.weight.dtype
        streams = [self._embed(*pack, dtype) for pack in zip(packs, layouts, strict=True)]
        rows = into or [
            torch.empty(len(pack) // spec.merge_unit, spec.width, dtype=dtype, device=pack.device)
            for pack in packs
        ]
        for number, block in enumerate(self.blocks):
            for hidden, layout in zip(streams, layouts, strict=True):
                block(hidden, layout, between)
            if number in spec.deepstack:
                level = spec.deepstack.index(number)
                self._merge(self.deepstack_merger_list[level], streams, layouts, rows, 1 + level)
        self._merge(self.merger, streams, layouts, rows, 0)
        return rows

    def _embed(self, patches: Tensor, layout: PackedBatch, dtype: torch.dtype) -> Residual:
        patches = in_order(patches, layout.order)
        embedded: Residual = self.patch_embed(patches, layout, dtype)
        return embedded

    def _merge(
        self,
        merger: nn.Module,
        streams: Sequence[Residual],
        layouts: Sequence[PackedBatch],
        rows: Sequence[Tensor],
        part: int,
    ) -> None:
        columns = slice(part * self.spec.hidden, (part + 1) * self.spec.hidden)
        for hidden, layout, out in zip(streams, layouts, rows, strict=True):
            merged = merger(hidden.whole(), layout.pointwise)
            out[:, columns] = merged if layout.inverse is None else merged[layout.inverse]


def in_order(patches: Tensor, order: Tensor | None) -> Tensor:
    """Return patches [patches, values] in the `order` of their merged rows; unchanged for None."""
    return patches if order is None else patches.view(len(order), -1)[order].view(patches.shape)
