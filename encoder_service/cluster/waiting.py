"""What this replica waits for at others: images that they encode, and images that they may turn out to have."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from itertools import islice

from encoder_service.cluster.cluster import Locations
from encoder_service.cluster.tasks import begin, end
from encoder_service.keys import ImageKey

# How late a lost notification, or a lapsed lease (which notifies no waiter), is noticed. One read covers all waiters.
REREAD_S = 0.2
# The images looked for that one read covers, those first that were looked up longest ago: about a thousand keys a
# second, however many images are looked for.
SEARCH_IMAGES = 200

# Returns the settled addresses: published (with their locations), or no longer being encoded (without).
Read = Callable[[Collection[bytes]], Awaitable[Mapping[bytes, Locations]]]
# As `Cluster.find`.
Find = Callable[[Collection[ImageKey]], Awaitable[Mapping[bytes, Locations]]]
# Takes the addresses whose changes are to be notified from now on, and those whose changes no longer are.
Subscribe = Callable[[Iterable[bytes], Iterable[bytes]], Awaitable[None]]
Found = Callable[[bytes, Locations], None]


class PeerWaiters:
    """Any number of waiters for any number of addresses; one task reads for all of them. One event loop's.

    `wait` is for an address that another replica encodes: it is read when its change is notified, and every `REREAD_S`.
    `search` is for an image that is not submitted here: some of them are looked up every `REREAD_S`.
    """

    def __init__(self, read: Read, subscribe: Subscribe, find: Find, has_peers: Callable[[], bool]) -> None:
        """`find` is called only while `has_peers` is true."""
        self._read = read
        self._subscribe = subscribe
        self._find = find
        self._has_peers = has_peers
        # For each waiter the replicas whose locations are of no use to it.
        self._waiters: dict[bytes, dict[asyncio.Future[Locations], Collection[str]]] = {}
        self._sought: dict[bytes, tuple[ImageKey, Found]] = {}  # the next to look up first
        self._subscribed: set[bytes] = set()
        self._changed: set[bytes] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, address: bytes, timeout_s: float, without: Collection[str] = ()) -> Locations:
        """Return where the address was published; empty if its lease ended without that, or at the timeout.

        Nothing has changed as long as it is only at replicas in `without`.
        """
        future: asyncio.Future[Locations] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(address, {})[future] = without
        self._begin()
        self.changed(address)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return ()
        finally:
            self._leave(address, future)

    def search(self, key: ImageKey, found: Found) -> None:
        """Call `found` once another replica has the image, unless `end_search` comes first."""
        self._sought[key.address] = key, found
        self._begin()

    def end_search(self, address: bytes) -> None:
        """Stop looking for the address."""
        self._sought.pop(address, None)

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

    def _begin(self) -> None:
        if self._task is None:
            self._task = begin(self._serve(), "cluster-waiters")
        self._wake.set()

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
            is_idle = not (self._waiters or self._sought)
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
            if is_reread and self._sought and self._has_peers():
                await self._look()

    async def _look(self) -> None:
        keys = [key for key, _ in islice(self._sought.values(), SEARCH_IMAGES)]
        for key in keys:
            self._sought[key.address] = self._sought.pop(key.address)  # last in line
        for address, locations in (await self._find(keys)).items():
            if address in self._sought:
                self._sought.pop(address)[1](address, locations)

    async def _subscribe_waiters(self) -> None:
        wanted = set(self._waiters)
        begun, ceased = wanted - self._subscribed, self._subscribed - wanted
        self._subscribed = wanted
        if begun or ceased:
            await self._subscribe(begun, ceased)
