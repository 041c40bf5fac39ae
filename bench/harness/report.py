"""Makes tables of results, and rewrites the pages that quote them between markers."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.benchmark import Benchmark, Figure, benchmark_of, benchmarks, markdown
from bench.harness.results import DIRTY, ROOT, Result

PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
BUSY = 0.5  # load per core; with more at the start, other work makes the times too long
# `bench:NAME` is the table of a benchmark's figures, `bench:NAME.tables` the tables that it printed.
_MARKED = re.compile(r"(<!-- bench:(\w+)(\.tables)? -->\n).*?(<!-- /bench -->)", re.DOTALL)


def tables_of(benchmark: Benchmark, results: Iterable[Result], *, own: bool = False) -> str:
    """Return the table of each machine's result, as Markdown, or how the benchmark failed there.

    With `own`, return the tables that the benchmark printed.
    """
    found = [result for result in results if result.benchmark == benchmark.name]
    if not found:
        return "Not measured yet."
    shown = own_tables_of if own else table_of
    return "\n\n".join(f"{caption(result)}\n\n{shown(benchmark, result)}" for result in found)


def caption(result: Result) -> str:
    """Return a line with machine, day, commit and command, and with what makes the figures less comparable."""
    parts = [f"**{result.hardware}**", _when(result), f"`{result.command}`"]
    parts += [f"{result.seconds:.0f} s"] if result.seconds else []
    parts += [f"on a busy machine (load {result.load:.1f} a core)"] if result.load > BUSY else []
    if left_out := result.figures.get("left_out"):
        parts.append(f"left out, no time: {', '.join(left_out)}")
    return " · ".join(parts)


def _when(result: Result) -> str:
    commit = result.versions.get("commit")
    if commit is None:
        return result.measured_on
    dirty = " with uncommitted changes" if commit.endswith(DIRTY) else ""
    return f"{result.measured_on}, commit {commit.removesuffix(DIRTY)}{dirty}"


def table_of(benchmark: Benchmark, result: Result) -> str:
    """Return the table of one result."""
    if result.status != "ok":
        return f"**{result.status}**: {result.error}"
    if benchmark.shown_as:
        return benchmark.shown_as(result.figures)
    rows = [row_of(figure, result.figures) for figure in benchmark.figures]
    heads = ("", "measured", "target", "published")
    columns = [at for at in range(len(heads)) if at < 2 or any(row[at] for row in rows)]
    return markdown([heads[at] for at in columns], [[row[at] for at in columns] for row in rows])


def own_tables_of(benchmark: Benchmark, result: Result) -> str:
    """Return the tables that a benchmark printed, under their titles."""
    if result.status != "ok":
        return table_of(benchmark, result)
    tables = result.figures.get("tables", [])
    return "\n\n".join(f"{each['title']}:\n\n{markdown(each['heads'], each['rows'])}" for each in tables)


def row_of(figure: Figure, figures: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a figure: text, value, target (marked if missed), published value."""
    value = looked_up(figure.key, figures)
    target = _shown_target(figure) + (_missed(value, figure) if value is not None else "")
    return figure.what, _shown(value, figure), target, figure.compare


def _shown_target(figure: Figure) -> str:
    return figure.target.replace("<=", "≤").replace(">=", "≥")


def _missed(value: float, figure: Figure) -> str:
    return ", **missed**" if figure.target and not figure.met(value * figure.scale) else ""


def looked_up(key: str, figures: Mapping[str, Any]) -> float | None:
    """Return the number under a dotted key; None if it is missing or no number."""
    found: Any = figures
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def _shown(value: float | None, figure: Figure) -> str:
    if value is None:
        return "not reported"
    value *= figure.scale
    exact = value == int(value) or abs(value) >= 100
    digits = 0 if exact else max(0, 2 - math.floor(math.log10(abs(value))))  # three significant ones
    return f"{value:.{min(digits, 6)}f} {figure.unit}".strip()


def summary(results: Sequence[Result]) -> str:
    """Return the README's table: the newest measurement of each figure, with its machine, day, commit and command."""
    rows = []
    for name, figure in summarised():
        found = [
            (result, value)
            for result in results
            if result.benchmark == name and result.status == "ok"
            if (value := looked_up(figure.key, result.figures)) is not None
        ]
        if found:
            result, value = max(found, key=lambda each: each[0].measured_on)
            shown, where = (
                _shown(value, figure) + _missed(value, figure),
                f"{result.hardware}; {_when(result)}",
            )
            rows.append((figure.summary, shown, _shown_target(figure), where, f"`python -m bench.{name}`"))
    if not rows:
        return "Not measured yet."
    return markdown(("", "measured", "target", "where and when", "command"), rows)


def summarised() -> list[tuple[str, Figure]]:
    """Return the figures of the README's table, each with the name of its benchmark."""
    return [(each.name, figure) for each in benchmarks() for figure in each.figures if figure.summary]


def rewrite(results: Sequence[Result], pages: Iterable[Path] = PAGES) -> list[Path]:
    """Replace the text between the markers of the pages; return the pages that changed."""
    changed = []
    for page in pages:
        old = page.read_text()
        new = _MARKED.sub(lambda found: f"{found[1]}{_section(found[2], found[3], results)}\n{found[4]}", old)
        if new != old:
            page.write_text(new)
            changed.append(page)
    return changed


def _section(name: str, own: str | None, results: Sequence[Result]) -> str:
    return summary(results) if name == "summary" else tables_of(benchmark_of(name), results, own=bool(own))
