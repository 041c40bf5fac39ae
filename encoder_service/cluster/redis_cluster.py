"""The cluster over Redis: which replica holds or encodes an image, and how rows come from a peer.

`Transfers` fetches rows from peers into the store: each once, a few at a time, not from peers that just failed.
`hand_over` runs before the replica leaves: its peers fetch the images that it alone holds, the most recently requested
first.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic
from weakref import WeakValueDictionary

from cachetools import LRUCache, TTLCache
from torch import Tensor

from encoder_contract.errors import EncoderError, UnknownImageError
from encoder_contract.fleet_key import FleetKey
from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import (
    Acquired,
    Cluster,
    ClusterStatus,
    IndexState,
    Location,
    Locations,
    Replica,
)
from encoder_service.cluster.leases import Leases, Republisher
from encoder_service.cluster.peers import MAX_CHANNELS, Peers
from encoder_service.cluster.redis import RedisIndex, RedisSettings
from encoder_service.cluster.redis.session import OnCall
from encoder_service.cluster.sharing import SourceSharing
from encoder_service.cluster.tasks import begin, end
from encoder_service.cluster.waiting import PeerWaiters
from encoder_service.keys import ImageKey
from encoder_service.store import Pin, Store

log = logging.getLogger(__name__)

# Time to share what is still waiting when this replica leaves: a healthy Redis takes it within a second.
LAST_SHARE_S = 2.0
# The most recently requested images. At 29 MB an embedding, more than a store holds; here some 500 bytes each, 2 MB.
RECENT_IMAGES = 4096


class RedisCluster(Cluster):
    """The replicas that share an index in Redis."""

    def __init__(
        self,
        settings: RedisSettings,
        jobs: Sized,
        peers: Peers,
        store: Store,
        fleet_key: FleetKey | None = None,
        *,
        on_call: OnCall = lambda *_: None,
    ) -> None:
        """`jobs` is this replica's queue; `on_call` is called after every call to Redis.

        With `fleet_key`, image files are shared under its signature; no others are used.
        """
        super().__init__()
        self.index = RedisIndex(settings, jobs, self, on_call=on_call)
        self.leases = Leases(self.index, renew_s=settings.lease_ttl_ms / 3000)
        self._peers = peers
        self._store = store
        self._waiters = PeerWaiters(
            self.index.settled, self.index.subscribe, self.find, lambda: bool(self.index.peers())
        )
        self._transfers = Transfers(self.index, self.leases, peers, store)
        self._sharing = SourceSharing(self.index.sources, fleet_key)
        self._republisher = Republisher(store, self.index.publish, settings.location_ttl_s)
        self._republishing: asyncio.Task[None] | None = None
        self._recent: LRUCache[bytes, ImageKey] = LRUCache(RECENT_IMAGES)

    @property
    def status(self) -> ClusterStatus:
        """The cluster in numbers."""
        sharing = self._sharing
        return ClusterStatus(
            self.index.state,
            len(self.index.peers()),
            sharing.shared,
            sharing.dropped,
            foreign_rows=self._peers.foreign,
            foreign_sources=sharing.foreign,
        )

    async def join(self, replica: Replica) -> None:
        """Register with the index, or keep trying to. Raises `ModelMismatchError`."""
        await self.index.register(replica)
        self._republishing = begin(self._republisher.run(), "cluster-republisher")
        self.leases.start()
        self._sharing.start()

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch the images that only this replica holds, most recently requested first."""
        if within_s > 0:
            held = [key for key in self._recent.values() if self._store.contains(key.address)]
            await hand_over(held[::-1], self.index, self._peers, within_s)

    async def leave(self) -> None:
        """Share the files that wait to be shared, release all leases, and leave the index."""
        if self.index.state is IndexState.JOINED:
            await self._sharing.finish(LAST_SHARE_S)
        self.leases.release_all()
        await self.leases.send()
        await self.index.leave()

    async def close(self) -> None:
        """Send the index what is left to send, and stop."""
        async with AsyncExitStack() as stack:  # in reverse order, and all of them even if one fails
            stack.push_async_callback(self._peers.close)
            stack.push_async_callback(self.index.close)
            stack.push_async_callback(self._waiters.close)
            stack.push_async_callback(end, self._republishing)
            stack.callback(self._transfers.close)
            stack.push_async_callback(self.leases.stop)
            stack.push_async_callback(self._sharing.stop)

    def asked(self, key: ImageKey) -> None:
        """Note that a caller wants the rows of an image."""
        self._recent.pop(key.address, None)  # so that the cache is in order of the latest request
        self._recent[key.address] = key

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return which images other replicas can help with: two calls, for any number of images."""
        if self.index.state is not IndexState.JOINED:
            return {}
        located = await self._located([key.address for key in images])
        missing = [key for key in images if key.address not in located]
        shared = await self.index.sources.existing([key.source_key for key in missing]) if missing else ()
        return located | {key.address: () for key in missing if key.source_key in shared}

    def search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """Call `found` once `find` finds the image, unless `end_search` comes first."""
        self._waiters.search(key, found)

    def end_search(self, address: bytes) -> None:
        """Stop looking for the address."""
        self._waiters.end_search(address)

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask for leases to encode the addresses; the index is not asked about leases held already."""
        asked = [address for address in addresses if not self.leases.holds(address)]
        answer = Acquired(frozenset(), {})
        if asked:
            without = {*without, *self._transfers.quarantined}
            asking = asyncio.ensure_future(self.index.acquire(asked, without))
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                asking.add_done_callback(self._give_back)  # or the other replicas would wait for us in vain
                raise
        self.leases.granted(answer.granted)
        return Acquired(frozenset(filter(self.leases.holds, addresses)), answer.located)

    async def wait_published(
        self, address: bytes, timeout_s: float, without: Collection[str] = ()
    ) -> Locations:
        """Wait until a peer that is not in `without` has published the address, and return where it is."""
        if self.index.state is not IndexState.JOINED:
            return ()
        return await self._waiters.wait(address, timeout_s, without)

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica holds the address now; ends its lease."""
        self.leases.publish(address, grid)

    def retract(self, address: bytes) -> None:
        """Announce that this replica no longer holds the address."""
        self.leases.retract(address)

    def release(self, address: bytes) -> None:
        """Give up the lease of the address, if this replica has it."""
        self.leases.release(address)

    def transfer_s(self, tokens: int) -> float:
        """Return how long fetching an image of so many tokens from a peer should take, seconds."""
        return self._peers.transfer_s(tokens)

    async def fetch_from_peer(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """Fetch the rows from one of `locations` into the store; return None if none of them delivers."""
        return await self._transfers.fetch(key, locations, holder)

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Share an image's bytes in the background, unless the index is too slow for them."""
        if self.index.state is IndexState.JOINED and len(data) <= self.index.sources.max_bytes:
            self._sharing.offer(key.source_key, data)

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Return bytes that another replica shared."""
        return await self._sharing.find(key.source_key)

    # Events of the index

    def on_forgotten(self) -> None:
        """Renew leases and publish everything again: Redis may have lost what it knew about us."""
        self.leases.mark_due()
        self._republisher.forgotten()

    def on_lost(self) -> None:
        """Wake all waiters: the index is unavailable from now on."""
        self._waiters.settle_all()

    async def on_beat(self) -> None:
        """Renew the leases that are due."""
        await self.leases.renew()

    def on_changed(self, address: bytes) -> None:
        """Read an address whose change was notified."""
        self._waiters.changed(address)

    async def _located(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return where the addresses are, without peers in quarantine."""
        located = await self.index.locate(addresses)
        if not (quarantined := self._transfers.quarantined):
            return located
        kept = {a: tuple(x for x in found if x.replica_id not in quarantined) for a, found in located.items()}
        return {address: locations for address, locations in kept.items() if locations}

    def _give_back(self, asking: "asyncio.Future[Acquired]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            self.leases.give_back(asking.result().granted)


# A peer that is unreachable or sends wrong data is not asked again for this time: a prompt of many images pays for it
# once, and a peer that was only cut off for a moment is soon used again.
QUARANTINE_S = 5.0
# Transfers at a time: each holds an embedding in memory besides the store, and fewer fill a gigabit link.
MAX_TRANSFERS = 8
MAX_OF_ONE_PEER = 4  # of them, so that a slow peer leaves turns for the others


class Transfers:
    """Concurrent callers for one address share one transfer. Belongs to one event loop."""

    def __init__(self, index: RedisIndex, leases: Leases, peers: Peers, store: Store) -> None:
        self._index = index
        self._leases = leases
        self._peers = peers
        self._store = store
        self._under_way: dict[bytes, asyncio.Task[Pin | None]] = {}
        self._turns = asyncio.Semaphore(MAX_TRANSFERS)
        # A pool of its own: a write that waits for room must not hold up the validation of uploads.
        self._threads = ThreadPoolExecutor(MAX_TRANSFERS, "cluster-put")
        # A semaphore for each peer that transfers use or wait for.
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._quarantine: TTLCache[str, None] = TTLCache(MAX_CHANNELS, QUARANTINE_S, monotonic)

    @property
    def quarantined(self) -> set[str]:
        """Ids of the replicas that failed a moment ago."""
        return set(self._quarantine)

    async def fetch(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """Fetch the rows into the store, as in `Cluster.fetch_from_peer`."""
        task = self._under_way.get(key.address)
        if task is None:
            task = asyncio.create_task(self._fetch(key, locations, holder))
            self._under_way[key.address] = task
            task.add_done_callback(lambda _: self._under_way.pop(key.address, None))
        return await asyncio.shield(task)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    async def _fetch(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        for location in locations:
            async with self._turn(location.replica_id):
                if (fetched := await self._try(location, key)) is None:
                    continue
                grid, rows = fetched
                loop = asyncio.get_running_loop()
                put = partial(self._store.put, key.address, rows, grid, holder=holder)
                pin = await loop.run_in_executor(self._threads, put)
                self._leases.publish(key.address, grid)
                return pin
        return None

    async def _try(self, location: Location, key: ImageKey) -> tuple[Grid, Tensor] | None:
        if location.replica_id in self._quarantine:
            return None  # it failed another transfer while this one waited
        try:
            return await self._peers.fetch(location.endpoint, key)
        except EncoderError as error:
            log.info("peer %s (%s) did not deliver rows: %s", location.replica_id, location.endpoint, error)
            if isinstance(error, UnknownImageError):
                await self._index.retract([key.address], location.replica_id)
            else:  # it stays in the index: other replicas may be able to reach it
                self._quarantine[location.replica_id] = None
        return None

    @asynccontextmanager
    async def _turn(self, replica_id: str) -> AsyncIterator[None]:
        # The peer's own turn first: a transfer that waits for a slow peer must not take a turn from others.
        of_one = self._turns_of.setdefault(replica_id, asyncio.Semaphore(MAX_OF_ONE_PEER))
        async with of_one, self._turns:
            yield


AT_ONCE = 4  # transfers: enough to fill a gigabit, few enough to leave room for the calls that still run


async def hand_over(held: Sequence[ImageKey], index: RedisIndex, peers: Peers, within_s: float) -> None:
    """Have peers fetch those of the images `held` that no peer holds, for at most `within_s`.

    The images go to the peers in turn, beginning with the least loaded.
    """
    located = await index.locate([key.address for key in held])
    alone = iter([key for key in held if key.address not in located])
    taken: list[ImageKey] = []

    async def offer(endpoints: Iterator[str]) -> None:
        for key in alone:
            endpoint = next(endpoints)
            try:
                await peers.offer(endpoint, key)
                taken.append(key)
            except EncoderError as error:
                log.info("the peer %s did not take an image over: %s", endpoint, error)

    if ready := sorted(index.peers(), key=lambda peer: peer.load):
        endpoints = itertools.cycle([peer.endpoint for peer in ready])
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(offer(endpoints) for _ in range(AT_ONCE)))
        except TimeoutError:
            log.info("the handover ended after %g s", within_s)
    log.info("handed over %d of %d requested images", len(taken), len(held))
