"""Times the same images in batches of several sizes, to choose the patch budget of a batch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from bench.gpu_parts.tower import load, one_checkpoint
from encoder_contract.geometry import Grid
from encoder_service.vision import Tower
from testing.reference_tower import random_patches

BUDGETS = (4800, 9600, 16384)  # patches
DRY_BUDGETS = (256, 512)
# Name → (grid, images of one call).
CASES = {
    "64x256": (Grid(1, 16, 16), 64),
    "16x640x480": (Grid(1, 30, 40), 16),
    "20x960x1280": (Grid(1, 80, 60), 20),
    "4x1440p": (Grid(1, 90, 160), 4),
}
DRY_CASES = {"4x256": (Grid(1, 16, 16), 4)}


@torch.inference_mode()
def run(probe: Probe) -> None:
    """Note the time of the first batch and of all batches, for each budget and case."""
    folder = one_checkpoint(probe)
    for budget in DRY_BUDGETS if probe.dry else BUDGETS:
        tower = load(probe, folder, attention="auto", graphs=not probe.dry, batch_patches=budget)
        for name, (grid, count) in (DRY_CASES if probe.dry else CASES).items():
            probe.attempt({"budget": budget, "case": name}, partial(_case, probe, tower, [grid] * count))
        del tower


def _case(probe: Probe, tower: Tower, grids: Sequence[Grid]) -> dict[str, Any]:
    patches = [image.to(probe.device) for image in random_patches(grids, tower.spec.patch_values)]
    batches = list(tower._batches(grids, [image.shape[1] for image in patches]))
    first = batches[0]
    return {
        "batches": len(batches),
        "first_ms": probe.ms(lambda: tower.encode(patches[first], grids[first]), 7)["ms"],
        "ms": probe.ms(lambda: tower.encode(patches, grids), 7)["ms"],
    }
