"""The towers and images that benchmarks measure: published towers at full depth with seeded random weights."""

import tempfile
from pathlib import Path
from typing import Any

from encoder_contract.geometry import Grid
from encoder_contract.processor import ProcessorSettings
from encoder_service.vision.load import load_tower
from encoder_service.vision.tower import Tower, flops
from testing.checkpoints import write_checkpoint

# Name → (width, height, images).
CASES = {
    "256": (256, 256, 1),
    "8x256": (256, 256, 8),
    "560": (560, 560, 1),
    "640x480": (640, 480, 1),
    "720p": (1280, 720, 1),
    "960x1280": (960, 1280, 1),
    "1080p": (1920, 1080, 1),
    "1440p": (2560, 1440, 1),
    "20x960x1280": (960, 1280, 20),
}


def full_checkpoint(model_type: str) -> Path:
    """Return the folder of a checkpoint of the published tower; it is written once per machine."""
    folder = Path(tempfile.gettempdir()) / "encoder-service-bench" / model_type
    if not (folder / "model.safetensors").is_file() or not (folder / "tokenizer.json").is_file():
        print(f"writing {folder} ...", flush=True)
        write_checkpoint(folder, model_type, vision_only=True)
    return folder


def load_ours(folder: Path, dtype: str, **options: Any) -> Tower:
    """Load our tower from a folder, on the CPU."""
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device="cpu", dtype=dtype, processor=processor, **options)


def case_grids(tower: Tower, name: str) -> list[Grid]:
    """Return the grids of a case."""
    width, height, images = CASES[name]
    side = tower.spec.patch_size * tower.spec.merge_size
    return [Grid(1, 2 * round(height / side), 2 * round(width / side))] * images


def work(tower: Tower, case: str) -> int:
    """Return the FLOP of a forward of a case."""
    return sum(flops(tower.spec, grid) for grid in case_grids(tower, case))
