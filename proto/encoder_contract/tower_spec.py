"""The dimensions of a vision tower, read from the content of config.json, for each family that has our own tower.

Qwen3-VL (dense and mixture of experts) has DeepStack levels. In Qwen2.5-VL, most blocks have attention inside windows,
and a few over the whole image. Qwen3.5 and Qwen4-Exp are Qwen3-VL without DeepStack levels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """The numbers of a vision tower.

    `hidden` is the width of one row part (the language model's), `levels` the number of DeepStack levels beside the
    main part, so a row has `width` = hidden × (1 + levels) values. `embed` is the width inside the tower.
    `deepstack` and `full_attention` are block numbers; `window` is in patches per side, 0 without windows;
    `position_side` is the side of the learned position table, 0 without one.
    """

    model_type: str
    architecture: str
    depth: int
    embed: int
    intermediate: int
    heads: int
    hidden: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    activation: str
    rope_theta: float
    position_side: int
    deepstack: tuple[int, ...]
    window: int
    full_attention: tuple[int, ...]

    @property
    def levels(self) -> int:
        """DeepStack levels in a row beside its main part."""
        return len(self.deepstack)

    @property
    def width(self) -> int:
        """Values in a row: [main | level 0 | level 1 | ...]."""
        return self.hidden * (1 + self.levels)

    @property
    def head_size(self) -> int:
        """Values in one attention head."""
        return self.embed // self.heads

    @property
    def patch_values(self) -> int:
        """Values in one uint8 patch: channels × patch × patch, one temporal slot."""
        return self.channels * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches in one row."""
        return self.merge_size**2

    @property
    def gated(self) -> bool:
        """Whether the MLPs are gated. In every family, an MLP with SiLU is gated."""
        return self.activation == "silu"

    @property
    def mlp_products(self) -> int:
        """Products in one MLP."""
        return 3 if self.gated else 2


_DEFAULTS_OF_ALL = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of vision towers, and how config.json describes them. `FAMILIES` lists all.

    `model_types` are the family's names in config.json. `defaults` are the values of `vision_config` that
    `transformers` does not write.
    """

    name: str
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]

    def spec(self, config: Mapping[str, Any]) -> TowerSpec:
        """Return the numbers of a tower from config.json's content. Raises `ValueError` for unsupported ones."""
        found = config.get("vision_config")
        if not isinstance(found, dict):
            raise ValueError("config.json has no vision_config")
        found = {("in_channels" if name == "in_chans" else name): value for name, value in found.items()}
        vision = _DEFAULTS_OF_ALL | dict(self.defaults) | found
        self._refuse_unsupported(vision)
        rope = vision.get("rope_parameters") or {}
        return TowerSpec(
            model_type=config["model_type"],
            architecture=self.name,
            depth=vision["depth"],
            embed=vision["hidden_size"],
            intermediate=vision["intermediate_size"],
            heads=vision["num_heads"],
            hidden=vision["out_hidden_size"],
            patch_size=vision["patch_size"],
            merge_size=vision["spatial_merge_size"],
            temporal_patch_size=vision["temporal_patch_size"],
            channels=vision["in_channels"],
            activation=vision["hidden_act"],
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            position_side=round(vision.get("num_position_embeddings", 0) ** 0.5),
            deepstack=tuple(vision.get("deepstack_visual_indexes", ())),
            window=vision.get("window_size", 0) // vision["patch_size"],
            full_attention=tuple(vision.get("fullatt_block_indexes", ())),
        )

    def _refuse_unsupported(self, vision: Mapping[str, Any]) -> None:
        """Reject settings for which we would silently compute wrong rows."""
        expected = self.defaults["hidden_act"]
        if vision["hidden_act"] != expected:
            raise ValueError(
                f"vision_config.hidden_act {vision['hidden_act']!r} is not supported, only {expected!r}"
            )
        rope_type = (vision.get("rope_parameters") or {}).get("rope_type", "axial")
        if rope_type not in ("axial", "default"):
            raise ValueError(f"vision_config.rope_parameters.rope_type {rope_type!r} is not supported")
        for name in (
            "depth",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "out_hidden_size",
            "patch_size",
        ):
            if not isinstance(vision[name], int) or vision[name] < 1:
                raise ValueError(
                    f"vision_config.{name} must be a positive whole number, got {vision[name]!r}"
                )
        if vision["hidden_size"] % (4 * vision["num_heads"]):
            raise ValueError("vision_config.hidden_size must be a multiple of 4 × num_heads")
        side = vision.get("num_position_embeddings", 0)
        if round(side**0.5) ** 2 != side:
            raise ValueError(f"vision_config.num_position_embeddings {side} is not a square")
        levels = list(vision.get("deepstack_visual_indexes", ()))
        if levels != sorted({level for level in levels if 0 <= level < vision["depth"]}):
            raise ValueError(
                f"vision_config.deepstack_visual_indexes {levels} must be block numbers in order, without duplicates"
            )


QWEN3_VL = Family(
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
)
QWEN2_5_VL = Family(
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
)
QWEN3_5 = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    defaults={name: value for name, value in QWEN3_VL.defaults.items() if name != "deepstack_visual_indexes"},
)
FAMILIES = (QWEN3_VL, QWEN2_5_VL, QWEN3_5)


def spec_of(config: Mapping[str, Any]) -> TowerSpec:
    """Return the numbers of the tower in config.json's content. Raises `ValueError` for unsupported ones."""
    by_type = {model_type: family for family in FAMILIES for model_type in family.model_types}
    model_type = config.get("model_type")
    if model_type not in by_type:
        raise ValueError(f"model_type {model_type!r} is not supported (supported: {', '.join(by_type)})")
    return by_type[model_type].spec(config)
