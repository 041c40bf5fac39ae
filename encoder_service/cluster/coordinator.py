"""The cluster over Redis: who holds an image, who encodes it, and how rows come from a peer.

`Search` looks for images that nobody has submitted here, in one sweep for all of them. `Transfers` fetches rows from
peers into the store: each once, a few at a time, not from peers that just failed. `Outbox` sends this replica's changes
to the index in batches, and has its leases. `hand_over` runs before the replica leaves: its peers fetch the images that
it alone holds, the most recently requested first.
"""

import asyncio
import itertools
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from functools import partial
from itertools import islice
from time import monotonic
from weakref import WeakValueDictionary

from cachetools import LRUCache, TTLCache
from torch import Tensor

from encoder_contract.errors import EncoderError, UnknownImageError
from encoder_contract.fleet_key import FleetKey
from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Acquired, ClusterStatus, IndexState, Location, Locations, Replica
from encoder_service.cluster.peers import MAX_CHANNELS, Peers
from encoder_service.cluster.redis import RedisIndex
from encoder_service.cluster.sharing import SourceSharing
from encoder_service.cluster.tasks import begin, end
from encoder_service.keys import ImageKey
from encoder_service.store import Pin, Store

log = logging.getLogger(__name__)

# Time to share what is still waiting when this replica leaves: a healthy Redis takes it within a second.
LAST_SHARE_S = 2.0
# The most recently requested images. At 29 MB an embedding, more than a store holds; here some 500 bytes each, 2 MB.
RECENT_IMAGES = 4096


class Coordinator:
    """The `Cluster` of replicas that share an index."""

    def __init__(
        self, index: RedisIndex, peers: Peers, store: Store, fleet_key: FleetKey | None = None
    ) -> None:
        """With `fleet_key`, image files are shared under its signature; no others are used."""
        self.index = index
        self._peers = peers
        self._store = store
        self._outbox = Outbox(index)
        self._transfers = Transfers(index, self._outbox, peers, store)
        self._sharing = SourceSharing(index.sources, fleet_key)
        self._search = Search(self.find, lambda: bool(index.peers()))
        self._recent: LRUCache[bytes, ImageKey] = LRUCache(RECENT_IMAGES)
        # Calls that one component answers alone.
        self.search = self._search.begin
        self.end_search = self._search.end
        self.wait_published = index.wait_published
        self.publish = self._outbox.publish
        self.retract = self._outbox.retract
        self.release = self._outbox.release
        self.transfer_s = peers.transfer_s
        self.fetch_from_peer = self._transfers.fetch

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
        self._outbox.start()
        self._sharing.start()

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch the images that only this replica holds, most recently requested first."""
        if within_s > 0:
            held = [key for key in self._recent.values() if self._store.contains(key.address)]
            await hand_over(held[::-1], self.index, self._peers, within_s)

    async def leave(self) -> None:
        """Share the files that wait to be shared, and leave the index."""
        if self.index.state is IndexState.JOINED:
            await self._sharing.finish(LAST_SHARE_S)
        await self.index.leave()

    async def close(self) -> None:
        """Send the index what is left to send, and stop."""
        async with AsyncExitStack() as stack:  # in reverse order, and all of them even if one fails
            stack.push_async_callback(self._peers.close)
            stack.push_async_callback(self.index.close)
            stack.callback(self._transfers.close)
            stack.push_async_callback(self._outbox.stop)
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

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask for leases to encode the addresses; the index is not asked about leases held already."""
        leased = self._outbox.leased
        asked = [address for address in addresses if address not in leased]
        answer = Acquired(frozenset(), {})
        if asked:
            without = {*without, *self._transfers.quarantined}
            asking = asyncio.ensure_future(self.index.acquire(asked, without))
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                asking.add_done_callback(self._give_back)  # or the other replicas would wait for us in vain
                raise
        self._outbox.granted(answer.granted)
        return Acquired(answer.granted | (set(addresses) & leased), answer.located)

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Share an image's bytes in the background, unless the index is too slow for them."""
        if self.index.state is IndexState.JOINED and len(data) <= self.index.sources.max_bytes:
            self._sharing.offer(key.source_key, data)

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Return bytes that another replica shared."""
        return await self._sharing.find(key.source_key)

    async def _located(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return where the addresses are, without peers in quarantine."""
        located = await self.index.locate(addresses)
        if not (quarantined := self._transfers.quarantined):
            return located
        kept = {a: tuple(x for x in found if x.replica_id not in quarantined) for a, found in located.items()}
        return {address: locations for address, locations in kept.items() if locations}

    def _give_back(self, asking: "asyncio.Future[Acquired]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._outbox.give_back(asking.result().granted - self._outbox.leased)


# How often the sweep asks whether images have turned up elsewhere, and about how many, those first that were looked up
# longest ago: about a thousand keys a second, however many images are waited for.
SWEEP_S = 0.25
SWEEP_IMAGES = 256

# As `Cluster.find`.
Find = Callable[[Collection[ImageKey]], Awaitable[Mapping[bytes, Locations]]]
Found = Callable[[bytes, Locations], None]


class Search:
    """Looks for any number of images, each until it is found or `end` is called. Belongs to one event loop."""

    def __init__(self, find: Find, has_peers: Callable[[], bool]) -> None:
        """`find` looks many images up at once; it is called only while `has_peers` is true."""
        self._find = find
        self._has_peers = has_peers
        self._sought: dict[bytes, tuple[ImageKey, Found]] = {}  # the next to look up first
        self._sweeping: asyncio.Task[None] | None = None

    def begin(self, key: ImageKey, found: Found) -> None:
        """Call `found` once the image turns up."""
        self._sought[key.address] = key, found
        if self._sweeping is None:
            self._sweeping = begin(self._sweep(), "cluster-search")

    def end(self, address: bytes) -> None:
        """Stop looking for the address."""
        self._sought.pop(address, None)

    async def _sweep(self) -> None:
        try:
            while self._sought:
                await asyncio.sleep(SWEEP_S)
                if self._has_peers():
                    await self._look()
        finally:
            self._sweeping = None

    async def _look(self) -> None:
        keys = [key for key, _ in islice(self._sought.values(), SWEEP_IMAGES)]
        for key in keys:
            self._sought[key.address] = self._sought.pop(key.address)  # last in line
        for address, locations in (await self._find(keys)).items():
            if address in self._sought:
                self._sought.pop(address)[1](address, locations)


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
        """Release leases that arrived after their caller had left."""
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


# A peer that is unreachable or sends wrong data is not asked again for this time: a prompt of many images pays for it
# once, and a peer that was only cut off for a moment is soon used again.
QUARANTINE_S = 5.0
# Transfers at a time: each holds an embedding in memory besides the store, and fewer fill a gigabit link.
MAX_TRANSFERS = 8
MAX_OF_ONE_PEER = 4  # of them, so that a slow peer leaves turns for the others


class Transfers:
    """Concurrent callers for one address share one transfer. Belongs to one event loop."""

    def __init__(self, index: RedisIndex, outbox: Outbox, peers: Peers, store: Store) -> None:
        self._index = index
        self._outbox = outbox
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
                self._outbox.publish(key.address, grid)
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
    log.info("handed over %d images of %d that were asked for", len(taken), len(held))
