"""The entries of this replica in the index: leases, unsent changes, and the addresses that it republishes."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from time import monotonic

from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis import RedisIndex
from encoder_service.cluster.tasks import cancel_task, start_task

# After this time a lease is not renewed any more, so that a lease that was never released does not lock its address for
# the lifetime of the replica. No caller waits this long for an image.
MAX_LEASE_S = 300.0
# Changes are collected for this long before they are sent. All images of a batch end within this time, and no caller
# notices the delay.
COLLECT_S = 0.001


class _Ended(Enum):
    RETRACTED = "retracted"
    RELEASED = "released"


@dataclass(slots=True)
class _Lease:
    since: float
    renew_at: float
    is_recorded: bool  # whether Redis granted it; while this replica is alone, every lease is granted here
    ended: bool = False  # published, retracted or released; renewed until that has been sent


class Leases:
    """The leases of this replica, and the last unsent change of each address. Not thread-safe: one event loop.

    `publish`, `retract` and `release` return at once; a task sends the changes in batches. If sending a publication or
    a release fails, it is sent again with the next heartbeat: leases live for minutes, and until one ends, no other
    replica encodes its image.
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
        """Start the task that sends changes."""
        self._task = start_task(self._run(), "cluster-leases")

    async def stop(self) -> None:
        """Stop the task and send the remaining changes."""
        await cancel_task(self._task)
        await self.send()

    def holds(self, address: bytes) -> bool:
        """Whether this replica has the lease of the address, and has not ended it."""
        lease = self._leases.get(address)
        return lease is not None and not lease.ended

    def add(self, addresses: Iterable[bytes]) -> None:
        """Add leases that were just granted, and drop unsent releases of them."""
        now = self._clock()
        for address in addresses:
            since = self._leases[address].since if self.holds(address) else now
            is_recorded = self._index.state is IndexState.JOINED
            self._leases[address] = _Lease(since, now + self._renew_s, is_recorded)
            if self._changes.get(address) is _Ended.RELEASED:
                del self._changes[address]

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica holds the address; ends its lease."""
        self._end(address, grid)

    def retract(self, address: bytes) -> None:
        """Announce that this replica no longer holds the address. Replaces an unsent publication."""
        self._note(address, _Ended.RETRACTED)

    def release(self, address: bytes) -> None:
        """Release the lease of the address, if this replica has it."""
        if self.holds(address):
            self._end(address, _Ended.RELEASED)

    def release_unused(self, addresses: Iterable[bytes]) -> None:
        """Release leases that were granted after their caller was cancelled, unless another caller has them by now."""
        unused = [address for address in addresses if not self.holds(address)]
        self.add(unused)
        for address in unused:
            self.release(address)

    def release_all(self) -> None:
        """Release every lease."""
        for address in list(self._leases):
            self.release(address)

    def mark_all_due(self) -> None:
        """Make every lease due for renewal: the index may have lost them."""
        now = self._clock()
        for lease in self._leases.values():
            lease.renew_at = now

    def due(self) -> list[bytes]:
        """Return the leases to renew now; forget those that exceed `MAX_LEASE_S`."""
        now = self._clock()
        self._forget([a for a, lease in self._leases.items() if lease.since + MAX_LEASE_S <= now])
        return [address for address, lease in self._leases.items() if lease.renew_at <= now]

    async def renew(self) -> None:
        """Renew the leases that are due, and retry unsent changes. Called at every heartbeat."""
        if due := self.due():
            ours = await self._index.renew(due)
            self._forget(set(due) - ours)  # another replica has these leases now
            now = self._clock()
            for address in ours & self._leases.keys():
                self._leases[address].renew_at = now + self._renew_s
            # The other leases ended during the renewal. If the index ended them first, the renewal re-created them.
            if ended := ours - self._leases.keys():
                await self._index.release(list(ended))
        if self._changes:
            self._changed.set()

    async def send(self) -> None:
        """Send all unsent changes to the index."""
        changes, self._changes = self._changes, {}
        self._changed.clear()
        if retracted := [address for address, change in changes.items() if change is _Ended.RETRACTED]:
            await self._index.retract(retracted)
        # Includes an address that was published and evicted before either change was sent.
        ended = [a for a, change in changes.items() if isinstance(change, _Ended) and self._has_ended(a)]
        if ended:
            await self._release(ended)
        if grids := {address: change for address, change in changes.items() if isinstance(change, Grid)}:
            if await self._index.publish(grids):
                self._forget(filter(self._has_ended, grids))
            elif self._index.state is not IndexState.JOINED:
                # After the outage, every address that is still held is published, and every lease released.
                await self._release(filter(self._has_ended, grids))
            else:
                for address, grid in grids.items():
                    if address in self._leases:  # without a lease, no replica waits for the address
                        self._changes.setdefault(address, grid)

    async def _release(self, addresses: Iterable[bytes]) -> None:
        """Release leases that have ended; note those that Redis has and that could not be released."""
        ended = {address: self._leases[address] for address in addresses}
        if not await self._index.release(list(ended)):
            for address, lease in ended.items():
                if lease.is_recorded:
                    self._changes.setdefault(address, _Ended.RELEASED)
        self._forget(
            a for a, lease in ended.items() if self._leases.get(a) is lease and a not in self._changes
        )

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


# One batch blocks Redis for half a millisecond. At this rate, a hundred replicas that return at once take a third of
# its time.
BATCH_ADDRESSES = 64
ADDRESSES_PER_S = 1000
# All replicas see at the same moment that Redis is back. Each waits a random time up to this one before it republishes.
SPREAD_S = 0.5


class Republisher:
    """Republishes every address that this replica holds, three times within the entries' time to live.

    The addresses are listed at the start of a pass. An address that is retracted during the pass may be published once
    more; the first peer that asks for it then makes a failed call. If `publish` returns False, the pass ends. `trigger`
    starts another when the index is back.
    """

    def __init__(
        self,
        grids: Callable[[], Mapping[bytes, Grid]],
        publish: Callable[[Mapping[bytes, Grid]], Awaitable[bool]],
        ttl_s: float,
    ) -> None:
        """`grids` returns the address and grid of every embedding that is held now."""
        self._grids = grids
        self._publish = publish
        self._interval_s = ttl_s / 3
        self._triggered = asyncio.Event()

    def trigger(self) -> None:
        """Start a pass soon: the index may have lost this replica's entries."""
        self._triggered.set()

    async def run(self) -> None:
        """Run passes until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._triggered.wait()
                await asyncio.sleep(random.uniform(0, SPREAD_S))  # noqa: S311 - spreads load, guards nothing
            except TimeoutError:
                pass
            self._triggered.clear()
            await self._publish_all()

    async def _publish_all(self) -> None:
        entries = iter(self._grids().items())
        while batch := dict(islice(entries, BATCH_ADDRESSES)):
            if not await self._publish(batch):
                return
            await asyncio.sleep(len(batch) / ADDRESSES_PER_S)
