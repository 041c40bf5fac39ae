"""Runs the benchmarks that this machine can run, prints a table for each, and keeps the results.

Results go to bench/results/DATE-HARDWARE.json; the tables in docs/benchmarks.md and README.md are rewritten from the
newest results of every machine. A benchmark that fails or takes too long is reported, and the others still run.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from time import monotonic

from bench.harness.benchmark import Benchmark, benchmarks
from bench.harness.report import BUSY, caption, rewrite, table_of
from bench.harness.results import (
    ROOT,
    Result,
    changed_files,
    hardware,
    keep,
    load,
    newest,
    of_unknown_commits,
    path_of,
)
from bench.harness.runner import LOGS, not_run, run

LIMIT_S = 19 * 60.0  # a run of all benchmarks may take twenty minutes
WORTH_STARTING_S = 15.0
SHOWN_FILES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a benchmark failed, 2 if the code has uncommitted changes."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=(names := [each.name for each in benchmarks()]),
        help=f"some of: {', '.join(names)}",
    )
    parser.add_argument("--quick", action="store_true", help="smoke test: tiny sizes, kept out of the pages")
    parser.add_argument("--dirty", action="store_true", help="measure code that is not committed")
    parser.add_argument("--pages-only", action="store_true", help="rewrite the pages from the stored results")
    args = parser.parse_args(arguments)
    # Benchmarks run in their own sessions. Exit by an exception, so that the runner stops them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: list[Result] = []
    if args.pages_only:
        rewrite(newest())
    elif (changed := changed_files()) and not (args.dirty or args.quick):
        print(refusal(changed), file=sys.stderr)
        return 2
    else:
        chosen = [each for each in benchmarks() if not args.only or each.name in args.only]
        results = measure(chosen, quick=args.quick)
    print(to_measure_again(of_unknown_commits(newest())), end="")
    return int(any(result.status.startswith(("failed", "timed out")) for result in results))


def refusal(changed: Sequence[str]) -> str:
    """Return the message for code that is not committed."""
    more = [f"and {len(changed) - SHOWN_FILES} more"] if len(changed) > SHOWN_FILES else []
    files = ", ".join([*changed[:SHOWN_FILES], *more])
    return (
        f"make bench: {files} not committed, so the results would belong to no commit. "
        "Commit first, or measure anyway with --dirty (make bench DIRTY=1)."
    )


def to_measure_again(results: Sequence[Result]) -> str:
    """Return a message that lists results whose commits are missing here; empty if there are none."""
    if not results:
        return ""
    lines = [f"  {r.benchmark} on {r.hardware} ({r.measured_on}): {r.versions['commit']}" for r in results]
    title = "Measure these again: their commits are not in this repository's history."
    return "\n".join(["", title, *lines, ""])


def measure(chosen: Sequence[Benchmark], *, quick: bool) -> list[Result]:
    """Run benchmarks one by one and keep each result at once; print progress, then the tables."""
    machine, began = hardware(), monotonic()
    path = path_of(machine, quick=quick)
    print(f"{machine}; output of each benchmark in {LOGS.relative_to(ROOT)}/", flush=True)
    if load() > BUSY:
        print(f"the machine is busy (load {load():.1f} a core): times will be too long", flush=True)
    results = []
    for number, benchmark in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {benchmark.name}: {benchmark.asks} ", end="", flush=True)
        result = _run(benchmark, machine, quick, LIMIT_S - (monotonic() - began))
        print(f"{result.seconds:.0f} s, {result.status}", flush=True)
        keep(path, result)
        if not quick:
            rewrite(
                newest()
            )  # after each result, so that an interrupted run leaves pages that match the results
        results.append(result)
    for benchmark, result in zip(chosen, results, strict=True):
        print(f"\n{benchmark.asks}\n{caption(result)}\n\n{table_of(benchmark, result)}")
    print(f"\n{monotonic() - began:.0f} s in all; wrote {path.relative_to(ROOT)}")
    return results


def _run(benchmark: Benchmark, machine: str, quick: bool, left_s: float) -> Result:
    if why := benchmark.why_not():
        return not_run(benchmark, machine, why)
    if left_s < WORTH_STARTING_S:
        return not_run(benchmark, machine, f"no time left; run it with --only {benchmark.name}")
    return run(benchmark, machine, quick=quick, limit_s=min(benchmark.limit_s, left_s))


if __name__ == "__main__":
    sys.exit(main())
