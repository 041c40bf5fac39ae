"""Waiters for other replicas: for images that they encode, and for images that they may have later."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from itertools import islice

from encoder_service.cluster.cluster import Locations
from encoder_service.cluster.tasks import cancel_task, start_task
from encoder_service.keys import ImageKey

# The delay until a lost notification, or an expired lease (which notifies no waiter), is noticed. One read covers all
# waiters.
REREAD_S = 0.2
# Each read looks up at most this many searched images, least recently looked up first. This bounds the load to about a
# thousand keys a second.
SEARCH_IMAGES = 200

# Returns the addresses that are published, with their locations, and those that no replica is encoding, with none.
Read = Callable[[Collection[bytes]], Awaitable[Mapping[bytes, Locations]]]
# See `Cluster.find`.
Find = Callable[[Collection[ImageKey]], Awaitable[Mapping[bytes, Locations]]]
# Takes the addresses to subscribe to and those to unsubscribe from.
Subscribe = Callable[[Iterable[bytes], Iterable[bytes]], Awaitable[None]]
Found = Callable[[bytes, Locations], None]


class PeerWaiters:
    """One task that reads the index for all waiters and searches. Not thread-safe: use from one event loop.

    `wait` is for an address that another replica encodes. The task reads it when a change is notified, and every
    `REREAD_S`. `start_search` is for an image that was not submitted here. The task looks some of these up every
    `REREAD_S`.
    """

    def __init__(self, read: Read, subscribe: Subscribe, find: Find, has_peers: Callable[[], bool]) -> None:
        """`find` is called only while `has_peers` is true."""
        self._read = read
        self._subscribe = subscribe
        self._find = find
        self._has_peers = has_peers
        # With the replicas that each waiter excludes.
        self._waiters: dict[bytes, dict[asyncio.Future[Locations], Collection[str]]] = {}
        # In the order in which they are looked up next.
        self._searches: dict[bytes, tuple[ImageKey, Found]] = {}
        self._subscribed: set[bytes] = set()
        self._changed: set[bytes] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, address: bytes, timeout_s: float, excluding: Collection[str] = ()) -> Locations:
        """Return where the address was published; empty if its lease ended unpublished, or at the timeout.

        Locations at replicas in `excluding` do not count.
        """
        future: asyncio.Future[Locations] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(address, {})[future] = excluding
        self._wake_task()
        self.changed(address)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return ()
        finally:
            self._remove(address, future)

    def start_search(self, key: ImageKey, found: Found) -> None:
        """Call `found` once another replica has the image, unless `stop_search` comes first."""
        self._searches[key.address] = key, found
        self._wake_task()

    def stop_search(self, address: bytes) -> None:
        """Stop searching for the address."""
        self._searches.pop(address, None)

    def changed(self, address: bytes) -> None:
        """Read the address now, if it has waiters."""
        if address in self._waiters:
            self._changed.add(address)
            self._wake.set()

    def wake_all(self) -> None:
        """Wake every waiter without locations: the index is unavailable."""
        for address in list(self._waiters):
            self._settle(address, ())

    async def close(self) -> None:
        """Wake every waiter without locations, and stop."""
        self.wake_all()
        await cancel_task(self._task)

    def _wake_task(self) -> None:
        if self._task is None:
            self._task = start_task(self._run(), "cluster-waiters")
        self._wake.set()

    def _remove(self, address: bytes, future: "asyncio.Future[Locations]") -> None:
        waiters = self._waiters.get(address, {})
        waiters.pop(future, None)
        if not waiters:
            self._waiters.pop(address, None)
            self._wake.set()  # to end its subscription

    def _settle(self, address: bytes, locations: Locations) -> None:
        for future, excluding in self._waiters.get(address, {}).items():
            useful = tuple(location for location in locations if location.replica_id not in excluding)
            if not future.done() and (useful or not locations):
                future.set_result(useful)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        reread_at = loop.time() + REREAD_S
        while True:
            is_idle = not (self._waiters or self._searches)
            try:
                async with asyncio.timeout_at(None if is_idle else reread_at):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if is_idle:
                reread_at = loop.time() + REREAD_S
            addresses, self._changed = self._changed, set()
            if is_reread := loop.time() >= reread_at:
                addresses = set(self._waiters)
                reread_at = loop.time() + REREAD_S
            await self._subscribe_waiters()
            for address, locations in (await self._read(addresses)).items() if addresses else ():
                self._settle(address, locations)
            if is_reread and self._searches and self._has_peers():
                await self._run_searches()

    async def _run_searches(self) -> None:
        keys = [key for key, _ in islice(self._searches.values(), SEARCH_IMAGES)]
        for key in keys:
            self._searches[key.address] = self._searches.pop(key.address)  # move to the end
        for address, locations in (await self._find(keys)).items():
            if address in self._searches:
                self._searches.pop(address)[1](address, locations)

    async def _subscribe_waiters(self) -> None:
        wanted = set(self._waiters)
        added, removed = wanted - self._subscribed, self._subscribed - wanted
        self._subscribed = wanted
        if added or removed:
            await self._subscribe(added, removed)
