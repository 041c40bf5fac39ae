"""Single flight: those who want the same at the same time share one attempt at it."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Flight(Generic[Result]):
    """One that is under way, and how many wait for it."""

    task: "asyncio.Task[Result]"
    waiting: int = 0


class SingleFlight(Generic[Result]):
    """One task for each key; it ends when nobody waits any more. One event loop's."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[Result]] = {}

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Do the work, or wait for who is at it. Raises what the work raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.task.done() or not flight.waiting:
                flight.task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]
