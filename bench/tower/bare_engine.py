"""The engine without the service: decoder, preprocessing and tower called directly, in this process."""

import time
from collections.abc import Sequence

import torch

from encoder_contract.geometry import Grid
from encoder_service.engine.model import Model
from encoder_service.image.resize import to_patches


def patches_of(model: Model, files: Sequence[bytes]) -> tuple[list[torch.Tensor], list[Grid]]:
    """Decode and preprocess sound files; return what the tower takes."""
    pixels = [p for p in model.decoder.decode(files) if isinstance(p, torch.Tensor)]
    geometry = model.processor.geometry
    grids = [geometry.grid(p.shape[1], p.shape[0]) for p in pixels]
    return to_patches(pixels, grids, model.resize), grids


def tower_seconds(model: Model, files: Sequence[bytes]) -> float:
    """Return how long the tower alone takes for all files in one batch."""
    patches, grids = patches_of(model, files)
    began = time.perf_counter()
    model.tower.encode(patches, grids)
    return time.perf_counter() - began
