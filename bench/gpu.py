"""On a CUDA machine: is every path of the vision towers right, and how fast is it.

Parity of every attention backend that runs here, CUDA graphs against eager, then timings; the results go to
bench/results/<date>-<machine>.json. Exits non-zero, saying why, without a CUDA device or when a check fails.
"""

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.benchmark import Benchmark
from bench.harness.results import Result, hardware, keep, path_of, versions
from bench.harness.tables import markdown
from bench.vit import CASES, case_grids, full_checkpoint
from encoder_contract.geometry import Grid
from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision import Tower, flops, load_tower
from encoder_service.vision.attention import BACKENDS, why_not
from testing.reference_tower import ReferenceTower, random_patches, row_errors

DEVICE = torch.device("cuda:0")
MODEL_TYPES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")
# Square, several tiles, cut windows, and more images than a graph for one image takes.
PARITY_GRIDS = [Grid(1, 16, 16), Grid(1, 44, 80), Grid(1, 22, 18), *[Grid(1, 16, 16)] * 5]


def _no_cuda() -> str:
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def comparison(figures: Mapping[str, Any]) -> str:
    """Return milliseconds of each case: the fastest of ours by its name, and `transformers`."""
    best: dict[str, dict[str, Any]] = {}
    theirs: dict[str, float] = {}
    for case in figures.get("cases", []):
        if str(case["attention"]).startswith("transformers"):
            theirs[case["case"]] = case["ms"]
        elif case["case"] not in best or case["ms"] < best[case["case"]]["ms"]:
            best[case["case"]] = case
    checks = figures.get("checks", [])
    passed = sum(check["passed"] for check in checks)
    rows = [
        (
            name,
            f"{case['ms']:.2f}",
            f"{case['attention']}{', graphs' if case.get('graphs') else ''}",
            f"{case['of_peak']:.0%}",
            f"{theirs.get(name, math.nan):.2f}",
            f"{theirs.get(name, math.nan) / case['ms']:.2f}",
        )
        for name, case in best.items()
    ]
    heads = ("images", "ours, ms", "attention", "of the best product", "`transformers`, ms", "ratio")
    says = f"{passed} of {len(checks)} checks of exactness passed"
    return f"{says}; best product {figures.get('product_tflops', math.nan):.0f} TFLOP/s.\n\n{markdown(heads, rows)}"


BENCHMARK = Benchmark(
    "gpu", "How fast is the tower on a GPU?", limit_s=600, why_not=_no_cuda, shown_as=comparison
)


def main() -> int:
    """Check, measure, write the file; the number returned is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json",
        action="store_true",
        help="end with one JSON object, and leave keeping it to `python -m bench`",
    )
    parser.add_argument("--checks-only", action="store_true", help="parity and graphs, no timings")
    options = parser.parse_args()
    if why_not_here := _no_cuda():
        print(f"bench.gpu: {why_not_here}", file=sys.stderr)
        return 2
    torch.backends.cudnn.allow_tf32 = False  # the reference's float32 convolution is the truth
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    result: dict[str, Any] = {
        "backends": {name: why_not(name, DEVICE, torch.bfloat16) or "runs" for name in BACKENDS}
    }
    for name, state in result["backends"].items():
        print(f"{name:>8}: {state}")
    checks = [check for model_type in MODEL_TYPES for check in parity(model_type, result["backends"])]
    result["checks"] = checks
    if not options.checks_only:
        result["product_tflops"] = product_peak() / 1e12
        result["cases"] = timings(result["backends"], result["product_tflops"])
    failed = [check for check in checks if not check["passed"]]
    for check in failed:
        print(f"FAILED: {check}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    else:
        print(f"wrote {keep_figures(result, time.monotonic() - began, options.checks_only)}")
    return 1 if failed else 0


def keep_figures(figures: dict[str, Any], seconds: float, quick: bool) -> Path:
    """Keep what was found here as `python -m bench` would; return the file."""
    machine = hardware()
    path = path_of(machine, quick=quick)
    today = datetime.date.today().isoformat()
    command = "python -m bench.gpu"
    keep(
        path,
        Result("gpu", machine, "ok", command, today, round(seconds, 1), figures=figures, versions=versions()),
    )
    return path


def load(folder: Path, dtype: str = "bfloat16", **options: Any) -> Tower:
    """Our tower on the device."""
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device=str(DEVICE), dtype=dtype, processor=processor, **options)


def parity(model_type: str, backends: dict[str, str]) -> list[dict[str, Any]]:
    """Every backend, with and without graphs, against float32 of `transformers`, beside its own bfloat16 error."""
    folder = full_checkpoint(model_type)
    truth_tower = ReferenceTower(folder, torch.float32, str(DEVICE))
    patches = random_patches(PARITY_GRIDS, 3 * truth_tower.module.config.patch_size**2)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, PARITY_GRIDS)
    del truth_tower
    theirs = row_errors(ReferenceTower(folder, torch.bfloat16, str(DEVICE)).rows(pixels, PARITY_GRIDS), truth)
    checks = []

    def check(what: str, mean: float, largest: float, bound: float) -> None:
        passed = mean <= bound
        checks.append(
            {
                "model": model_type,
                "check": what,
                "mean": mean,
                "max": largest,
                "bound": bound,
                "passed": passed,
            }
        )
        print(
            f"{model_type:>12} {what:>24} mean {mean:.2e} max {largest:.2e} bound {bound:.2e} {passed}",
            flush=True,
        )

    exact = load(folder, "float32", attention="sdpa", graphs=False)
    errors = row_errors(torch.cat(exact.encode(patches, PARITY_GRIDS)), truth)
    check("float32 sdpa", float(errors.max()), float(errors.max()), 1e-5)
    del exact
    for name in [name for name, state in backends.items() if state == "runs"]:
        for graphs in (False, True) if name != "sdpa" else (False,):
            tower = load(folder, attention=name, graphs=graphs)
            rows = tower.encode(patches, PARITY_GRIDS)
            errors = row_errors(torch.cat(rows), truth)
            what = f"{name} {'graphs' if graphs else 'eager'}"
            check(what, float(errors.mean()), float(errors.max()), 1.05 * float(theirs.mean()))
            alone = [
                tower.encode([image], [grid])[0] for image, grid in zip(patches, PARITY_GRIDS, strict=True)
            ]
            errors = row_errors(torch.cat(alone), truth)
            check(f"{what} alone", float(errors.mean()), float(errors.max()), 1.05 * float(theirs.mean()))
            del tower
            torch.cuda.empty_cache()
    return checks


@torch.inference_mode()
def product_peak() -> float:
    """The best rate of a bfloat16 product here, FLOP/s."""
    best = 0.0
    for size in (4096, 8192):
        x, weight = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
        best = max(best, 2 * size**3 / milliseconds(lambda: x @ weight) * 1e3)  # noqa: B023
    print(f"best product: {best / 1e12:.0f} TFLOP/s")
    return best


def timings(backends: dict[str, str], peak_tflops: float) -> list[dict[str, Any]]:
    """Every case with every backend, graph and head size: milliseconds, share of the peak, peak memory."""
    folder = full_checkpoint("qwen3_vl")
    rows: list[dict[str, Any]] = []
    variants: list[dict[str, Any]] = [
        {"attention": name, "graphs": graphs, "head_size": head_size}
        for name, state in backends.items()
        if state == "runs"
        for graphs in ((False, True) if name != "sdpa" else (False,))
        for head_size in (72, 80)
    ]
    variants.append({"attention": "auto", "batch_invariant": True})
    for options in variants:
        tower = load(folder, **options)
        for name in CASES:
            grids = case_grids(tower, name)
            rows.append({**options, "case": name, **time_case(tower, grids, peak_tflops)})
            print(rows[-1], flush=True)
        del tower
        torch.cuda.empty_cache()
    reference = ReferenceTower(folder, torch.bfloat16, str(DEVICE))
    spec_tower = load(folder, graphs=False)
    for name in CASES:
        grids = case_grids(spec_tower, name)
        pixels = reference.pixels(random_patches(grids, spec_tower.spec.patch_values)).bfloat16()
        shape = torch.tensor(grids, device=DEVICE)
        try:
            spent = milliseconds(lambda: reference.forward(pixels, shape))  # noqa: B023
        except torch.cuda.OutOfMemoryError:
            spent = float("nan")
        rows.append({"attention": "transformers sdpa", "case": name, "ms": spent})
        print(rows[-1], flush=True)
    return rows


def time_case(tower: Tower, grids: Sequence[Grid], peak_tflops: float) -> dict[str, float]:
    """Patches lie on the device, as after decoding there; rows stay there."""
    patches = [image.to(DEVICE) for image in random_patches(grids, tower.spec.patch_values)]
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    spent = milliseconds(lambda: tower.encode(patches, grids))
    rate = sum(flops(tower.spec, grid) for grid in grids) / spent / 1e9
    return {
        "ms": spent,
        "tflops": rate,
        "of_peak": rate / peak_tflops,
        "peak_mib": (torch.cuda.max_memory_allocated(DEVICE) - before) / 2**20,
    }


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """The median over `repeats` calls, by the device's clock, after warm-up."""
    for _ in range(3):
        call()
    spent: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end))
    return sorted(spent)[repeats // 2]


if __name__ == "__main__":
    sys.exit(main())
