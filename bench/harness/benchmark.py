"""What a question of the benchmarks is: a process to run, a bound on its time, and the rows of its table."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of a table: `key` is a name in the benchmark's JSON line, dotted where that is nested.

    `target` is a bound such as "<= 2"; `compare` is what others published for it, and where.
    """

    key: str
    what: str
    unit: str = ""
    target: str = ""
    scale: float = 1.0
    compare: str = ""

    def met(self, value: float) -> bool:
        """Whether a value keeps the target; there must be one."""
        sign, bound = self.target.split()
        return value <= float(bound) if sign == "<=" else value >= float(bound)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark, run as `python -m bench.MODULE ARGUMENTS --json`, and the rows of its table."""

    name: str
    asks: str
    module: str
    figures: tuple[Figure, ...]
    limit_s: float
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    why_not: Callable[[], str] = lambda: ""

    def command(self, *, quick: bool) -> list[str]:
        """Return the arguments of the interpreter."""
        return ["-m", f"bench.{self.module}", *(self.quick if quick else self.arguments), "--json"]
