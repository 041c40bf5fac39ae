"""The outbox: changes that this replica announces to the index, sent in batches, and the leases it has."""

import asyncio
from collections.abc import Iterable
from enum import Enum

from encoder_contract.geometry import Grid
from encoder_service.cluster.index import RedisIndex
from encoder_service.cluster.index.tasks import begin, end

# Changes are collected for this long: all images of a batch end within it, and no caller notices the delay.
COLLECT_S = 0.001


class _Change(Enum):
    RETRACTED = "retracted"
    RELEASED = "released"


class Outbox:
    """`publish`, `retract` and `release` return at once; a task sends the index the last change of each address.

    Belongs to one event loop.
    """

    def __init__(self, index: RedisIndex) -> None:
        self._index = index
        self.leased: set[bytes] = set()  # granted, and neither published nor released since
        self._changes: dict[bytes, _Change | Grid] = {}  # a grid: published
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sending."""
        self._task = begin(self._run(), "cluster-outbox")

    async def stop(self) -> None:
        """Send what is left, and stop."""
        await end(self._task)
        await self._send()

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica holds the address; ends its lease."""
        self.leased.discard(address)
        self._note(address, grid)

    def retract(self, address: bytes) -> None:
        """Announce that it no longer holds the address."""
        self._note(address, _Change.RETRACTED)

    def release(self, address: bytes) -> None:
        """Give up the lease of the address, if it has one."""
        if address in self.leased:
            self.leased.discard(address)
            self.give_back([address])

    def give_back(self, addresses: Iterable[bytes]) -> None:
        """Return leases that arrived when nobody wanted them any more."""
        for address in addresses:
            self._note(address, _Change.RELEASED)

    def granted(self, addresses: Iterable[bytes]) -> None:
        """Note leases that were just granted; a release of them that was not sent yet is cancelled."""
        for address in addresses:
            self.leased.add(address)
            if self._changes.get(address) is _Change.RELEASED:
                del self._changes[address]

    def _note(self, address: bytes, change: _Change | Grid) -> None:
        self._changes[address] = change
        self._changed.set()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(COLLECT_S)
            await self._send()

    async def _send(self) -> None:
        changes, self._changes = self._changes, {}
        self._changed.clear()
        retracted = [address for address, change in changes.items() if change is _Change.RETRACTED]
        released = [address for address, change in changes.items() if change is _Change.RELEASED]
        if retracted:
            await self._index.retract(retracted)
        # An address that was held and evicted before it was announced still has its lease.
        if ended := retracted + released:
            await self._index.release(ended)
        if grids := {address: change for address, change in changes.items() if isinstance(change, Grid)}:
            await self._index.publish(grids)
