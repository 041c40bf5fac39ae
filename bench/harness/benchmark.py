"""What a benchmark declares, the flags and the output that all of them share, and which there are."""

import argparse
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import bench
from bench.harness.results import ROOT
from bench.harness.tables import shown

PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of a table: `key` is a name in the benchmark's JSON line, dotted where that is nested.

    `target` is a bound such as "<= 2"; `compare` is what others published for it, and where; `summary` is what the
    README's table says of it, where it is in that table.
    """

    key: str
    what: str
    unit: str = ""
    target: str = ""
    scale: float = 1.0
    compare: str = ""
    summary: str = ""

    def met(self, value: float) -> bool:
        """Whether a value keeps the target; there must be one."""
        sign, bound = self.target.split()
        return value <= float(bound) if sign == "<=" else value >= float(bound)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark, run as `python -m bench.NAME ARGUMENTS --json`: its module declares it as `BENCHMARK`.

    `why_not` says why it cannot run here; `shown_as` makes the table of one whose results are no list of figures.
    """

    name: str
    asks: str
    figures: tuple[Figure, ...] = ()
    limit_s: float = 60.0
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    why_not: Callable[[], str] = lambda: ""
    shown_as: Callable[[Mapping[str, Any]], str] | None = None

    def command(self, *, quick: bool) -> list[str]:
        """Return the arguments of the interpreter."""
        return ["-m", f"bench.{self.name}", *(self.quick if quick else self.arguments), "--json"]


def command_line(what: str | None) -> argparse.ArgumentParser:
    """Return a benchmark's parser, with the flag that all of them take."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser


def print_figures(figures: Mapping[str, Any], given: argparse.Namespace) -> None:
    """Print the numbers among the figures, and with `--json` all figures as the last line."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    width = max(map(len, numbers), default=0)
    if numbers:
        print()
    for name, value in numbers.items():
        print(f"{name:<{width}} {shown(value):>12}")
    if left_out := figures.get("left_out"):
        print(f"left out, no time: {', '.join(left_out)}")
    if given.json:
        print(json.dumps(figures))


@cache
def benchmarks() -> tuple[Benchmark, ...]:
    """Return the benchmarks, which the modules of bench/ declare, in the order of their page.

    It begins with what a release must know: when the time runs out, the last ones are left.
    """
    names = [module.name for module in pkgutil.iter_modules(bench.__path__) if not module.ispkg]
    found: list[Benchmark] = [
        importlib.import_module(f"bench.{name}").BENCHMARK for name in names if name != "__main__"
    ]
    on_page = re.findall(r"<!-- bench:(\w+) -->", PAGE.read_text())
    return tuple(
        sorted(found, key=lambda each: on_page.index(each.name) if each.name in on_page else len(on_page))
    )


def benchmark_of(name: str) -> Benchmark:
    """Return a benchmark by its name."""
    return next(each for each in benchmarks() if each.name == name)
