"""A bulkhead: index calls of one kind, how long one may take, how many run at once, and whether they are worth it."""

import asyncio
from collections.abc import Callable
from time import monotonic

from encoder_service.cluster.index.breaker import Breaker


class Bulkhead:
    """Bounds of calls that are alike. While it rests none is made; after its rest, the next calls are the trial."""

    def __init__(self, timeout_ms: int, max_calls: int, clock: Callable[[], float] = monotonic) -> None:
        self.timeout_s = timeout_ms / 1000
        self.turns = asyncio.Semaphore(max_calls)
        self._clock = clock
        self._breaker = Breaker(clock)
        self._breaker.close()
        self._again_at: float | None = None  # when the trial begins; None while all is well

    @property
    def rests(self) -> bool:
        """Whether these calls failed so often of late that none is made for now."""
        return self._again_at is not None and self._clock() < self._again_at

    def failed(self, began: float) -> None:
        """Count the failure of a call that began at `began`: a run of them begins a rest, a failed trial another."""
        if self._breaker.failed(began) if self._again_at is None else began >= self._again_at:
            self._again_at = self._clock() + self._breaker.probe_delay_s()

    def succeeded(self) -> None:
        """End the run of failures, and the rest."""
        if self._again_at is not None:
            self._breaker.close()
            self._again_at = None
        self._breaker.succeeded()
