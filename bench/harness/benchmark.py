"""Declares a benchmark and its figures, and holds the flags and the output that all benchmarks share."""

import argparse
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import bench
from bench.harness.results import ROOT

DEVICES = ("cpu", "cuda")
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
    """A measured number that the page's table has: `key` is its name in the JSON line, dotted if it is nested.

    `target` is a bound such as "<= 2". `compare` is a figure that others have published, and its source. `summary` is
    the row's text in the README's table; a figure without one is not in that table. `part` is the only part of the
    result that the figure depends on, a key of the figures' `Benchmark.parts`. The result file also has what was
    measured beside the figures.
    """

    key: str
    what: str
    unit: str = ""
    target: str = ""
    scale: float = 1.0
    compare: str = ""
    summary: str = ""
    part: str = ""

    def met(self, value: float) -> bool:
        """Return whether a value meets the target; there must be one."""
        sign, bound = self.target.split()
        return value <= float(bound) if sign == "<=" else value >= float(bound)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark, run as `python -m bench.NAME ARGUMENTS --json`: its module declares it as `BENCHMARK`.

    `why_not` returns why it cannot run here. `dry_run` replaces the arguments by those of tiny sizes. `program` is the
    module if that has several benchmarks. The page's table of a benchmark without figures is the first of its `tables`.

    A benchmark `in_steps` takes `--budget-s`, after which no measurement begins, and prints each measurement at once as
    a JSON object. What it measured is stored even if it fails or is stopped.

    `parts` is the key of what a run may measure anew and leave as it is, by name, each with `measured_at` and `commit`.
    """

    name: str
    asks: str
    figures: tuple[Figure, ...] = ()
    limit_s: float = 60.0
    arguments: tuple[str, ...] = ()
    dry_run: tuple[str, ...] = ()
    why_not: Callable[[], str] = lambda: ""
    program: str = ""
    in_steps: bool = False
    parts: str = ""

    @property
    def typed(self) -> str:
        """What a reader types after `python -m`."""
        return f"{self.program} {self.name}" if self.program else f"bench.{self.name}"

    @property
    def file(self) -> str:
        """The source of what it measures."""
        return f"bench/gpu_parts/{self.name}.py" if self.program else f"bench/{self.name}.py"

    def command(self, *, dry_run: bool, budget_s: float = 0.0) -> list[str]:
        """Return the arguments of the interpreter; `budget_s` is for a benchmark in steps."""
        budget = ["--budget-s", str(round(budget_s, 1))] if self.in_steps else []
        arguments = self.dry_run if dry_run else self.arguments
        return ["-m", *self.typed.split(), *arguments, *budget, "--json"]


def command_line(description: str | None, *, budget_s: float | None = None) -> argparse.ArgumentParser:
    """Return a parser with the flag that all benchmarks have, and `--budget-s` for one that has a default of it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    if budget_s is not None:
        parser.add_argument(
            "--budget-s",
            type=float,
            default=budget_s,
            help="no measurement begins later (default: %(default)s)",
        )
    return parser


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print the name of a step of a slow benchmark, and how long it took."""
    print(f"{what} ...", flush=True)
    began = monotonic()
    yield
    print(f"{what}: {monotonic() - began:.0f} s", flush=True)


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


def names(device: str) -> list[str]:
    """Return the names of the benchmarks of a device, the most important ones first; import none of them.

    Those of "cpu" come in the order of their page, which begins with the questions that a release must answer: when the
    time runs out, the last ones are left out.
    """
    if device == "cuda":
        return [each.name for each in _of_cuda()]
    found = {each.name for each in pkgutil.iter_modules(bench.__path__) if not each.ispkg} - {
        "__main__",
        "gpu",
    }
    on_page = re.findall(r"<!-- bench:(\w+) -->", BENCHMARKS_PAGE.read_text())
    return sorted(found, key=lambda name: on_page.index(name) if name in on_page else len(on_page))


def benchmark(name: str) -> Benchmark:
    """Return a benchmark; import its module, but not those of others, whose packages may be missing."""
    found: Benchmark | None = next((each for each in _of_cuda() if each.name == name), None)
    return found or importlib.import_module(f"bench.{name}").BENCHMARK


def benchmarks() -> tuple[Benchmark, ...]:
    """Return the benchmarks of all devices."""
    return tuple(benchmark(name) for device in DEVICES for name in names(device))


def _of_cuda() -> tuple[Benchmark, ...]:
    found: tuple[Benchmark, ...] = importlib.import_module("bench.gpu").BENCHMARKS  # it imports this module
    return found
