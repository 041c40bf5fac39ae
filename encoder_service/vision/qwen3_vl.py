"""The vision tower of Qwen3-VL, dense and mixture of experts: full attention, DeepStack levels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from encoder_service.vision.family import Family
from encoder_service.vision.layers import Layout, PatchEmbed, SelfAttention, TowerModule
from encoder_service.vision.linear import Linear
from encoder_service.vision.pointwise import Norm, Pointwise
from encoder_service.vision.residual import Residual
from encoder_service.vision.spec import TowerSpec


class Mlp(nn.Module):
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


class Block(nn.Module):
    """One transformer block over the residual stream."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__()
        self.norm1 = Norm(spec.embed)
        self.norm2 = Norm(spec.embed)
        self.attn = SelfAttention(spec)
        self.mlp = Mlp(spec)

    def forward(self, hidden: Residual, layout: Layout) -> None:
        """Advance the residual stream."""
        mixed = self.attn(hidden, self.norm1, layout.segments, layout)
        for number, tile in enumerate(mixed):
            hidden.add(number, self.attn.proj, tile)
            self.mlp.add_to(hidden, number, self.norm2)


class Merger(nn.Module):
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
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.depth))
        self.merger = Merger(spec, after_merge=False)
        if spec.deepstack:
            self.deepstack_merger_list = nn.ModuleList(Merger(spec, after_merge=True) for _ in spec.deepstack)

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
            if isinstance(part, Mlp):
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


FAMILY = Family(
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_moe"),  # mixture of experts concerns the language model only
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    build=Qwen3VLTower,
)
