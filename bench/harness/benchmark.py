"""What a benchmark declares: the question it answers, a bound on its time, and the rows of its table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
