"""Runs one benchmark of a CUDA device; `python -m bench --device cuda` runs all, and stores their results.

    python -m bench.gpu attention --budget-s 60
    python -m bench.gpu attention --dry-run         # in tiny sizes on the CPU: all code runs, the figures mean nothing

Each measurement is printed at once, as a JSON object. A benchmark imports only the packages that it measures. Exits
non-zero if a measurement failed.
"""

import importlib
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.budget import TimeBudget


def _benchmark(name: str, limit_s: float, asks: str, *figures: Figure) -> Benchmark:
    return Benchmark(
        *(name, asks, figures, limit_s), dry_run=("--dry-run",), program="bench.gpu", in_steps=True
    )


def _of_cases(cases: Sequence[str], *figures: Figure) -> Iterator[Figure]:
    """Yield each figure of each case."""
    for case in cases:
        for each in figures:
            yield replace(each, key=f"{case}.{each.key}", what=f"{case}: {each.what}")


# The most important ones come first.
BENCHMARKS = (
    _benchmark("env", 35, "What does the machine have?"),
    _benchmark("driver", 70, "What does the driver do?"),
    _benchmark("attention", 140, "How fast and exact is each attention backend?"),
    _benchmark("products", 105, "How fast are the tower's matrix products?"),
    _benchmark("group", 35, "Does NCCL encode in a group of one?"),
    _benchmark("tests", 175, "Do the tests that need a GPU pass?"),
    _benchmark(
        *("tower", 280, "How fast is the tower on a GPU?"),
        *_of_cases(
            ("256", "8x256", "720p", "20x960x1280"),
            Figure("ms", "ours", "ms"),
            Figure("ratio", "`transformers` / ours"),
            Figure("of_square", "of the rate of a square product", "%", scale=100),
        ),
    ),
    _benchmark(
        *("load", 105, "How fast is a server on a GPU?"),
        *_of_cases(
            ("256", "720p", "photos"),
            Figure("images_s", "images a second"),
            Figure("service_over_bare_tower", "of the tower alone"),
            Figure("p99_ms", "Submit to rows, p99", "ms"),
        ),
    ),
    _benchmark(
        *("decode", 140, "How fast are JPEGs decoded on a GPU?"),
        Figure("20x960x1280, dali, 2 threads.ms", "twenty 960×1280, DALI, 2 threads", "ms", "<= 13"),
        Figure("20x960x1280, pillow, 2 threads.ms", "the same, Pillow", "ms"),
    ),
    _benchmark(
        *("server", 175, "What does a request cost on a GPU?"),
        Figure("720p.miss_ms", "new 1280×720", "ms"),
        Figure("720p.hit_ms", "hit, 1280×720, host tier", "ms"),
        Figure("720p, from the device tier.device_hit_ms", "the same, device tier to device", "ms", "<= 1"),
    ),
    _benchmark("sanitize", 140, "What does compute-sanitizer find?"),
)


def no_cuda() -> str:
    """Return why no CUDA device can be used; empty if one can."""
    import torch  # not at the top: the pages that list the benchmarks do not need it

    return "" if torch.cuda.is_available() else "torch finds no CUDA device; --dry-run runs on the CPU"


def main() -> None:
    """Run the command line. Raises `SystemExit` if a measurement failed or there is no device."""
    parser = command_line(__doc__, budget_s=math.inf)
    parser.add_argument("name", choices=[each.name for each in BENCHMARKS])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the CPU")
    args = parser.parse_args()
    budget = TimeBudget(args.budget_s)  # imports count towards it
    if not args.dry_run and (why := no_cuda()):
        sys.exit(f"bench.gpu: {why}")
    import torch

    from bench.gpu_parts.probe import Probe

    if args.dry_run:
        torch.set_num_threads(1)  # on a busy machine, two threads wait for each other
    with tempfile.TemporaryDirectory() as scratch:
        probe = Probe(budget, Path(scratch), dry=args.dry_run)
        importlib.import_module(f"bench.gpu_parts.{args.name}").run(probe)
    print_figures({"left_out": budget.left_out}, args)
    if failed := probe.failed():
        sys.exit(f"{len(failed)} failed: {'; '.join(f'{what}: {why}' for what, why in failed.items())}")


if __name__ == "__main__":
    main()
