"""Tables, as a benchmark prints them and as a page shows them."""

from collections.abc import Iterable, Sequence
from typing import Any

# title, heads, rows: what `bench.harness.report` shows of a benchmark that makes tables of its own.
Table = dict[str, Any]


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
    """Return a number as a table shows it."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}"
