"""Republishing: what this replica holds is published again before entries expire, and when the index lost them."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Protocol

from encoder_contract.geometry import Grid

# One batch blocks Redis for half a millisecond; a hundred replicas that come back at once take a third of its time.
BATCH_ADDRESSES = 64
ADDRESSES_PER_S = 1000
# Replicas that see Redis come back at the same moment begin within this time, each at random.
SPREAD_S = 0.5


class Held(Protocol):
    """What this replica holds: its store."""

    def grids(self) -> Mapping[bytes, tuple[int, int, int]]:
        """Return address and grid (t, h, w) of every embedding held now."""


class Republisher:
    """Walks over everything held: soon after `forgotten`, and three times within the entries' time to live.

    `held` is listed at the start of a walk: an address that is retracted during the walk may be published once more,
    and then costs the first peer that asks for it a failed call. If `publish` returns False, the walk ends; another one
    begins when the index is back and `forgotten` is called.
    """

    def __init__(
        self, held: Held, publish: Callable[[Mapping[bytes, Grid]], Awaitable[bool]], ttl_s: float
    ) -> None:
        self._held = held
        self._publish = publish
        self._every_s = ttl_s / 3
        self._forgotten = asyncio.Event()

    def forgotten(self) -> None:
        """Begin a walk soon: the index lost what it knew about this replica, or may have."""
        self._forgotten.set()

    async def run(self) -> None:
        """Walk again and again; ends only when cancelled."""
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
        entries = iter([(address, Grid(*grid)) for address, grid in self._held.grids().items()])
        while batch := dict(islice(entries, BATCH_ADDRESSES)):
            if not await self._publish(batch):
                return
            await asyncio.sleep(len(batch) / ADDRESSES_PER_S)
