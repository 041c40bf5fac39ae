"""Checks NCCL with a group of one process: connecting, an encode whose exchanges go through it, and an abort."""

from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from bench.gpu_parts.tower import load, one_checkpoint
from encoder_contract.geometry import Grid
from encoder_service.vision.ulysses import UlyssesGroup, start_rendezvous
from testing.reference_tower import random_patches, row_errors

GRID, DRY_GRID = Grid(1, 90, 160), Grid(1, 16, 24)


def run(probe: Probe) -> None:
    """Note the time of the exchanges, the rows' error against one device, and whether an abort is noticed."""
    probe.attempt("group of one", lambda: _group(probe))


@torch.inference_mode()
def _group(probe: Probe) -> dict[str, Any]:
    tower = load(probe, one_checkpoint(probe), graphs=False)
    grid = DRY_GRID if probe.dry else GRID
    [patches] = (image.to(probe.device) for image in random_patches([grid], tower.spec.patch_values))
    rendezvous = start_rendezvous()
    group = UlyssesGroup(probe.device, rendezvous.port, 0, 1)
    [alone] = tower.encode([patches], [grid])
    [rows] = tower.encode_in_group(group, 0, 0, grid, patches)
    error = float(row_errors(rows, alone.float()).mean())
    spent_ms = probe.ms_until_done(lambda: tower.encode_in_group(group, 0, 0, grid, patches))
    alone_ms = probe.ms_until_done(lambda: tower.encode([patches], [grid]))
    group.abort(0)
    try:
        tower.encode_in_group(group, 0, 0, grid, patches)
        is_noticed = False
    except RuntimeError:
        is_noticed = True
    [again] = tower.encode_in_group(group, 1, 0, grid, patches)
    passed = is_noticed and error <= 0.01 and torch.equal(again, rows)
    return {"group_ms": spent_ms, "alone_ms": alone_ms, "mean_error": error, "passed": passed}
