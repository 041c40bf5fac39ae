"""Writes the results of the benchmarks into docs/benchmarks.md, a table for each question, and a few into README.md.

`python -m docs.benchmarks` writes. With `--check`, it changes nothing and fails if a page and the results differ.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.benchmark import BENCHMARKS_PAGE, Benchmark, Figure, benchmarks, markdown
from bench.harness.results import BUSY, DIRTY, ROOT, Result, stored

PAGES = (BENCHMARKS_PAGE, ROOT / "README.md")
SUMMARY_ROWS = 7  # the README quotes at most this many
ABSENT = "–"
_MARKED = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def section(benchmark: Benchmark, results: Sequence[Result]) -> str:
    """Return the table of a question, with a column for each kind of machine, and how each column was measured.

    A benchmark without figures has the first table that it printed.
    """
    if not results:
        return "Not measured yet."
    return f"{_table(benchmark, results)}\n\n`python -m bench.{benchmark.name}`: {'; '.join(map(caption, results))}."


def _table(benchmark: Benchmark, results: Sequence[Result]) -> str:
    if not benchmark.figures:
        first = results[-1].figures["tables"][0]
        return markdown(first["heads"], first["rows"])
    figures = [each for each in benchmark.figures if each.target or each.shown] or benchmark.figures
    rows = [
        [figure.what, *(value(figure, result.figures) for result in results), target(figure)]
        for figure in figures
    ]
    return markdown(["", *(machine(result.hardware) for result in results), "target"], rows)


def machine(hardware: str) -> str:
    """Return the name of a kind of machine in the heads of tables: its processor, and whether that lacks bf16."""
    processor = hardware.partition(",")[0]
    return f"{processor} without bf16" if "no bf16" in hardware else processor


def machines(results: Sequence[Result]) -> str:
    """Return what the names in the heads of tables stand for. Raises `ValueError` if a name stands for two."""
    found = sorted({result.hardware for result in results})
    if len({machine(hardware) for hardware in found}) < len(found):
        raise ValueError(f"two kinds of machines have one name: {'; '.join(found)}")
    return f"Machines: {'; '.join(found)}."


def caption(result: Result) -> str:
    """Return how a column was measured: day, commit, and what makes it less comparable."""
    parts = [when(result)]
    parts += [f"load {result.load:.1f} a core"] if result.load > BUSY else []
    if left_out := result.figures.get("left_out"):
        parts.append(f"no time for {' and '.join(left_out)}")
    return ", ".join(parts)


def when(result: Result) -> str:
    """Return the day and the commit of a result."""
    commit = result.versions.get("commit", "unknown")
    dirty = " and changes" if commit.endswith(DIRTY) else ""
    return f"{result.measured_on}, commit {commit.removesuffix(DIRTY)}{dirty}"


def target(figure: Figure) -> str:
    """Return a figure's target, and below it the value that others have published."""
    shown = figure.target.replace("<=", "≤").replace(">=", "≥")
    return " ".join([shown, f"({figure.compare})"]).strip() if figure.compare else shown


def value(figure: Figure, figures: Mapping[str, Any]) -> str:
    """Return a measured value with three significant digits and its unit, marked if it misses the target."""
    number = looked_up(figure.key, figures)
    if number is None:
        return ABSENT
    number *= figure.scale
    exact = number == int(number) or abs(number) >= 100
    digits = 0 if exact else max(0, 2 - math.floor(math.log10(abs(number))))
    shown = f"{number:.{min(digits, 6)}f} {figure.unit}".strip()
    return f"{shown}, **missed**" if figure.target and not figure.met(number) else shown


def looked_up(key: str, figures: Mapping[str, Any]) -> float | None:
    """Return the number under a dotted key; None if it is missing or no number."""
    found: Any = figures
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def summary(declared: Sequence[Benchmark], results: Sequence[Result]) -> str:
    """Return the README's table: the newest measurement of each figure that has a summary."""
    rows = []
    for benchmark in declared:
        for figure in (each for each in benchmark.figures if each.summary):
            found = [
                result
                for result in results
                if result.benchmark == benchmark.name and looked_up(figure.key, result.figures) is not None
            ]
            if found:
                newest = max(found, key=lambda each: each.measured_on)
                where = f"{newest.hardware}; {when(newest)}; `python -m bench.{benchmark.name}`"
                rows.append((figure.summary, value(figure, newest.figures), target(figure), where))
    if len(rows) > SUMMARY_ROWS:
        raise ValueError(f"{len(rows)} figures have a summary; README.md quotes at most {SUMMARY_ROWS}")
    return markdown(("", "measured", "target", "where and when"), rows) if rows else "Not measured yet."


def written(text: str, declared: Sequence[Benchmark], results: Sequence[Result]) -> str:
    """Return the text of a page with the results between its markers."""

    def fill(found: re.Match[str]) -> str:
        if found[2] == "summary":
            return f"{found[1]}{summary(declared, results)}\n{found[3]}"
        if found[2] == "machines":
            return f"{found[1]}{machines(results)}\n{found[3]}"
        benchmark = next(each for each in declared if each.name == found[2])
        own = [result for result in results if result.benchmark == benchmark.name]
        return f"{found[1]}{section(benchmark, own)}\n{found[3]}"

    return _MARKED.sub(fill, text)


def differing() -> dict[Path, str]:
    """Return the pages that differ from the results, each with the text that it should have."""
    declared, results = benchmarks(), stored()
    texts = {page: written(page.read_text(), declared, results) for page in PAGES}
    return {page: text for page, text in texts.items() if text != page.read_text()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if `--check` found a difference."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.benchmarks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="fail if a page and the results differ")
    check = parser.parse_args(arguments).check
    for page, text in (found := differing()).items():
        if check:
            print(f"{page.name} differs from bench/results/: python -m docs.benchmarks", file=sys.stderr)
        else:
            page.write_text(text)
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
