"""A circuit breaker: decides when failures are an outage, and how long to wait before each probe."""

import random
from collections.abc import Callable
from time import monotonic

# Failures in a row that did not overlap: one stall of the network or of our own loop, which fails every call under way,
# is one failure.
FAILURES_TO_OPEN = 3
# A restart of Redis takes about this long; each replica waits between half and one and a half times of it.
FIRST_PROBE_S = 0.25
# Probes cost one connection each: often enough to be back within seconds of a long outage.
LAST_PROBE_S = 3.0
# A breaker that opens again within this time after it was closed continues with its longer delays.
WELL_S = 10.0


class Breaker:
    """Counts failures and paces probes. Its owner keeps the state (calls or probes) and reports what became of them."""

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._clock = clock
        self._uniform = uniform
        self._failures = 0
        self._last_failure = float("-inf")
        self._probes = 0
        self._closed_at = float("-inf")

    def failed(self, began: float, *, refused: bool = False) -> bool:
        """Count the failure of a call that began at `began` (the breaker's clock); return whether to stop calling.

        `refused`: the server answered with an error (out of memory, read-only, loading). One such answer is enough.
        """
        if refused or began >= self._last_failure:
            self._failures += 1
            self._last_failure = self._clock()
        if not refused and self._failures < FAILURES_TO_OPEN:
            return False
        if self._clock() - self._closed_at > WELL_S:
            self._probes = 0
        return True

    def succeeded(self) -> None:
        """End the run of failures."""
        self._failures = 0

    def probe_delay_s(self) -> float:
        """Return the time to wait before the next probe: doubling, bounded, and spread at random."""
        delay = min(LAST_PROBE_S, FIRST_PROBE_S * 2**self._probes)
        self._probes = min(self._probes + 1, 16)
        return self._uniform(0.5 * delay, 1.5 * delay)

    def close(self) -> None:
        """Note that calls are made again from now on: a probe succeeded."""
        self._failures = 0
        self._closed_at = self._clock()
