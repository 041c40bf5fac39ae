"""The benchmarks there are: every module of bench/ declares one as `BENCHMARK`."""

import importlib
import pkgutil
import re
from functools import cache

import bench
from bench.harness.benchmark import Benchmark
from bench.harness.results import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


@cache
def benchmarks() -> tuple[Benchmark, ...]:
    """Return them in the order of their page.

    It begins with what a release must know: when the time runs out, the last ones are left.
    """
    names = [module.name for module in pkgutil.iter_modules(bench.__path__) if not module.ispkg]
    found: list[Benchmark] = [
        importlib.import_module(f"bench.{name}").BENCHMARK for name in names if name != "__main__"
    ]
    shown = re.findall(r"<!-- bench:(\w+) -->", PAGE.read_text())
    return tuple(sorted(found, key=lambda each: shown.index(each.name) if each.name in shown else len(shown)))


def benchmark_of(name: str) -> Benchmark:
    """Return a benchmark by its name."""
    return next(each for each in benchmarks() if each.name == name)
