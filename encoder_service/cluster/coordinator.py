"""The cluster over Redis: who holds an image, who encodes it, and rows brought over from a peer."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack

from cachetools import LRUCache

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

# What waits to be shared when this replica leaves has so long: a healthy Redis takes it within a second.
LAST_SHARE_S = 2.0
# Images asked for last: at 29 MB each more than a store holds, at some 500 bytes each two megabytes here.
RECENT_IMAGES = 4096


class Coordinator:
    """`Cluster` of the replicas that share an index."""

    def __init__(self, index: RedisIndex, peers: Peers, store: Store) -> None:
        self.index = index
        self._peers = peers
        self._store = store
        self._outbox = Outbox(index)
        self._transfers = Transfers(index, self._outbox, peers, store)
        self._sharing = SourceSharing(index)
        self._search = Search(self.find, lambda: bool(index.peers()))
        self._recent: LRUCache[bytes, ImageKey] = LRUCache(RECENT_IMAGES)
        # What one part does by itself.
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
        """What metrics say of the cluster."""
        sharing = self._sharing
        return ClusterStatus(self.index.state, len(self.index.peers()), sharing.shared, sharing.dropped)

    async def join(self, replica: Replica) -> None:
        """Register, or go on trying. Raises `ModelMismatchError`."""
        await self.index.register(replica)
        self._outbox.start()
        self._sharing.start()

    async def hand_over(self, within_s: float) -> None:
        """Have peers fetch what this replica alone holds, the image asked for last first."""
        if within_s > 0:
            held = [key for key in self._recent.values() if self._store.contains(key.address)]
            await hand_over(held[::-1], self.index, self._peers, within_s)

    async def leave(self) -> None:
        """Share what waits to be shared, and leave the index."""
        if self.index.state is IndexState.JOINED:
            await self._sharing.finish(LAST_SHARE_S)
        await self.index.leave()

    async def close(self) -> None:
        """Tell the index what is left to tell, and stop."""
        async with AsyncExitStack() as stack:  # from the last to the first, whichever fails
            stack.push_async_callback(self._peers.close)
            stack.push_async_callback(self.index.close)
            stack.callback(self._transfers.close)
            stack.push_async_callback(self._outbox.stop)
            stack.push_async_callback(self._sharing.stop)

    def asked(self, key: ImageKey) -> None:
        """Note that someone wants the rows of an image."""
        self._recent.pop(key.address, None)  # so that the order is that of the last time
        self._recent[key.address] = key

    async def find(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return what others can help with: two questions, for all."""
        if self.index.state is not IndexState.JOINED:
            return {}
        located = await self._located([key.address for key in images])
        missing = [key for key in images if key.address not in located]
        shared = await self.index.sources([key.source_key for key in missing]) if missing else ()
        return located | {key.address: () for key in missing if key.source_key in shared}

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask to be the one who encodes the addresses; asks nobody about those it already is."""
        leased = self._outbox.leased
        asked = [address for address in addresses if address not in leased]
        answer = Acquired(frozenset(), {})
        if asked:
            without = {*without, *self._transfers.quarantined}
            asking = asyncio.ensure_future(self.index.acquire(asked, without))
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                asking.add_done_callback(self._give_back)  # or all others would wait for us in vain
                raise
        self._outbox.granted(answer.granted)
        return Acquired(answer.granted | (set(addresses) & leased), answer.located)

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Let any replica finish what this one begins: soon, and unless the index is too slow for it."""
        if self.index.state is IndexState.JOINED and len(data) <= self.index.max_source_bytes:
            self._sharing.offer(key.source_key, data)

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Return bytes that another replica was given."""
        return await self.index.get_source(key.source_key)

    async def _located(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return where peers that are worth asking hold the addresses."""
        located = await self.index.locate(addresses)
        if not (quarantined := self._transfers.quarantined):
            return located
        kept = {a: tuple(x for x in found if x.replica_id not in quarantined) for a, found in located.items()}
        return {address: locations for address, locations in kept.items() if locations}

    def _give_back(self, asking: "asyncio.Future[Acquired]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._outbox.give_back(asking.result().granted - self._outbox.leased)
