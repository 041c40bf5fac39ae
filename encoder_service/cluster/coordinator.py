"""The cluster over Redis: who holds an image, who encodes it, and how rows come from a peer."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack

from cachetools import LRUCache

from encoder_contract.fleet_key import FleetKey
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Acquired, ClusterStatus, IndexState, Locations, Replica
from encoder_service.cluster.handover import hand_over
from encoder_service.cluster.index import RedisIndex
from encoder_service.cluster.outbox import Outbox
from encoder_service.cluster.peers import Peers
from encoder_service.cluster.search import Search
from encoder_service.cluster.source_sharing import SourceSharing
from encoder_service.cluster.transfers import Transfers
from encoder_service.store import Store

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
