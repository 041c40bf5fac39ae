"""Waiters for addresses that other replicas encode, woken by notifications and by reading again."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

from encoder_service.cluster.cluster import Locations
from encoder_service.cluster.tasks import begin, end

# How late a lost notification, or a lapsed lease (which notifies no waiter), is noticed. One read covers all waiters.
REREAD_S = 0.2

# Returns the settled addresses: published (with their locations), or no longer being encoded (without).
Read = Callable[[Collection[bytes]], Awaitable[dict[bytes, Locations]]]
# Takes the addresses that are waited for from now on, and those that no longer are.
Subscribe = Callable[[Iterable[bytes], Iterable[bytes]], Awaitable[None]]


class Waiters:
    """Any number of waiters for any number of addresses; one task reads for all of them."""

    def __init__(self, read: Read, subscribe: Subscribe) -> None:
        self._read = read
        self._subscribe = subscribe
        # For each waiter the replicas whose locations are of no use to it.
        self._waiters: dict[bytes, dict[asyncio.Future[Locations], Collection[str]]] = {}
        self._subscribed: set[bytes] = set()
        self._changed: set[bytes] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, address: bytes, timeout_s: float, without: Collection[str] = ()) -> Locations:
        """Return where the address was published; empty if its lease ended without that, or at the timeout.

        Nothing has changed as long as it is only at replicas in `without`.
        """
        if self._task is None:
            self._task = begin(self._serve(), "index-waiters")
        future: asyncio.Future[Locations] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(address, {})[future] = without
        self.changed(address)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return ()
        finally:
            self._leave(address, future)

    def changed(self, address: bytes) -> None:
        """Read the address now, if it is waited for."""
        if address in self._waiters:
            self._changed.add(address)
            self._wake.set()

    def settle_all(self) -> None:
        """Wake every waiter with nothing: the index is unavailable."""
        for address in list(self._waiters):
            self._settle(address, ())

    async def close(self) -> None:
        """Stop; every waiter wakes with nothing."""
        self.settle_all()
        await end(self._task)

    def _leave(self, address: bytes, future: "asyncio.Future[Locations]") -> None:
        waiters = self._waiters.get(address, {})
        waiters.pop(future, None)
        if not waiters:
            self._waiters.pop(address, None)
            self._wake.set()  # to end its subscription

    def _settle(self, address: bytes, locations: Locations) -> None:
        for future, without in self._waiters.get(address, {}).items():
            useful = tuple(location for location in locations if location.replica_id not in without)
            if not future.done() and (useful or not locations):
                future.set_result(useful)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        reread_at = loop.time() + REREAD_S
        while True:
            try:
                async with asyncio.timeout_at(reread_at if self._waiters else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            addresses = set(self._changed)
            if loop.time() >= reread_at:
                addresses = set(self._waiters)
                reread_at = loop.time() + REREAD_S
            self._wake.clear()
            self._changed.clear()
            await self._subscribe_waiters()
            for address, locations in (await self._read(addresses)).items() if addresses else ():
                self._settle(address, locations)

    async def _subscribe_waiters(self) -> None:
        wanted = set(self._waiters)
        begun, ceased = wanted - self._subscribed, self._subscribed - wanted
        self._subscribed = wanted
        if begun or ceased:
            await self._subscribe(begun, ceased)
