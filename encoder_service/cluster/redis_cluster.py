"""The cluster over Redis: which replica holds or encodes an image, and the transfer of rows from peers.

`Transfers` fetches rows from peers into the store: each image once, a few at a time, and not from peers that have just
failed. `hand_over` runs before the replica leaves: peers fetch the images that only this replica holds, the most
recently requested first.
"""

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic

from cachetools import LRUCache, TTLCache

from encoder_contract.errors import EncoderError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_contract.turns import Room, at_most
from encoder_service.cluster.cluster import (
    Acquired,
    Cluster,
    ClusterStatus,
    IndexState,
    Location,
    Locations,
    Replica,
)
from encoder_service.cluster.leases import COLLECT_S, Leases, Republisher
from encoder_service.cluster.peers import MAX_CHANNELS, Peers
from encoder_service.cluster.redis import RedisIndex, RedisSettings
from encoder_service.cluster.redis.schema import Peer
from encoder_service.cluster.redis.session import OnCall
from encoder_service.cluster.tasks import cancel_task, start_task
from encoder_service.cluster.waiting import PeerWaiters
from encoder_service.keys import ImageKey
from encoder_service.store import Pin, Store
from encoder_service.store.tier import Entry

log = logging.getLogger(__name__)

# Most recently requested images to remember. More than a store holds, at 29 MB an embedding; each takes some 500 bytes
# here, 2 MB in all.
RECENT_IMAGES = 4096


class RedisCluster(Cluster):
    """The replicas that share an index in Redis."""

    def __init__(
        self,
        settings: RedisSettings,
        peers: Peers,
        store: Store,
        *,
        on_call: OnCall = lambda *_: None,
    ) -> None:
        """`on_call` is called after every call to Redis."""
        super().__init__()
        self.index = RedisIndex(settings, self, on_call=on_call)
        self.leases = Leases(self.index, renew_s=settings.lease_ttl_ms / 3000)
        self._peers = peers
        self._store = store
        self._waiters = PeerWaiters(
            self.index.settled, self.index.subscribe, self.find, lambda: bool(self.index.peers())
        )
        self._transfers = Transfers(self.index, self.leases, peers, store)
        self._republisher = Republisher(store.grids, self.index.publish, settings.location_ttl_s)
        self._republishing: asyncio.Task[None] | None = None
        self._acquiring: dict[frozenset[str], _Acquiring] = {}
        self._recent: LRUCache[bytes, ImageKey] = LRUCache(RECENT_IMAGES)

    @property
    def never_joined(self) -> str:
        """See `ClusterStatus`. Thread-safe."""
        return self.index.never_joined

    @property
    def status(self) -> ClusterStatus:
        """The status now. No I/O."""
        return ClusterStatus(
            self.index.state, len(self.index.peers()), self._peers.foreign, self.never_joined
        )

    async def join(self, replica: Replica) -> None:
        """Register with the index, or keep trying to. Raises `ModelMismatchError`."""
        await self.index.register(replica)
        self._republishing = start_task(self._republisher.run(), "cluster-republisher")
        self.leases.start()

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch the images that only this replica holds, most recently requested first."""
        if within_s > 0:
            held = [key for key in self._recent.values() if self._store.contains(key.address)]
            await hand_over(held[::-1], self.index, self._peers, within_s)

    async def leave(self) -> None:
        """Release all leases, and leave the index."""
        self.leases.release_all()
        await self.leases.send()
        await self.index.leave()

    async def close(self) -> None:
        """Send unsent changes to the index, and stop."""
        async with AsyncExitStack() as stack:  # runs them in reverse order, all of them even if one fails
            stack.push_async_callback(self._peers.close)
            stack.push_async_callback(self.index.close)
            stack.push_async_callback(self._waiters.close)
            stack.push_async_callback(cancel_task, self._republishing)
            stack.push_async_callback(self._transfers.close)
            stack.push_async_callback(self.leases.stop)

    def note_request(self, key: ImageKey) -> None:
        """Note that a caller wants the rows of an image."""
        self._recent.pop(key.address, None)  # keeps the cache in the order of the latest request
        self._recent[key.address] = key

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return the images that another replica holds or encodes: one call to Redis for any number of images."""
        found = await self.index.find([key.address for key in images])
        if not (quarantined := self._transfers.quarantined):
            return found
        kept = {a: tuple(x for x in at if x.replica_id not in quarantined) for a, at in found.items()}
        return {address: locations for address, locations in kept.items() if locations or not found[address]}

    def start_search(self, key: ImageKey, found: Callable[[bytes, Locations], None]) -> None:
        """Call `found` once `find` finds the image, unless `stop_search` comes first."""
        self._waiters.start_search(key, found)

    def stop_search(self, address: bytes) -> None:
        """Stop searching for the address."""
        self._waiters.stop_search(address)

    async def acquire(self, addresses: Sequence[bytes], excluding: Collection[str] = ()) -> Acquired:
        """Request leases to encode the addresses. Leases that this replica already has cost no call to Redis."""
        missing = [address for address in addresses if not self.leases.holds(address)]
        if not missing:
            return Acquired(frozenset(addresses), {})
        but = frozenset({*excluding, *self._transfers.quarantined})
        batch = self._acquiring.get(but)
        if batch is None:
            batch = self._acquiring[but] = _Acquiring()
            batch.task = asyncio.create_task(self._acquire(batch, but), name="cluster-acquire")
        batch.wanted.update(missing)
        try:
            answer = await asyncio.shield(batch.task)
        except asyncio.CancelledError:
            batch.wanted.subtract(missing)
            if batch.task.done():  # at this very moment
                for address in batch.task.result().granted.difference(+batch.wanted):
                    self.leases.release(address)
            raise
        located = {address: answer.located[address] for address in missing if address in answer.located}
        return Acquired(frozenset(filter(self.leases.holds, addresses)), located)

    async def _acquire(self, batch: "_Acquiring", excluding: frozenset[str]) -> Acquired:
        """Acquire what callers want within `COLLECT_S`: one call to Redis for all of them, not one for each image."""
        await asyncio.sleep(COLLECT_S)
        del self._acquiring[excluding]
        answer = await self.index.acquire(list(+batch.wanted), excluding)
        unwanted = answer.granted.difference(
            +batch.wanted
        )  # their callers were cancelled: do not let others wait
        self.leases.add(answer.granted - unwanted)
        self.leases.release_unused(unwanted)
        return answer

    async def wait_published(
        self, address: bytes, timeout_s: float, excluding: Collection[str] = ()
    ) -> Locations:
        """Wait until a peer that is not in `excluding` has published the address, and return its locations."""
        if self.index.state is not IndexState.JOINED:
            return ()
        return await self._waiters.wait(address, timeout_s, excluding)

    def publish(self, address: bytes, grid: Grid) -> None:
        """Announce that this replica now holds the address; ends its lease."""
        self.leases.publish(address, grid)

    def retract(self, address: bytes) -> None:
        """Announce that this replica no longer holds the address."""
        self.leases.retract(address)

    def release(self, address: bytes) -> None:
        """Release the lease of the address, if this replica has it."""
        self.leases.release(address)

    def transfer_s(self, tokens: int) -> float:
        """Return the expected time to fetch an image of `tokens` tokens from a peer, in seconds."""
        return self._peers.transfer_s(tokens)

    async def fetch_from_peer(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """Fetch the rows from one of `locations` into the store; return None if every location fails."""
        return await self._transfers.fetch(key, locations, holder)

    # Events of the index

    def on_entries_lost(self) -> None:
        """Renew all leases and republish all addresses: Redis may have lost this replica's entries."""
        self.leases.mark_all_due()
        self._republisher.trigger()

    def on_unavailable(self) -> None:
        """Wake all waiters: the index is unavailable from now on."""
        self._waiters.wake_all()

    async def on_heartbeat(self) -> None:
        """Renew the leases that are due."""
        await self.leases.renew()

    def on_changed(self, address: bytes) -> None:
        """Read an address that changed."""
        self._waiters.changed(address)


@dataclass
class _Acquiring:
    """Leases that callers request together."""

    wanted: Counter[bytes] = field(default_factory=Counter)
    """How many callers want each address."""
    task: asyncio.Task[Acquired] = field(init=False)


# A peer that is unreachable or sends wrong data is not asked again for this time: a prompt of many images waits for it
# only once, and a peer that was disconnected for a moment is soon used again.
QUARANTINE_S = 5.0
# Concurrent transfers. Each reserves pages for an embedding; fewer would already fill a gigabit link.
MAX_TRANSFERS = 8
MAX_TRANSFERS_PER_PEER = 4  # so that a slow peer does not take all turns


class Transfers:
    """Transfers of rows from peers into pages of the store's host tier. Not thread-safe: use from one event loop.

    Concurrent callers for one address share one transfer. It reserves its pages before it asks the peer, and frees them
    if the rows do not arrive whole. It does not keep others from writing the address: the first to commit wins.
    """

    def __init__(self, index: RedisIndex, leases: Leases, peers: Peers, store: Store) -> None:
        self._index = index
        self._leases = leases
        self._peers = peers
        self._store = store
        self._running: dict[bytes, asyncio.Task[Pin | None]] = {}
        self._turns = Room(MAX_TRANSFERS, share=at_most(MAX_TRANSFERS_PER_PEER))
        self._freed = asyncio.Event()  # there may be pages for a transfer that found none
        self._loop: asyncio.AbstractEventLoop | None = None
        store.on_freed.append(self._on_freed)
        self._quarantine: TTLCache[str, None] = TTLCache(MAX_CHANNELS, QUARANTINE_S, monotonic)

    @property
    def quarantined(self) -> set[str]:
        """Ids of the replicas that failed within the last `QUARANTINE_S`."""
        return set(self._quarantine)

    async def fetch(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        """Fetch the rows into the store; see `Cluster.fetch_from_peer`."""
        task = self._running.get(key.address)
        if task is None:
            task = asyncio.create_task(self._fetch(key, locations, holder))
            self._running[key.address] = task
            task.add_done_callback(lambda _: self._running.pop(key.address, None))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel all transfers, which free their pages."""
        self._store.on_freed = [call for call in self._store.on_freed if call != self._on_freed]
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _fetch(self, key: ImageKey, locations: Locations, holder: str) -> Pin | None:
        for location in locations:
            async with self._turns.taken(location.replica_id):
                if location.replica_id in self._quarantine:
                    continue  # another transfer from this peer failed while this one waited
                if (pin := await self._fetch_from(location, key, holder)) is not None:
                    self._leases.publish(key.address, pin.grid)
                    return pin
        return None

    async def _fetch_from(self, location: Location, key: ImageKey, holder: str) -> Pin | None:
        """Return a pin on the rows, received into pages of the store unless they are held; None if the peer fails."""
        if not self._peers.tokens(location.grid):
            log.warning("the index has an impossible grid of %s at %s", key.named, location.replica_id)
            self._quarantine[location.replica_id] = None
            return None
        pages = await self._reserved(location.grid, key, holder)
        if isinstance(pages, Pin):
            return pages
        rows = self._store.rows(pages)
        try:
            with self._store.filling(pages):
                pages.checksum = await self._peers.fetch(location, key, rows)
        except EncoderError as error:
            log.info("peer %s (%s) failed: %s", location.replica_id, location.endpoint, error)
            if isinstance(error, UnknownImageError):
                await self._index.retract([key.address], location.replica_id)
            else:  # the location stays in the index: other replicas may be able to reach the peer
                self._quarantine[location.replica_id] = None
            return None
        [pin] = self._store.commit([pages])
        return pin

    async def _reserved(self, grid: Grid, key: ImageKey, holder: str) -> Entry | Pin:
        """Return pages of the host tier for the rows, or a pin if they are held. Raises `OverloadedError`."""
        self._loop = asyncio.get_running_loop()
        tokens, reserve = self._peers.tokens(grid), self._store.reserve
        try:
            async with asyncio.timeout(self._store.wait_s):
                while (pages := reserve(key.address, tokens, grid, holder, on_host=True)) is None:
                    self._freed.clear()
                    await self._freed.wait()
                return pages
        except TimeoutError:
            raise self._store.full_error() from None

    def _on_freed(self) -> None:
        """Wake the transfers that wait for pages. Called on any thread, with the store's lock held."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._freed.set)


# Enough to fill a gigabit link, few enough to leave bandwidth for the calls that still run.
CONCURRENT_HANDOVERS = 4


async def hand_over(held: Sequence[ImageKey], index: RedisIndex, peers: Peers, within_s: float) -> None:
    """Have peers fetch those of the images `held` that no peer holds, for at most `within_s`.

    The peers get images in turn, in any order.
    """
    located = await index.locate([key.address for key in held])
    remaining = iter([key for key in held if key.address not in located])
    handed_over: list[ImageKey] = []

    async def offer(turns: Iterator[Peer]) -> None:
        for key in remaining:
            peer = next(turns)
            try:
                await peers.offer(peer.replica_id, peer.endpoint, key)
                handed_over.append(key)
            except EncoderError as error:
                log.info("the peer %s did not take over %s: %s", peer.endpoint, key.named, error)

    if peers_now := list(index.peers()):
        random.shuffle(peers_now)  # several replicas may leave at once
        turns = itertools.cycle(peers_now)
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(offer(turns) for _ in range(CONCURRENT_HANDOVERS)))
        except TimeoutError:
            log.info("the handover stopped after %g s (--hand-over-s)", within_s)
    log.info("handed over %d of %d requested images", len(handed_over), len(held))
