"""The supported families of vision towers; to add one, write its module and add it here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encoder_service.vision import qwen2_5_vl, qwen3_5, qwen3_vl
from encoder_service.vision.family import Family
from encoder_service.vision.spec import TowerSpec, read_config

FAMILIES = (qwen3_vl.FAMILY, qwen2_5_vl.FAMILY, qwen3_5.FAMILY)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that config.json's content names; `ValueError` when it is not served."""
    by_type = {model_type: family for family in FAMILIES for model_type in family.model_types}
    model_type = config.get("model_type")
    if model_type not in by_type:
        raise ValueError(f"model_type {model_type!r} is not supported (supported: {', '.join(by_type)})")
    return by_type[model_type]


def read_spec(folder: Path) -> TowerSpec:
    """Return the numbers of the tower in a checkpoint folder.

    Raises `FileNotFoundError` or `ValueError` naming what is missing or not supported.
    """
    config = read_config(folder)
    return family_of(config).spec(config)
