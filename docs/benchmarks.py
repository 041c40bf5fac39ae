"""Writes the results of the benchmarks into docs/benchmarks.md, a table for each question, and a few into other pages.

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
from bench.harness.results import BUSY, DIRTY, OK, ROOT, Result, stored
from docs.parts import first_line

PAGES = (BENCHMARKS_PAGE, ROOT / "README.md", ROOT / "docs" / "gain.md", ROOT / "docs" / "scheduling.md")
SUMMARY_ROWS = 7  # the README quotes at most this many
ABSENT = "–"
_MARKED = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def section(benchmark: Benchmark, results: Sequence[Result]) -> str:
    """Return a question, what its benchmark does, and its table: a column for each machine, and how it was measured.

    A benchmark without figures has the first table that it printed.
    """
    head = f"## {benchmark.asks}\n\n{first_line(ROOT / benchmark.file)}"
    if not results:
        return f"{head}\n\nNot measured yet."
    captions = "; ".join(caption(benchmark, result) for result in results)
    return f"{head}\n\n{_table(benchmark, results)}\n\n`python -m {benchmark.typed}`: {captions}."


def _table(benchmark: Benchmark, results: Sequence[Result]) -> str:
    if not benchmark.figures:
        first = results[-1].figures["tables"][0]
        return markdown(first["heads"], first["rows"])
    rows = [
        [figure.what, *(value(figure, result.figures) for result in results), target(figure)]
        for figure in benchmark.figures
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


def caption(benchmark: Benchmark, result: Result) -> str:
    """Return how a column was measured: day, commit, and what makes it less comparable."""
    parts = [when(measurements(benchmark, result)), *([result.status] if result.status != OK else [])]
    parts += [f"load {result.load:.1f} a core"] if result.load > BUSY else []
    if left_out := result.figures.get("left_out"):
        parts.append(f"no time for {' and '.join(left_out)}")
    return ", ".join(parts)


def measurements(benchmark: Benchmark, result: Result, part: str = "") -> list[tuple[str, str]]:
    """Return the time and the commit of a part of a result, or of all its parts, the oldest first."""
    parts = result.figures.get(benchmark.parts) or {
        part: {"measured_at": result.measured_at, "commit": result.versions.get("commit", "unknown")}
    }
    return sorted(
        (each["measured_at"], each["commit"]) for each in ([parts[part]] if part else parts.values())
    )


def when(measured: Sequence[tuple[str, str]]) -> str:
    """Return the day and the commit of the first measurement, and of the last one if that differs."""
    days = [
        f"{at[:10]}, commit {commit.removesuffix(DIRTY)}{' and changes' if commit.endswith(DIRTY) else ''}"
        for at, commit in measured
    ]
    return " to ".join(dict.fromkeys([days[0], days[-1]]))


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
                (measurements(benchmark, result, figure.part), result)
                for result in results
                if result.benchmark == benchmark.name and looked_up(figure.key, result.figures) is not None
            ]
            if found:
                measured, newest = max(found, key=lambda each: each[0][-1])
                where = f"{newest.hardware}; {when(measured)}; `python -m {benchmark.typed}`"
                rows.append((figure.summary, value(figure, newest.figures), target(figure), where))
    if len(rows) > SUMMARY_ROWS:
        raise ValueError(f"{len(rows)} figures have a summary; README.md quotes at most {SUMMARY_ROWS}")
    return markdown(("", "measured", "target", "where and when"), rows) if rows else "Not measured yet."


def gain(results: Sequence[Result]) -> str:
    """Return the newest cells of the benchmark of engines on each machine; first those best for the engine alone."""
    found = [result for result in results if result.benchmark == "engines"]
    if not found:
        return "Not measured yet."
    newest = max(found, key=lambda each: each.measured_at)
    rows = [
        (row, ratio)
        for result in found
        for name, cell in result.figures["cells"].items()
        for load in cell["sides"].get("ours", {}).get("loads", ())
        if "own" in cell["sides"]
        for row, ratio in [_gained(name, load, cell, machine(result.hardware))]
    ]
    heads = (
        "cell",
        "load",
        "own tower",
        "disaggregated",
        "ours",
        "ours / own",
        "p99, own / ours",
        "measured",
    )
    table = markdown(heads, [row for row, _ in sorted(rows, key=lambda each: each[1])])
    picture = "![Requests a second over the number of callers](img/engines.svg)"
    return f"{table}\n\n{picture}\n\nThe picture: {newest.hardware}. Both: `python -m bench.engines`."


def _gained(name: str, load: str, cell: Mapping[str, Any], where: str) -> tuple[list[str], float]:
    """Return a row of `gain`, and our requests a second over those of the engine alone."""
    sides = {side: measured["loads"].get(load, {}) for side, measured in cell["sides"].items()}
    rates = {side: figures.get("requests_per_s") for side, figures in sides.items()}
    ratio = rates["ours"] / rates["own"]
    p99 = sides["own"]["ttft_p99_ms"] / sides["ours"]["ttft_p99_ms"]
    shown = [f"{rates[side]:.2f}/s" if rates.get(side) else ABSENT for side in ("own", "encoder", "ours")]
    measured = f"{where}; {cell['measured_at'][:10]}, {cell['commit'].removesuffix(DIRTY)}"
    return [name, load, *shown, f"{ratio:.2f}", f"{p99:.2f}", measured], ratio


def policies(results: Sequence[Result]) -> str:
    """Return the first table that the newest run of bench.scheduler printed, which is the same on every machine."""
    found = [result for result in results if result.benchmark == "scheduler"]
    if not found:
        return "Not measured yet."
    first = max(found, key=lambda each: each.measured_at).figures["tables"][0]
    return f"{markdown(first['heads'], first['rows'])}\n\n{first['title']}: `python -m bench.scheduler`."


def written(text: str, declared: Sequence[Benchmark], results: Sequence[Result]) -> str:
    """Return the text of a page with the results between its markers."""

    def fill(found: re.Match[str]) -> str:
        whole = {
            "summary": lambda: summary(declared, results),
            "machines": lambda: machines(results),
            "gain": lambda: gain(results),
            "policies": lambda: policies(results),
        }
        if found[2] in whole:
            return f"{found[1]}{whole[found[2]]()}\n{found[3]}"
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
