"""Event loop lag: how late a sleeping task is woken, which shows when something blocks the loop."""

import asyncio
from collections.abc import Callable
from time import monotonic

PERIOD_S = 0.1  # ten samples a second are cheap, and catch everything that blocks the loop for longer


class LoopLag:
    """Measures while it runs. `last_tick` is the last time the loop ran, on the monotonic clock."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._task: asyncio.Task[None] | None = None
        self.last_tick = monotonic()

    def start(self) -> None:
        """Start measuring, on the running loop."""
        self._task = asyncio.create_task(self._measure(), name="loop-lag")

    def stop(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()

    async def _measure(self) -> None:
        while True:
            due = monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.last_tick = monotonic()
            self._observe(max(0.0, self.last_tick - due))
