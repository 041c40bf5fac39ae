"""The time that is spent in methods of an object, however they are called."""

import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class MethodTimer:
    """`spent_s`, in all methods that it was told of; a measurement begins by setting it to 0."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def watch(self, watched: object, methods: Iterable[str]) -> None:
        """Replace methods of an object, which do not call each other, by timed ones."""
        for name in methods:
            setattr(watched, name, self._timed(getattr(watched, name)))

    def _timed(self, method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        def timed(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.spent_s += time.perf_counter() - began

        return timed
