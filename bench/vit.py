"""How fast and exact the vision towers are: ours, `transformers`, and the lower bound of our products and attention.

Same weights, same threads, alternating in one run after warm-up; full depth, seeded random weights. The lower bound of
a forward is every product and attention call it makes, replayed one by one on the same tensors and timed alone; the
best replay counts, as does the best forward. (`luckiest` counts each call with its own best time instead: with a
thousand calls that is several percent below any replay.) Our products carry their activation or residual sum as an
epilogue; the bare one leaves those out, so what they cost shows there.
"""

# Over 300 lines because all of it shares two towers and one measure of time.

import argparse
import ctypes
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.budget import DEFAULT_S, Budget
from bench.harness.results import hardware
from bench.tower import parts
from bench.tower.lower_bound import Calls, LowerBound, best_of, clock, seconds
from encoder_contract.geometry import Grid
from encoder_service.image.processor import ProcessorSettings
from encoder_service.vision import Tower, flops, load_tower
from testing.checkpoints import write_checkpoint
from testing.reference_tower import ReferenceTower, random_patches, row_errors


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

# Name → (width, height, images).
CASES = {
    "256": (256, 256, 1),
    "8x256": (256, 256, 8),
    "560": (560, 560, 1),
    "720p": (1280, 720, 1),
    "960x1280": (960, 1280, 1),
    "1080p": (1920, 1080, 1),
    "1440p": (2560, 1440, 1),
    "20x960x1280": (960, 1280, 20),
}
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


def work(tower: Tower, case: str) -> int:
    """Return the FLOP of a forward of a case."""
    return sum(flops(tower.spec, grid) for grid in case_grids(tower, case))


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


def full_checkpoint(model_type: str) -> Path:
    """A checkpoint of the published tower, written once per machine."""
    folder = Path(tempfile.gettempdir()) / "encoder-service-bench" / model_type
    if not (folder / "model.safetensors").is_file() or not (folder / "tokenizer.json").is_file():
        print(f"writing {folder} ...", flush=True)
        write_checkpoint(folder, model_type, vision_only=True)
    return folder


def load_ours(folder: Path, dtype: str, **options: Any) -> Tower:
    """Our tower of a folder, on the CPU."""
    processor = ProcessorSettings.from_folder(folder)
    return load_tower(folder, device="cpu", dtype=dtype, processor=processor, **options)


def case_grids(tower: Tower, name: str) -> list[Grid]:
    """The grids of a case."""
    width, height, images = CASES[name]
    side = tower.spec.patch_size * tower.spec.merge_size
    return [Grid(1, 2 * round(height / side), 2 * round(width / side))] * images


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


def peak_bytes(call: Callable[[], None]) -> int:
    """How far the process's memory rises during a call."""
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what the allocator kept of earlier work would hide what this call needs
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """A memory figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


if __name__ == "__main__":
    main()
