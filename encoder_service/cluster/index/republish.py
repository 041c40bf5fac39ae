"""Republishing: tells the index again what this replica holds, when it forgot and before it does."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice

from encoder_contract.geometry import Grid

# Address and grid of every embedding that this replica holds: what an index that lost its memory is told again.
Held = Callable[[], Mapping[bytes, Grid]]
# One batch holds Redis for about half a millisecond; a hundred replicas that come back at once take a third of it.
BATCH_ADDRESSES = 64
ADDRESSES_PER_S = 1000
# Replicas that see Redis come back in the same moment begin at different ones.
SPREAD_S = 0.5


class Republisher:
    """Walks over what is held: soon after `forgotten`, and three times within the time that entries live.

    `held` is listed at the start of a walk: what is retracted while the walk lasts may be published once more, and
    costs the first peer who asks for it a failed call. `publish` returns False when it could not: the walk ends, and
    begins again when the index is back and `forgotten` is called.
    """

    def __init__(
        self, held: Held, publish: Callable[[Mapping[bytes, Grid]], Awaitable[bool]], ttl_s: float
    ) -> None:
        self._held = held
        self._publish = publish
        self._every_s = ttl_s / 3
        self._forgotten = asyncio.Event()

    def forgotten(self) -> None:
        """The index lost what it knew of this replica, or may have."""
        self._forgotten.set()

    async def run(self) -> None:
        """Walk for ever."""
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    await self._forgotten.wait()
                await asyncio.sleep(random.uniform(0, SPREAD_S))  # noqa: S311 - spreads load, guards nothing
            except TimeoutError:
                pass
            self._forgotten.clear()
            await self._walk()

    async def _walk(self) -> None:
        entries = iter(list(self._held().items()))
        while batch := dict(islice(entries, BATCH_ADDRESSES)):
            if not await self._publish(batch):
                return
            await asyncio.sleep(len(batch) / ADDRESSES_PER_S)
