"""Runs the benchmarks that this machine can run, and stores their results in bench/results/.

    python -m bench --only NAME NAME                # make bench ONLY='NAME NAME'
    python -m bench --device cuda --out FOLDER      # then, where the pages are written: cp FOLDER/*.json bench/results/

`python -m docs.benchmarks` then writes the tables of the pages. A benchmark that fails or takes too long is reported,
and the others still run. It stores nothing, but those of a CUDA device store what they measured until then.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from os.path import relpath
from pathlib import Path
from time import monotonic

from bench.gpu import no_cuda
from bench.harness.benchmark import DEVICES, Benchmark, benchmark, names
from bench.harness.results import BUSY, FOLDER, NOT_RUN, OK, Result, changed_files, hardware, load, store
from bench.harness.runner import LOGS, not_run, run

LIMIT_S = 19 * 60.0  # a run of all benchmarks may take twenty minutes
DRY_LIMIT_S = 86_400.0  # a busy machine skips nothing
WORTH_STARTING_S = 15.0
SHOWN_FILES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a benchmark failed, 2 if code is not committed or CUDA is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    lists = (f"of {device}: {', '.join(names(device))}" for device in DEVICES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some of these; {'; '.join(lists)}")
    parser.add_argument(
        "--budget-s",
        type=float,
        help=f"shared by all in proportion to their limits (default: {LIMIT_S:.0f}, the last ones are left out)",
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for the results (default: bench/results)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, CUDA on the CPU; store nothing")
    parser.add_argument("--dirty", action="store_true", help="measure code that is not committed")
    args = parser.parse_args(arguments)
    known = names(args.device)
    wanted = args.only or known
    if unknown := sorted({*wanted} - {*known}):
        parser.error(f"no benchmark of {args.device}: {', '.join(unknown)}; there are {', '.join(known)}")
    # Benchmarks run in their own sessions. Exit by an exception, so that the runner stops them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    why = no_cuda() if args.device == "cuda" else ""
    why = why or ("" if args.dirty else refusal(changed_files()))
    if why and not args.dry_run:
        print(f"python -m bench: {why}", file=sys.stderr)
        return 2
    chosen = [benchmark(name) for name in known if name in wanted]
    results = measure(chosen, dry_run=args.dry_run, budget_s=args.budget_s, folder=args.out)
    return int(any(result.status not in (OK, NOT_RUN) for result in results))


def refusal(changed: Sequence[str]) -> str:
    """Return why code that is not committed is not measured; empty if all is committed."""
    if not changed:
        return ""
    more = [f"and {len(changed) - SHOWN_FILES} more"] if len(changed) > SHOWN_FILES else []
    files = ", ".join([*changed[:SHOWN_FILES], *more])
    return (
        f"{files} not committed, so the results would belong to no commit. "
        "Commit first, or measure anyway with --dirty (make bench DIRTY=1)."
    )


def measure(
    chosen: Sequence[Benchmark], *, dry_run: bool, budget_s: float | None = None, folder: Path = FOLDER
) -> list[Result]:
    """Run benchmarks one by one, store each result in `folder` at once, and print progress."""
    machine, began, results = hardware(), monotonic(), list[Result]()
    logs = LOGS if folder == FOLDER else folder
    print(f"{machine}; output of each benchmark in {relpath(logs)}/", flush=True)
    if load() > BUSY:
        print(f"the machine is busy (load {load():.1f} a core): times will be too long", flush=True)
    for number, each in enumerate(chosen):
        print(f"[{number + 1}/{len(chosen)}] {each.name}: {each.asks}", flush=True)
        elapsed_s = monotonic() - began
        limit_s = DRY_LIMIT_S if dry_run else _limit_s(chosen[number:], elapsed_s, budget_s)
        keep: Callable[[Result], Path | None] = (lambda _: None) if dry_run else partial(store, folder=folder)
        if why := each.why_not() or ("" if limit_s else f"no time left; run it with --only {each.name}"):
            result = not_run(each, machine, why)
        else:
            result = run(each, machine, dry_run=dry_run, limit_s=limit_s, logs=logs, so_far=keep)
        results.append(result)
        print(f"  {result.seconds:.0f} s, {result.status}{result.error and f': {result.error}'}", flush=True)
        if (result.status == OK or (each.in_steps and result.figures)) and (path := keep(result)):
            commit = result.versions["commit"]
            print(f"  {relpath(path)}: {machine}; {result.measured_at}, commit {commit}", flush=True)
    print(f"{monotonic() - began:.0f} s in all")
    return results


def _limit_s(left: Sequence[Benchmark], elapsed_s: float, budget_s: float | None) -> float:
    """Return how long the first of the benchmarks that are left may take; 0 if it is not worth starting."""
    if budget_s is not None:
        return max(budget_s - elapsed_s, 0) * left[0].limit_s / sum(each.limit_s for each in left)
    left_s = LIMIT_S - elapsed_s
    return min(left[0].limit_s, left_s) if left_s >= WORTH_STARTING_S else 0.0


if __name__ == "__main__":
    sys.exit(main())
