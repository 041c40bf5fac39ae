"""A lane: index calls of one kind, how long one may take, how many may be under way, and whether they are worth it."""

import asyncio
from collections.abc import Callable
from time import monotonic

from encoder_service.cluster.index.breaker import Breaker


class Lane:
    """Bounds of calls that are alike. One that rests is not called; after its rest, the next calls are the trial."""

    def __init__(self, timeout_ms: int, max_calls: int, clock: Callable[[], float] = monotonic) -> None:
        self.timeout_s = timeout_ms / 1000
        self.turns = asyncio.Semaphore(max_calls)
        self._clock = clock
        self._breaker = Breaker(clock)
        self._breaker.close()
        self._again_at = float("-inf")

    @property
    def rests(self) -> bool:
        """Whether these calls failed so often of late that none is made for now."""
        return self._clock() < self._again_at

    def failed(self, began: float) -> None:
        """Count the failure of a call that began at `began`: a run of them begins a rest, a failed trial another."""
        if self._breaker.failed(began) or (self._breaker.is_open and began >= self._again_at):
            self._again_at = self._clock() + self._breaker.probe_delay_s()

    def succeeded(self) -> None:
        """End the run of failures, and the rest."""
        if self._breaker.is_open:
            self._breaker.close()
        self._breaker.succeeded()
