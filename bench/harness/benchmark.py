"""Declares a benchmark and its figures, and holds the flags and the output that all benchmarks share."""

import argparse
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import bench
from bench.harness.results import ROOT

BENCHMARKS_PAGE = ROOT / "docs" / "benchmarks.md"
Table = dict[str, Any]
"""Title, heads and rows of a table that a benchmark prints and a page shows."""


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str | float]]) -> Table:
    """Print a Markdown table, numbers with three significant digits; return it for a page to show."""
    cells = [[x if isinstance(x, str) else shown(x) for x in row] for row in rows]
    print(f"\n{title}\n")
    print(markdown(heads, cells))
    return {"title": title, "heads": list(heads), "rows": cells}


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def shown(number: float) -> str:
    """Return a number with three significant digits."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number: `key` is its name in the benchmark's JSON line, dotted if it is nested.

    `target` is a bound such as "<= 2". `compare` is a figure that others have published, and its source. The page's
    table has the figures with a target and those that are `shown`; all are in the result file. `summary` is the row's
    text in the README's table; a figure without one is not in that table.
    """

    key: str
    what: str
    unit: str = ""
    target: str = ""
    scale: float = 1.0
    compare: str = ""
    shown: bool = False
    summary: str = ""

    def met(self, value: float) -> bool:
        """Return whether a value meets the target; there must be one."""
        sign, bound = self.target.split()
        return value <= float(bound) if sign == "<=" else value >= float(bound)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark, run as `python -m bench.NAME ARGUMENTS --json`: its module declares it as `BENCHMARK`.

    `why_not` returns why it cannot run here. The page's table of a benchmark without figures is the first of the
    `tables` in its JSON line.
    """

    name: str
    asks: str
    figures: tuple[Figure, ...] = ()
    limit_s: float = 60.0
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    why_not: Callable[[], str] = lambda: ""

    def command(self, *, quick: bool) -> list[str]:
        """Return the arguments of the interpreter."""
        return ["-m", f"bench.{self.name}", *(self.quick if quick else self.arguments), "--json"]


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flag that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser


def print_figures(figures: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Print the numbers among the figures, and with `--json` all figures as the last line."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    width = max(map(len, numbers), default=0)
    if numbers:
        print()
    for name, value in numbers.items():
        print(f"{name:<{width}} {shown(value):>12}")
    if left_out := figures.get("left_out"):
        print(f"left out, no time: {', '.join(left_out)}")
    if args.json:
        print(json.dumps(figures))


@cache
def benchmarks() -> tuple[Benchmark, ...]:
    """Return the benchmarks that the modules of bench/ declare, in the order of their page.

    The page begins with the questions that a release must answer: when the time runs out, the last ones are left out.
    """
    names = [module.name for module in pkgutil.iter_modules(bench.__path__) if not module.ispkg]
    found: list[Benchmark] = [
        importlib.import_module(f"bench.{name}").BENCHMARK for name in names if name != "__main__"
    ]
    on_page = re.findall(r"<!-- bench:(\w+) -->", BENCHMARKS_PAGE.read_text())
    return tuple(
        sorted(found, key=lambda each: on_page.index(each.name) if each.name in on_page else len(on_page))
    )
