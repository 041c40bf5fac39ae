"""What this replica has in the index: its leases, changes yet to be sent, and the entries that it publishes again."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from time import monotonic
from typing import Protocol

from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis import RedisIndex
from encoder_service.cluster.tasks import begin, end

# After this a lease is no longer renewed, so that an address that its holder forgot does not stay locked for as long as
# the holder lives. No caller waits this long for an image.
MAX_LEASE_S = 300.0
# Changes are collected for this long: all images of a batch end within it, and no caller notices the delay.
COLLECT_S = 0.001


class _Ended(Enum):
    RETRACTED = "retracted"
    RELEASED = "released"


@dataclass(slots=True)
class _Lease:
    since: float
    renew_at: float
    ended: bool = False  # published, retracted or released; renewed until the index has heard of it


class Leases:
    """One table of leases, and the last change of each address that the index has yet to hear. One event loop's.

    `publish`, `retract` and `release` return at once; a task sends the changes in batches. A publication that does not
    get through while this replica is joined is sent again with the next heartbeat. Its lease is renewed until then, so
    that no other replica encodes the image in the meantime.
    """

    def __init__(self, index: RedisIndex, *, renew_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._index = index
        self._renew_s = renew_s
        self._clock = clock
        self._leases: dict[bytes, _Lease] = {}
        self._changes: dict[bytes, _Ended | Grid] = {}  # a grid: published
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sending."""
        self._task = begin(self._run(), "cluster-leases")

    async def stop(self) -> None:
        """Send what is left, and stop."""
        await end(self._task)
        await self.send()

    def holds(self, address: bytes) -> bool:
        """Whether this replica has the lease of the address, and has not ended it."""
        lease = self._leases.get(address)
        return lease is not None and not lease.ended

    def granted(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were just granted; a release of them that was not sent yet is cancelled."""
        now = self._clock()
        for address in addresses:
            since = self._leases[address].since if self.holds(address) else now
            self._leases[address] = _Lease(since, now + self._renew_s)
            if self._changes.get(address) is _Ended.RELEASED:
                del self._changes[address]

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica holds the address; ends its lease."""
        self._end(address, grid)

    def retract(self, address: bytes) -> None:
        """Announce that this replica no longer holds the address; ends a lease that a publication was to end."""
        self._note(address, _Ended.RETRACTED)

    def release(self, address: bytes) -> None:
        """Give up the lease of the address, if this replica has it."""
        if self.holds(address):
            self._end(address, _Ended.RELEASED)

    def give_back(self, addresses: Iterable[bytes]) -> None:
        """Release leases that were granted after their caller had left, unless another caller has them by now."""
        unwanted = [address for address in addresses if not self.holds(address)]
        self.granted(unwanted)
        for address in unwanted:
            self.release(address)

    def release_all(self) -> None:
        """Give up every lease."""
        for address in list(self._leases):
            self.release(address)

    def mark_due(self) -> None:
        """Make every lease due: the index may have lost them."""
        now = self._clock()
        for lease in self._leases.values():
            lease.renew_at = now

    def due(self) -> list[bytes]:
        """Return the leases to renew now; those held for too long are forgotten."""
        now = self._clock()
        self._forget([a for a, lease in self._leases.items() if lease.since + MAX_LEASE_S <= now])
        return [address for address, lease in self._leases.items() if lease.renew_at <= now]

    async def renew(self) -> None:
        """Renew the leases that are due, and send what is left to send; at every heartbeat."""
        if due := self.due():
            ours = await self._index.renew(due)
            self._forget(set(due) - ours)  # another replica has taken them
            now = self._clock()
            for address in ours & self._leases.keys():
                self._leases[address].renew_at = now + self._renew_s
            # The others ended meanwhile. If the index heard of that first, renewing took them again.
            if ended := ours - self._leases.keys():
                await self._index.release(list(ended))
        if self._changes:
            self._changed.set()

    async def send(self) -> None:
        """Tell the index the changes that it has yet to hear."""
        changes, self._changes = self._changes, {}
        self._changed.clear()
        if retracted := [address for address, change in changes.items() if change is _Ended.RETRACTED]:
            await self._index.retract(retracted)
        # Also of an address that was published and evicted before the index heard of either.
        ended = [a for a, change in changes.items() if isinstance(change, _Ended) and self._has_ended(a)]
        if ended:
            self._forget(ended)
            await self._index.release(ended)
        if grids := {address: change for address, change in changes.items() if isinstance(change, Grid)}:
            # While alone nothing is sent: after the outage, everything held is published.
            if await self._index.publish(grids) or self._index.state is not IndexState.JOINED:
                self._forget(filter(self._has_ended, grids))
            else:
                for address, grid in grids.items():
                    if address in self._leases:  # otherwise no replica waits for it
                        self._changes.setdefault(address, grid)

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(COLLECT_S)
            await self.send()

    def _end(self, address: bytes, change: _Ended | Grid) -> None:
        if (lease := self._leases.get(address)) is not None:
            lease.ended = True
        self._note(address, change)

    def _note(self, address: bytes, change: _Ended | Grid) -> None:
        self._changes[address] = change
        self._changed.set()

    def _has_ended(self, address: bytes) -> bool:
        lease = self._leases.get(address)
        return lease is not None and lease.ended

    def _forget(self, addresses: Iterable[bytes]) -> None:
        for address in addresses:
            self._leases.pop(address, None)


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
