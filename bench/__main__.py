"""Runs the benchmarks that this machine can run, and stores their results in bench/results/.

`python -m docs.benchmarks` then writes the tables of the pages. A benchmark that fails or takes too long is reported
and stores nothing, and the others still run.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from time import monotonic

from bench.harness.benchmark import Benchmark, benchmarks
from bench.harness.results import BUSY, NOT_RUN, OK, ROOT, Result, changed_files, hardware, load, store
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
    parser.add_argument("--quick", action="store_true", help="smoke test: tiny sizes, stores nothing")
    parser.add_argument("--dirty", action="store_true", help="measure code that is not committed")
    args = parser.parse_args(arguments)
    # Benchmarks run in their own sessions. Exit by an exception, so that the runner stops them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if (changed := changed_files()) and not (args.dirty or args.quick):
        print(refusal(changed), file=sys.stderr)
        return 2
    chosen = [each for each in benchmarks() if not args.only or each.name in args.only]
    return int(any(result.status not in (OK, NOT_RUN) for result in measure(chosen, quick=args.quick)))


def refusal(changed: Sequence[str]) -> str:
    """Return the message for code that is not committed."""
    more = [f"and {len(changed) - SHOWN_FILES} more"] if len(changed) > SHOWN_FILES else []
    files = ", ".join([*changed[:SHOWN_FILES], *more])
    return (
        f"make bench: {files} not committed, so the results would belong to no commit. "
        "Commit first, or measure anyway with --dirty (make bench DIRTY=1)."
    )


def measure(chosen: Sequence[Benchmark], *, quick: bool) -> list[Result]:
    """Run benchmarks one by one, store each result at once, and print progress."""
    machine, began = hardware(), monotonic()
    print(f"{machine}; output of each benchmark in {LOGS.relative_to(ROOT)}/", flush=True)
    if load() > BUSY:
        print(f"the machine is busy (load {load():.1f} a core): times will be too long", flush=True)
    results = []
    for number, benchmark in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {benchmark.name}: {benchmark.asks} ", end="", flush=True)
        result = _run(benchmark, machine, quick, LIMIT_S - (monotonic() - began))
        results.append(result)
        print(f"{result.seconds:.0f} s, {result.status}{result.error and f': {result.error}'}", flush=True)
        if result.status == OK and not quick:
            print(f"  wrote {store(result).relative_to(ROOT)}", flush=True)
    print(f"{monotonic() - began:.0f} s in all")
    return results


def _run(benchmark: Benchmark, machine: str, quick: bool, left_s: float) -> Result:
    if why := benchmark.why_not():
        return not_run(benchmark, machine, why)
    if left_s < WORTH_STARTING_S:
        return not_run(benchmark, machine, f"no time left; run it with --only {benchmark.name}")
    return run(benchmark, machine, quick=quick, limit_s=min(benchmark.limit_s, left_s))


if __name__ == "__main__":
    sys.exit(main())
