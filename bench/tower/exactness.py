"""How exact the towers are at full depth: errors of rows over float32 of `transformers`, ours and its own."""

import time
from pathlib import Path

import torch
from torch import Tensor

from bench.harness.budget import Budget
from bench.tower.cases import full_checkpoint, load_ours
from encoder_contract.geometry import Grid
from testing.reference_tower import ReferenceTower, random_patches, row_errors


def error_ratios(budget: Budget) -> dict[str, float]:
    """Relative row errors over float32 truth at full depth, ours and theirs, for every architecture."""
    heads = ("ours mean", "theirs", "ours max", "theirs", "mean ratio", "float32 max")
    print(f"\n{'bf16 error':>12} " + " ".join(f"{head:>11}" for head in heads))
    ratios = {}
    slowest_s = 0.0
    for model_type in ("qwen3_vl", "qwen2_5_vl", "qwen3_5"):
        if not budget.affords(f"exactness of {model_type}", slowest_s):
            continue
        began = time.monotonic()
        exact, ours, theirs = errors(full_checkpoint(model_type))
        slowest_s = max(slowest_s, time.monotonic() - began)
        ratio = float(ours.mean() / theirs.mean())
        numbers = (*(float(each) for each in (ours.mean(), theirs.mean(), ours.max(), theirs.max())), ratio)
        print(f"{model_type:>12} " + " ".join(f"{number:11.5f}" for number in numbers) + f" {exact:11.1e}")
        ratios[f"error_ratio_{model_type}"] = ratio
        ratios[f"max_error_ratio_{model_type}"] = float(ours.max() / theirs.max())
        ratios[f"float32_error_{model_type}"] = exact
    return ratios


def errors(folder: Path) -> tuple[float, Tensor, Tensor]:
    """Relative row errors against float32 of `transformers`: our largest in float32, ours and its own in bfloat16."""
    grids = [Grid(1, 16, 16), Grid(1, 20, 26)]
    truth_tower = ReferenceTower(folder, torch.float32)
    patches = random_patches(grids, 3 * truth_tower.module.config.patch_size**2)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, grids)
    del truth_tower
    theirs = row_errors(ReferenceTower(folder, torch.bfloat16).rows(pixels, grids), truth)
    exact, ours = (
        row_errors(torch.cat(load_ours(folder, dtype).encode(patches, grids)), truth)
        for dtype in ("float32", "bfloat16")
    )
    return float(exact.max()), ours, theirs
