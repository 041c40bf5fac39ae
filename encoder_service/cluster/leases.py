"""What this replica has in the index: its leases and pending publications, and the entries it publishes again.

Entries are published again before they expire, and when the index lost them.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from time import monotonic
from typing import Protocol

from encoder_contract.geometry import Grid

# After this a lease is no longer renewed, so that an address that its holder forgot does not stay locked for as long as
# the holder lives. No caller waits this long for an image.
MAX_LEASE_S = 300.0


class Leases:
    """The addresses granted to us, with the time of each one's next renewal, and the publications that are pending.

    A publication is pending if it did not get through. Its lease is kept, so that no other replica encodes the image
    meanwhile, and it is sent again with the next heartbeat.
    """

    def __init__(self, renew_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._renew_s = renew_s
        self._clock = clock
        self._forget_at: dict[bytes, float] = {}
        self._renew_at: dict[bytes, float] = {}
        self.pending: dict[bytes, Grid] = {}

    def add(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were just granted."""
        now = self._clock()
        for address in addresses:
            self._forget_at.setdefault(address, now + MAX_LEASE_S)
            self._renew_at[address] = now + self._renew_s

    def renewed(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were just renewed, except those that have ended since."""
        self.add(address for address in addresses if address in self._renew_at)

    def end(self, addresses: Iterable[bytes]) -> None:
        """Forget leases and their pending publications."""
        for address in addresses:
            self._forget_at.pop(address, None)
            self._renew_at.pop(address, None)
            self.pending.pop(address, None)

    def all(self) -> list[bytes]:
        """Return every lease held."""
        return list(self._renew_at)

    def mark_due(self) -> None:
        """Make every lease due: the index may have lost them."""
        self._renew_at = dict.fromkeys(self._renew_at, self._clock())

    def due(self) -> list[bytes]:
        """Return the leases to renew now; those held for too long are forgotten."""
        now = self._clock()
        self.end([address for address, at in self._forget_at.items() if at <= now])
        return [address for address, at in self._renew_at.items() if at <= now]

    def add_pending(self, grids: Mapping[bytes, Grid]) -> None:
        """Note publications that did not get through; those without a lease are dropped: no replica waits for them."""
        self.pending |= {address: grid for address, grid in grids.items() if address in self._renew_at}


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
