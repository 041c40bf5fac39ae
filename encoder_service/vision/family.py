"""A family of vision towers: everything specific to it, in one record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encoder_service.image.processor import SMART_RESIZE_PROCESSORS, ProcessorSettings
from encoder_service.vision.layers import TowerModule
from encoder_service.vision.spec import TowerSpec

_DEFAULTS_OF_ALL = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """The record that each family's module declares; `families.py` lists them.

    `model_types` are the names in config.json that mean this family, `defaults` the values of `vision_config` that
    `transformers` leaves out of it, `build` makes the module of a spec with the checkpoint's tensor names, and
    `processors` are the image processors whose arithmetic `image/` implements for it.
    """

    name: str
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    build: Callable[[TowerSpec], TowerModule]
    processors: Sequence[str] = field(default=SMART_RESIZE_PROCESSORS)

    def spec(self, config: Mapping[str, Any]) -> TowerSpec:
        """Return the numbers of a tower from config.json's content; `ValueError` names what is not supported."""
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

    def processor(self, folder: Path) -> ProcessorSettings:
        """Read the image processor's settings; raises what `ProcessorSettings.from_folder` does."""
        return ProcessorSettings.from_folder(folder, self.processors)

    def _refuse_unsupported(self, vision: Mapping[str, Any]) -> None:
        """Reject settings that we would otherwise compute wrongly without an error."""
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
                f"vision_config.deepstack_visual_indexes {levels} must be blocks in order, each once"
            )
