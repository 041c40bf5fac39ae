"""Arrivals: those who wait for an image that nobody has submitted yet."""

import asyncio
from collections import defaultdict


class Arrivals:
    """Any number of waiters for any number of addresses. One event loop's."""

    def __init__(self) -> None:
        self._waiters: defaultdict[bytes, set[asyncio.Future[None]]] = defaultdict(set)

    async def wait(self, address: bytes, until: float) -> None:
        """Return when `address` arrives, or at `until`, on the clock of the loop."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[address].add(waiter)
        try:
            async with asyncio.timeout_at(until):
                await waiter
        except TimeoutError:
            return
        finally:
            waiting = self._waiters.get(address)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiters[address]

    def wake(self, address: bytes) -> None:
        """Say that `address` is here."""
        for waiter in self._waiters.pop(address, ()):
            if not waiter.done():
                waiter.set_result(None)
