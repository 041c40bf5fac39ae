"""A bulkhead: bounds on index calls of one kind, in time and number, and a rest after a run of failures."""

import asyncio
from collections.abc import Callable
from time import monotonic

from encoder_service.cluster.index.breaker import Breaker


class Bulkhead:
    """Bounds on calls of one kind. While it rests, none is made; the next calls after the rest are a trial."""

    def __init__(self, timeout_ms: int, max_calls: int, clock: Callable[[], float] = monotonic) -> None:
        self.timeout_s = timeout_ms / 1000
        self.turns = asyncio.Semaphore(max_calls)
        self._clock = clock
        self._breaker = Breaker(clock)
        self._breaker.close()
        self._again_at: float | None = None  # when the trial begins; None while calls succeed

    @property
    def rests(self) -> bool:
        """Whether no call is made for now, after a run of failures."""
        return self._again_at is not None and self._clock() < self._again_at

    def failed(self, began: float) -> None:
        """Count the failure of a call that began at `began`: a run of them begins a rest, as does a failed trial."""
        if self._breaker.failed(began) if self._again_at is None else began >= self._again_at:
            self._again_at = self._clock() + self._breaker.probe_delay_s()

    def succeeded(self) -> None:
        """End the run of failures, and the rest."""
        if self._again_at is not None:
            self._breaker.close()
            self._again_at = None
        self._breaker.succeeded()
