"""Measures speed and exactness of our towers, against `transformers` and the lower bound of products and attention.

Both towers have full depth, the same seeded random weights and the same threads, and alternate in one run after a
warm-up. The lower bound of a forward is the sum of its product and attention calls, each replayed on the same tensors
and timed alone. The best replay is compared with the best forward.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from bench.harness.budget import TimeBudget
from bench.harness.results import hardware
from bench.harness.timing import seconds
from bench.harness.towers import CASES, case_grids, full_checkpoint, load_ours, work
from encoder_contract.geometry import Grid
from encoder_service.vision import Tower
from testing import real_weights
from testing.reference_tower import ReferenceTower, random_patches, row_errors

FAMILIES = {"qwen3_vl": "Qwen3-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_5": "Qwen3.5"}
OVER_BOUND = "ours / its own products and attention alone"


BENCHMARK = Benchmark(
    "vit",
    "How fast and how exact is the vision tower?",
    (
        Figure("ratio_8x256", "eight 256×256: `transformers` / ours", target=">= 1.2"),
        Figure("over_lower_bound_8x256", f"eight 256×256: {OVER_BOUND}", target="<= 1.15"),
        Figure("cases.720p.ours", "one 1280×720: ours", "ms", scale=1e3),
        Figure("ratio_720p", "one 1280×720: `transformers` / ours", target=">= 1.2"),
        Figure("over_lower_bound_720p", f"one 1280×720: {OVER_BOUND}", target="<= 1.12"),
        Figure("patch_embed_ratio", "patch embedding: Conv3d / ours", target=">= 20"),
        *(
            Figure(f"error_ratio_{kind}", f"{name}: mean bf16 error, ours / `transformers`", target="<= 1")
            for kind, name in FAMILIES.items()
        ),
        *(
            Figure(f"float32_error_{kind}", f"{name}: largest float32 row error", "millionths", "<= 10", 1e6)
            for kind, name in FAMILIES.items()
        ),
        *(
            Figure(
                f"trained.{kind}_ratio",
                f"trained, photos: {kind} bf16 error, ours / `transformers`",
                target=most,
            )
            for kind, most in (("mean", "<= 0.92"), ("p99", "<= 1"), ("worst", "<= 1"))
        ),
        Figure(
            "trained.float32.worst", "trained, photos: largest float32 row error", "millionths", "<= 10", 1e6
        ),
    ),
    limit_s=540,  # its own budget, plus the measurement that runs when the budget is used up
    arguments=("--rounds", "3"),
    dry_run=("--rounds", "1", "--cases", "256"),
)

PHOTO = (448, 336)  # 192 rows of a tower with patches of 14
Images = tuple[list[Tensor], list[Grid]]
"""Patches and grid of each image."""

BUDGET_S = 420.0  # the measurement that runs when it is used up still ends
# The share of the remaining time for the rounds of a case. The rest is for the patch embedding and for exactness.
SHARE_OF_A_CASE = 0.4


def main() -> None:
    parser = command_line(__doc__, budget_s=BUDGET_S)
    parser.add_argument(
        "--cases", nargs="+", default=("8x256", "720p"), choices=CASES, help="default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternations; the best of each counts")
    args = parser.parse_args()
    print_figures(measure(args), args)


def measure(args: Namespace) -> dict[str, Any]:
    """Return the figures that there is time for."""
    budget = TimeBudget(args.budget_s)
    folder = full_checkpoint("qwen3_vl")
    tower, reference = load_ours(folder, "bfloat16"), ReferenceTower(folder, torch.bfloat16)
    threads = torch.get_num_threads()
    print(f"{hardware()}: {threads} threads, torch {torch.__version__}, {tower.dtype}, {tower.attention}")
    result: dict[str, Any] = {"threads": threads, **cases(tower, reference, args, budget)}
    result["patch_embed_ratio"] = patch_embed_ratio(tower, reference)
    del tower, reference
    return {**result, **error_ratios(budget), **trained_errors(budget), "left_out": budget.left_out}


# Time


def cases(tower: Tower, reference: ReferenceTower, args: Namespace, budget: TimeBudget) -> dict[str, Any]:
    """Measure all cases, and print them."""
    result: dict[str, Any] = {"cases": {}}
    rows: list[list[str | float]] = []
    for name in args.cases:
        result["cases"][name] = best = best_times(tower, reference, name, args.rounds, budget)
        result[f"ratio_{name}"] = ratio = best["theirs"] / best["ours"]
        result[f"over_lower_bound_{name}"] = over = best["ours"] / best["lower_bound"]
        tflops = best["flop"] / best["ours"] / 1e12
        rows.append([name, best["ours"] * 1e3, best["theirs"] * 1e3, ratio, over, tflops])
    table("Best times", ["case", "ours ms", "theirs ms", "theirs / ours", "/ bound", "TFLOP/s"], rows)
    return result


def best_times(
    tower: Tower, reference: ReferenceTower, name: str, rounds: int, budget: TimeBudget
) -> dict[str, float]:
    """Alternate our tower, that of `transformers`, and the bound; return the best seconds of each, and the FLOP."""
    grids = case_grids(tower, name)
    patches = random_patches(grids, tower.spec.patch_values)
    pixels, shape = reference.pixels(patches).to(reference.dtype), torch.tensor(grids)

    def ours() -> None:
        tower.encode(patches, grids)

    def theirs() -> None:
        reference.forward(pixels, shape)

    # The first calls warm up. A round also replays our products and attention.
    round_s = 2 * seconds(ours) + seconds(theirs)
    rounds = budget.count(f"rounds of {name}", rounds, round_s, share=SHARE_OF_A_CASE)
    with Calls() as recorded:
        ours()
    times = [(seconds(ours), seconds(theirs), replay(recorded.calls)) for _ in range(rounds)]
    best = [min(each) for each in zip(*times, strict=True)]
    return {**dict(zip(("ours", "theirs", "lower_bound"), best, strict=True)), "flop": work(tower, name)}


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the products and attention calls of a forward, with their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; record it if it is a product or attention."""
        keywords = kwargs or {}
        counted = ("_linear_pointwise", "aten.linear", "aten.addmm", "aten.mm", "attention")
        if any(part in str(func) for part in counted):
            self.calls.append(lambda: func(*args, **keywords))
        return func(*args, **keywords)


@torch.inference_mode()
def replay(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of the calls, each timed alone."""
    return sum(map(seconds, calls))


@torch.inference_mode()
def patch_embed_ratio(tower: Tower, reference: ReferenceTower) -> float:
    """Return the time of the reference's patch embedding over that of ours, for 720p."""
    grids = case_grids(tower, "720p")
    patches = random_patches(grids, tower.spec.patch_values)
    pixels, layout = reference.pixels(patches).to(reference.dtype), tower._layouts(grids)[0]
    ours = theirs = float("inf")
    embeds: Any = tower._module.patch_embed
    for _ in range(5):
        theirs = min(theirs, seconds(lambda: reference.module.patch_embed(pixels)))
        ours = min(ours, seconds(lambda: embeds(patches[0], layout, torch.bfloat16)))
    return theirs / ours


# Exactness


def error_ratios(budget: TimeBudget) -> dict[str, float]:
    """Return the ratio of our row errors to those of `transformers` at full depth, for every family."""
    ratios = {}
    slowest_s = 0.0
    for model_type in FAMILIES:
        if not budget.affords(f"exactness of {model_type}", slowest_s):
            continue
        began = time.monotonic()
        exact, ours, theirs = errors(full_checkpoint(model_type), noise)
        slowest_s = max(slowest_s, time.monotonic() - began)
        ratios[f"error_ratio_{model_type}"] = float(ours.mean() / theirs.mean())
        ratios[f"max_error_ratio_{model_type}"] = float(ours.max() / theirs.max())
        ratios[f"float32_error_{model_type}"] = float(exact.max())
    return ratios


def trained_errors(budget: TimeBudget) -> dict[str, Any]:
    """Return statistics of row errors of a trained transformer's blocks in our tower, on photos."""
    if reason := real_weights.missing():
        print(f"no trained weights: {reason}")
        return {}
    if not budget.affords("exactness of trained weights", 0):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        exact, ours, theirs = map(statistics, errors(real_weights.write_qwen(Path(folder)), photo_patches))
    every = {"float32": exact, "bfloat16": ours, "transformers_bfloat16": theirs}
    table(
        "Row errors, trained weights, photos",
        ["", *exact],
        [[name, *each.values()] for name, each in every.items()],
    )
    return {"trained": {**every, **{f"{kind}_ratio": ours[kind] / theirs[kind] for kind in ours}}}


def statistics(errors: Tensor) -> dict[str, float]:
    """Return the mean, the 99th percentile and the largest of row errors."""
    return {"mean": float(errors.mean()), "p99": float(errors.quantile(0.99)), "worst": float(errors.max())}


def errors(folder: Path, images: Callable[[Tower], Images]) -> tuple[Tensor, Tensor, Tensor]:
    """Return row errors against `transformers` in float32: ours in float32, ours in bfloat16, its own in bfloat16."""
    tower = load_ours(folder, "float32")
    patches, grids = images(tower)
    rows = torch.cat(tower.encode(patches, grids))
    del tower
    truth_tower = ReferenceTower(folder, torch.float32)
    pixels = truth_tower.pixels(patches)
    truth = truth_tower.rows(pixels, grids)
    del truth_tower
    theirs = row_errors(ReferenceTower(folder, torch.bfloat16).rows(pixels, grids), truth)
    ours = row_errors(torch.cat(load_ours(folder, "bfloat16").encode(patches, grids)), truth)
    return row_errors(rows, truth), ours, theirs


def noise(tower: Tower) -> Images:
    """Return patches of two random images."""
    grids = [Grid(1, 16, 16), Grid(1, 20, 26)]
    return random_patches(grids, tower.spec.patch_values), grids


def photo_patches(tower: Tower) -> Images:
    """Return patches of photos and of their mirror images."""
    photos = [real_weights.pixels(file, *PHOTO) for file in real_weights.photos().values()]
    seen = [torch.from_numpy(each.copy()) for photo in photos for each in (photo, photo[:, ::-1])]
    grids = [tower.geometry.grid(*PHOTO)] * len(seen)
    return tower.inputs(seen, grids), grids


if __name__ == "__main__":
    main()
