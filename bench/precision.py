"""How far rows are from float32 at full depth: bfloat16 of `transformers`, ours, and ours with products in FP8.

On the CPU, where the products of FP8 are the same values multiplied in float32: errors, not times.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness.benchmark import Benchmark
from bench.harness.tables import markdown
from bench.tower.cases import full_checkpoint, load_ours
from encoder_contract.geometry import Grid
from encoder_contract.tower_spec import Precision
from testing.reference_tower import ReferenceTower, random_patches, row_errors

NAMES = {"qwen3_vl": "Qwen3-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_5": "Qwen3.5"}
GRIDS = [Grid(1, 16, 16)]
FP8_COSINE = 0.998  # the bar: of rows in the mean
BFLOAT16, FP8 = "ours, bfloat16", "ours, FP8"


def comparison(figures: Mapping[str, Any]) -> str:
    """Return a line for each tower and arithmetic, and whether FP8 keeps the bar."""
    heads = ("tower", "arithmetic", "mean cosine", "worst row", "mean error", "largest")
    rows = [
        (
            NAMES[each["model"]],
            each["arithmetic"],
            f"{each['mean_cosine']:.5f}",
            f"{each['worst_cosine']:.5f}",
            f"{each['mean_error']:.4f}",
            f"{each['largest_error']:.4f}",
        )
        for each in figures.get("rows", [])
    ]
    fp8 = [each["mean_cosine"] for each in figures.get("rows", []) if each["arithmetic"] == FP8]
    told = "kept" if fp8 and min(fp8) >= FP8_COSINE else "**missed**"
    return f"{markdown(heads, rows)}\n\nMean cosine of rows in FP8 at least {FP8_COSINE}: {told}."


BENCHMARK = Benchmark(
    "precision",
    "How exact is the tower in FP8?",
    limit_s=540,  # three towers at full depth take minutes without products of bfloat16
    quick=("--models", "qwen3_5"),
    shown_as=comparison,
)


def main() -> None:
    """Compare and print the table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument(
        "--json", action="store_true", help="accepted for symmetry: the last line always is JSON"
    )
    options = parser.parse_args()
    rows = [row for kind in options.models for row in compared(kind, full_checkpoint(kind))]
    print(f"\n{comparison({'rows': rows})}\n")
    print(json.dumps({"rows": rows}))


def compared(model_type: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of every arithmetic against float32 of `transformers`, same weights, same patches."""
    truth_tower = ReferenceTower(folder, torch.float32)
    patches = random_patches(GRIDS, 3 * truth_tower.module.config.patch_size**2)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, GRIDS)
    del truth_tower
    theirs = ReferenceTower(folder, torch.bfloat16).rows(pixels, GRIDS)
    rows = [measured(model_type, "`transformers`, bfloat16", theirs, truth)]
    precisions: tuple[tuple[Precision, str], ...] = (("full", BFLOAT16), ("fp8", FP8))
    for precision, name in precisions:
        ours = torch.cat(load_ours(folder, "bfloat16", precision=precision).encode(patches, GRIDS))
        rows.append(measured(model_type, name, ours, truth))
    return rows


def measured(model_type: str, arithmetic: str, rows: Tensor, truth: Tensor) -> dict[str, Any]:
    """Cosines and relative errors of rows."""
    cosines = torch.cosine_similarity(rows.double(), truth.double())
    errors = row_errors(rows, truth)
    found = {
        "model": model_type,
        "arithmetic": arithmetic,
        "mean_cosine": float(cosines.mean()),
        "worst_cosine": float(cosines.min()),
        "mean_error": float(errors.mean()),
        "largest_error": float(errors.max()),
    }
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()
