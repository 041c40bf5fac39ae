"""Loads a vision tower from a checkpoint folder."""

from pathlib import Path
from typing import Any

from encoder_contract.processor import ProcessorSettings
from encoder_service.vision import Tower, load_tower


def load(folder: Path, dtype: str = "float32", *, device: str = "cpu", **options: Any) -> Tower:
    """Return the tower, for the folder's image processor. `options` are those of `load_tower`."""
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device=device, dtype=dtype, processor=processor, **options)
