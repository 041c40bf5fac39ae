"""How fast and exact the vision towers are: ours, `transformers`, and the lower bound of our products and attention.

Same weights, same threads, alternating in one run after warm-up; full depth, seeded random weights. The lower bound of
a forward is every product and attention call it makes, replayed one by one on the same tensors and timed alone; the
best replay counts, as does the best forward. (`luckiest` counts each call with its own best time instead: with a
thousand calls that is several percent below any replay.) Our products carry their activation or residual sum as an
epilogue; the bare one leaves those out, so what they cost shows there.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.budget import DEFAULT_S, Budget
from bench.harness.peak_memory import peak_bytes
from bench.harness.results import hardware
from bench.tower import parts
from bench.tower.cases import CASES, case_grids, full_checkpoint, load_ours, work
from bench.tower.exactness import error_ratios
from bench.tower.lower_bound import Calls, LowerBound, best_of, clock, seconds
from encoder_contract.geometry import Grid
from encoder_service.vision import Tower, flops
from testing.reference_tower import ReferenceTower, random_patches


def _case_figures(name: str, says: str) -> tuple[Figure, ...]:
    least_ratio, most_over_lower_bound = {"720p": (">= 1.2", "<= 1.12"), "8x256": (">= 1.2", "<= 1.15")}.get(
        name, ("", "")
    )
    quoted = (
        "one 1280×720 image through the tower: `transformers` / ours",
        "the same: ours / its own products and attention",
    )
    in_summary = quoted if name == "720p" else ("", "")
    return (
        Figure(f"cases.{name}.ours", f"{says}: ours", "ms", scale=1e3),
        Figure(f"ratio_{name}", f"{says}: `transformers` / ours", target=least_ratio, summary=in_summary[0]),
        Figure(
            f"over_lower_bound_{name}",
            f"{says}: ours / its own products and attention",
            target=most_over_lower_bound,
            summary=in_summary[1],
        ),
        Figure(f"over_luckiest_bound_{name}", f"{says}: the same, each call with its own best time"),
    )


BENCHMARK = Benchmark(
    "vit",
    "How fast and how exact is the vision tower?",
    (
        Figure("product_tflops", "best matrix product of this machine", "TFLOP/s"),
        *_case_figures("256", "one 256×256"),
        *_case_figures("8x256", "eight 256×256"),
        *_case_figures("560", "one 560×560"),
        *_case_figures("720p", "one 1280×720"),
        *_case_figures("960x1280", "one 960×1280"),
        Figure("in_step_ratio", "eight 256×256: one by one / in step"),
        Figure("patch_embed_ratio", "patch embedding: Conv3d / ours", target=">= 20"),
        Figure("error_ratio_qwen3_vl", "Qwen3-VL: mean bf16 error, ours / `transformers`", target="<= 1"),
        Figure("error_ratio_qwen2_5_vl", "Qwen2.5-VL: the same", target="<= 1"),
        Figure("error_ratio_qwen3_5", "Qwen3.5: the same", target="<= 1"),
        *(
            Figure(f"float32_error_{kind}", f"{name}: largest float32 row error", "millionths", "<= 10", 1e6)
            for kind, name in (("qwen3_vl", "Qwen3-VL"), ("qwen2_5_vl", "Qwen2.5-VL"), ("qwen3_5", "Qwen3.5"))
        ),
    ),
    limit_s=540,  # its own budget, and what was under way when that was used up
    arguments=("--rounds", "3"),
    quick=("--rounds", "1", "--cases", "256"),
)

QUICK = ("256", "8x256", "560", "720p", "960x1280")
# What a slow machine measures first: the cases whose ratios have targets.
WITH_TARGETS = ("720p", "8x256")
PACE_CASE = "256"
# Of the time that is left, for cases; the rest is for what the tower's choices rest on, and for its exactness.
SHARE_OF_CASES = 0.5
# A round in forwards: each tower's own, and their products and attention again, ours twice.
OURS_IN_ROUND, THEIRS_IN_ROUND = 3, 2
# Of a round: one forward of each under a profiler, and one of ours.
STAGES_OF_A_ROUND, OURS_OF_A_ROUND = 1.0, 0.2

HEADER = (
    f"{'case':>12} {'ours ms':>8} {'theirs':>8} {'ratio':>8} {'/bound':>8} {'luckiest':>8} {'/bare':>8}"
    f" {'theirs':>8} {'TFLOP/s':>8} {'of peak':>8} {'MB':>6} {'theirs':>7}"
)


@dataclass(frozen=True)
class Timing:
    """Best times of one case, in seconds, and what our forward took beyond what it holds between calls."""

    ours: float
    theirs: float
    lower_bound: float
    luckiest_bound: float
    bare_bound: float
    their_bound: float
    flop: int
    our_peak_bytes: int
    their_peak_bytes: int

    def ratios(self) -> dict[str, float]:
        """Ours over each lower bound, and theirs over ours."""
        return {
            "ratio": self.theirs / self.ours,
            "over_lower_bound": self.ours / self.lower_bound,
            "over_luckiest_bound": self.ours / self.luckiest_bound,
            "over_bare_bound": self.ours / self.bare_bound,
            "their_over_bound": self.theirs / self.their_bound,
        }

    def row(self, name: str, peak: float) -> str:
        """One line of the table; `peak` in FLOP/s."""
        rate = self.flop / self.ours
        ratios = " ".join(f"{ratio:8.3f}" for ratio in self.ratios().values())
        memory = f"{self.our_peak_bytes / 2**20:6.0f} {self.their_peak_bytes / 2**20:7.0f}"
        times = f"{name:>12} {self.ours * 1e3:8.0f} {self.theirs * 1e3:8.0f}"
        return f"{times} {ratios} {rate / 1e12:8.2f} {rate / peak:8.0%} {memory}"


def main() -> None:
    """Measure what was asked for, print the tables, and one JSON object as the last line."""
    options = parse()
    if options.busy:
        options.threads, clock.now = 1, time.thread_time
    torch.set_num_threads(options.threads)
    budget = Budget(options.budget_s)
    folder = full_checkpoint("qwen3_vl")
    tower, reference = load_ours(folder, "bfloat16"), ReferenceTower(folder, torch.bfloat16)
    print(
        f"{hardware()}: {options.threads} threads, torch {torch.__version__}, {tower.dtype}, {tower.attention}"
    )
    result: dict[str, Any] = {"threads": options.threads}
    pace = pace_of(tower, reference)
    result |= cases(tower, reference, options, budget, pace)
    result["patch_embed_ratio"] = patch_embed_ratio(tower, reference)
    result["tables"] = []
    if budget.affords("time by stage", STAGES_OF_A_ROUND * pace * work(tower, "720p")):
        result["tables"].append(stage_table(tower, reference, case_grids(tower, "720p")))
    in_step_s = OURS_OF_A_ROUND * pace * work(tower, "8x256")
    if budget.affords("one by one and in step", 2 * in_step_s):
        rounds = budget.count("rounds in step", options.rounds, 2 * in_step_s, share=0.5)
        result["in_step_ratio"] = in_step_ratio(tower, case_grids(tower, "8x256"), rounds)
    del tower, reference
    result |= error_ratios(budget)
    if budget.affords("products and parts of a block", parts.LONGEST_S):
        result["tables"] += parts.tables()
    for table in result["tables"]:
        parts.show(table)
    result["left_out"] = budget.left_out
    if budget.left_out:
        print(f"\nleft out, no time: {'; '.join(budget.left_out)}")
    print(json.dumps(result))


def cases(
    tower: Tower, reference: ReferenceTower, options: argparse.Namespace, budget: Budget, pace: float
) -> dict[str, Any]:
    """Measure the cases that there is time for, and print them."""
    peak = product_peak()
    print(f"best product: {peak / 1e12:.2f} TFLOP/s\n\n{HEADER}")
    round_s = {name: pace * work(tower, name) for name in options.cases}
    rounds, chosen = budget.choose(round_s, options.rounds, first=WITH_TARGETS, share=SHARE_OF_CASES)
    result: dict[str, Any] = {"product_tflops": peak / 1e12, "rounds": rounds, "cases": {}}
    for name in chosen:
        timing = measure(tower, reference, case_grids(tower, name), rounds)
        print(timing.row(name, peak), flush=True)
        result |= {f"{key}_{name}": ratio for key, ratio in timing.ratios().items()}
        result["cases"][name] = vars(timing)
    return result


def pace_of(tower: Tower, reference: ReferenceTower) -> float:
    """Return the seconds for each FLOP of a round: what the smallest case takes, once both are warm."""
    grids = case_grids(tower, PACE_CASE)
    patches = random_patches(grids, tower.spec.patch_values)
    pixels, shape = reference.pixels(patches).to(reference.dtype), torch.tensor(grids)
    for _ in range(2):
        ours_s = seconds(lambda: tower.encode(patches, grids))
        theirs_s = seconds(lambda: reference.forward(pixels, shape))
    return (OURS_IN_ROUND * ours_s + THEIRS_IN_ROUND * theirs_s) / work(tower, PACE_CASE)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", nargs="+", default=QUICK, choices=list(CASES), help="default: what a CPU can do"
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternations; the best of each counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--budget-s", type=float, default=DEFAULT_S, help="for all of it (default %(default)s)"
    )
    parser.add_argument(
        "--busy", action="store_true", help="for a machine others use: one thread, its own CPU time"
    )
    parser.add_argument(
        "--json", action="store_true", help="accepted for symmetry: the last line always is JSON"
    )
    return parser.parse_args()


def measure(tower: Tower, reference: ReferenceTower, grids: Sequence[Grid], rounds: int) -> Timing:
    """Alternate ours, theirs and both lower bounds."""
    patches = random_patches(grids, tower.spec.patch_values)
    pixels, shape = reference.pixels(patches).to(reference.dtype), torch.tensor(grids)

    def ours() -> None:
        tower.encode(patches, grids)

    def theirs() -> None:
        reference.forward(pixels, shape)

    our_peak, their_peak = peak_bytes(ours), peak_bytes(theirs)  # which warms both up
    with Calls() as recorded:
        ours()
    with Calls() as their_recorded:
        theirs()
    whole, bare, theirs_alone = (
        LowerBound(calls) for calls in (recorded.calls, recorded.bare, their_recorded.calls)
    )
    fastest = their_fastest = float("inf")
    for _ in range(rounds):
        fastest = min(fastest, seconds(ours))
        their_fastest = min(their_fastest, seconds(theirs))
        for alone in (whole, bare, theirs_alone):
            alone.replay()
    flop = sum(flops(tower.spec, grid) for grid in grids)
    bounds = whole.best, whole.luckiest, bare.best, theirs_alone.best
    return Timing(fastest, their_fastest, *bounds, flop, our_peak, their_peak)


@torch.inference_mode()
def product_peak() -> float:
    """The best rate of a bfloat16 product here, FLOP/s: the towers' widest, in several numbers of rows."""
    weight = torch.randn(4304, 1152).bfloat16()
    best = 0.0
    for rows in (256, 512, 1024, 2048, 4096):
        x = torch.randn(rows, 1152).bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        product = torch.ops.mkldnn._linear_pointwise.default
        fastest = best_of(20, lambda: product(x, packed, None, "none", [], ""))  # noqa: B023
        best = max(best, 2 * rows * weight.numel() / fastest)
    return best


def stage_table(tower: Tower, reference: ReferenceTower, grids: Sequence[Grid]) -> parts.Table:
    """Where one forward's time goes, by kind of operation."""
    patches = random_patches(grids, tower.spec.patch_values)
    pixels, shape = reference.pixels(patches).to(reference.dtype), torch.tensor(grids)
    ours = parts.stages(lambda: tower.encode(patches, grids))
    theirs = parts.stages(lambda: reference.forward(pixels, shape))
    rows = [[name, f"{ours[name]:.0f}", f"{theirs[name]:.0f}"] for name in ours]
    return {"title": "One 1280×720 by stage, ms", "heads": ["", "ours", "`transformers`"], "rows": rows}


def in_step_ratio(tower: Tower, grids: Sequence[Grid], rounds: int) -> float:
    """The time of images one after the other over that of the same images in one batch."""
    patches = random_patches(grids, tower.spec.patch_values)
    each = together = float("inf")
    for _ in range(rounds):
        images = zip(patches, grids, strict=True)
        each = min(each, sum(seconds(lambda: tower.encode([image], [grid])) for image, grid in images))  # noqa: B023
        together = min(together, seconds(lambda: tower.encode(patches, grids)))
    print(f"\n{len(grids)} images of 256×256 one by one {each * 1e3:.0f} ms, in step {together * 1e3:.0f} ms")
    return each / together


@torch.inference_mode()
def patch_embed_ratio(tower: Tower, reference: ReferenceTower) -> float:
    """The time of the reference's convolution over ours for 720p: from what each is handed to embeddings."""
    grids = case_grids(tower, "720p")
    patches = random_patches(grids, tower.spec.patch_values)
    pixels, layout = reference.pixels(patches).to(reference.dtype), tower._layouts(grids)[0]
    ours = theirs = float("inf")
    embeds: Any = tower._module.patch_embed
    for _ in range(5):
        theirs = min(theirs, seconds(lambda: reference.module.patch_embed(pixels)))
        ours = min(ours, seconds(lambda: embeds(patches[0], layout, torch.bfloat16)))
    print(
        f"\npatch embed at 720p: ours {ours * 1e3:.1f} ms, Conv3d {theirs * 1e3:.1f} ms, {theirs / ours:.0f}×"
    )
    return theirs / ours


if __name__ == "__main__":
    main()
