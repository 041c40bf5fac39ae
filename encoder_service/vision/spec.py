"""What a vision tower is: its architecture's numbers, read from a checkpoint's config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Model type in config.json → architecture of the tower. The mixture-of-experts models differ in the language
# model only.
ARCHITECTURES = {
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
}

# `transformers` leaves out of config.json what equals its defaults; these are those of its configuration classes.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
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
    "qwen2_5_vl": {
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
}
_DEFAULTS["qwen3_5"] = {
    name: value for name, value in _DEFAULTS["qwen3_vl"].items() if name != "deepstack_visual_indexes"
}
_DEFAULTS_FOR_ALL = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}


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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TowerSpec":
        """Read config.json's content; `ValueError` names a model type or setting that is not supported."""
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(
                f"model_type {model_type!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
            )
        architecture = ARCHITECTURES[model_type]
        found = config.get("vision_config")
        if not isinstance(found, dict):
            raise ValueError("config.json has no vision_config")
        found = {("in_channels" if name == "in_chans" else name): value for name, value in found.items()}
        vision = _DEFAULTS_FOR_ALL | _DEFAULTS[architecture] | found
        _refuse_unsupported(architecture, vision)
        rope = vision.get("rope_parameters") or {}
        return cls(
            model_type=model_type,
            architecture=architecture,
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


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder; `FileNotFoundError` or `ValueError` names the file."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {folder} is not a Hugging Face checkpoint folder")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return config


def _refuse_unsupported(architecture: str, vision: Mapping[str, Any]) -> None:
    """Refuse what we would silently compute otherwise."""
    expected = _DEFAULTS[architecture]["hidden_act"]
    if vision["hidden_act"] != expected:
        raise ValueError(
            f"vision_config.hidden_act {vision['hidden_act']!r} is not supported, only {expected!r}"
        )
    rope_type = (vision.get("rope_parameters") or {}).get("rope_type", "axial")
    if rope_type not in ("axial", "default"):
        raise ValueError(f"vision_config.rope_parameters.rope_type {rope_type!r} is not supported")
    for name in ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size"):
        if not isinstance(vision[name], int) or vision[name] < 1:
            raise ValueError(f"vision_config.{name} must be a positive whole number, got {vision[name]!r}")
    if vision["hidden_size"] % (4 * vision["num_heads"]):
        raise ValueError("vision_config.hidden_size must be a multiple of 4 × num_heads")
    side = vision.get("num_position_embeddings", 0)
    if round(side**0.5) ** 2 != side:
        raise ValueError(f"vision_config.num_position_embeddings {side} is not a square")
    levels = list(vision.get("deepstack_visual_indexes", ()))
    if levels != sorted({level for level in levels if 0 <= level < vision["depth"]}):
        raise ValueError(
            f"vision_config.deepstack_visual_indexes {levels} must be blocks in order, each once"
        )
