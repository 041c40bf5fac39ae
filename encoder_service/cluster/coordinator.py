"""The fleet as this replica sees it: who holds an image, who encodes it, and rows brought over from a peer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import monotonic
from weakref import WeakValueDictionary

from torch import Tensor

from encoder_contract.errors import EncoderError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.cluster.index import Acquired, Index, IndexState, Location, Locations, Tier
from encoder_service.cluster.outbox import Outbox
from encoder_service.cluster.source_sharing import Sharing
from encoder_service.store import Pin

log = logging.getLogger(__name__)

# A peer that cannot be reached, or sends what is not the rows, is not asked again for so long: a prompt of many images
# pays for it once, and one that was only cut off for a moment is soon of use again.
QUARANTINE_S = 5.0
# Transfers at a time: each holds an embedding in memory beside the store, and fewer fill a link.
MAX_TRANSFERS = 8
MAX_OF_ONE_PEER = 4  # of them: a peer that dawdles leaves turns for the others
# What waits to be shared when this replica leaves has so long: a healthy Redis takes it within a second.
LAST_SHARE_S = 2.0

# (endpoint, image) -> grid and rows [tokens, width]; raises an EncoderError.
FetchFromPeer = Callable[[str, ImageKey], Awaitable[tuple[Grid, Tensor]]]
Put = Callable[[bytes, Tensor, Grid], Pin]


class Coordinator:
    """Index, peers and shared sources behind the questions that the path of an image asks. One event loop's."""

    def __init__(self, index: Index, fetch: FetchFromPeer, put: Put) -> None:
        self._index = index
        self._fetch = fetch
        self._put = put
        self._leased: set[bytes] = set()
        self._fetching: dict[bytes, asyncio.Task[Pin | None]] = {}
        self._turns = asyncio.Semaphore(MAX_TRANSFERS)
        # Of our own: a write that waits for room must not keep the loop's threads from hashing what was uploaded.
        self._threads = ThreadPoolExecutor(MAX_TRANSFERS, "fleet-put")
        # A semaphore for each peer that someone asks or waits for.
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._quarantined: dict[str, float] = {}  # replica id -> until when, on the monotonic clock
        self.sharing = Sharing(index.put_source)
        self._outbox = Outbox(
            publish=lambda grids: index.publish(grids, Tier.HOST),
            retract=index.retract,
            release=index.release,
        )

    @property
    def joined(self) -> bool:
        """Whether there is anyone to ask."""
        return self._index.state is IndexState.JOINED

    def start(self) -> None:
        """Begin to tell the index what happens here."""
        self._outbox.start()
        self.sharing.start()

    async def leave(self) -> None:
        """Share what waits to be shared, and leave the index."""
        if self.joined:
            await self.sharing.finish(LAST_SHARE_S)
        await self._index.leave()

    async def stop(self) -> None:
        """Tell it what is left to tell."""
        await self.sharing.stop()
        await self._outbox.stop()
        self._threads.shutdown(wait=False)

    async def locate(self, addresses: Sequence[bytes]) -> dict[bytes, Locations]:
        """Return where peers that are worth asking hold the addresses."""
        located = await self._index.locate(addresses)
        if not (quarantined := self._quarantined_now()):
            return located
        kept = {a: tuple(x for x in found if x.replica_id not in quarantined) for a, found in located.items()}
        return {address: locations for address, locations in kept.items() if locations}

    @property
    def in_company(self) -> bool:
        """Whether another replica is alive: what is not known in the fleet now may be so in a moment."""
        return bool(self._index.peers())

    async def look_around(self, images: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Return those of the images, by address, that the fleet can help with.

        That is where each is held; nowhere when it is the image's bytes that are shared. Two questions, for all.
        """
        if not self.joined:
            return {}
        located = await self.locate([key.address for key in images])
        missing = [key for key in images if key.address not in located]
        shared = await self._index.sources(list({key.source_key for key in missing})) if missing else ()
        return located | {key.address: () for key in missing if key.source_key in shared}

    async def acquire(self, addresses: Sequence[bytes], without: Collection[str] = ()) -> Acquired:
        """Ask to be the one who encodes the addresses; asks nobody about those it already is.

        What is held by the replicas in `without` alone, or by peers not worth asking, is granted as if nobody had it.
        """
        asked = [address for address in addresses if address not in self._leased]
        answer = Acquired(frozenset(), {})
        if asked:
            asking = asyncio.ensure_future(self._index.acquire(asked, {*without, *self._quarantined_now()}))
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                asking.add_done_callback(self._give_back)  # or all others would wait for us in vain
                raise
        self._leased |= answer.granted
        self._outbox.leased(answer.granted)
        return Acquired(answer.granted | (set(addresses) & self._leased), answer.located)

    async def wait_elsewhere(self, address: bytes, timeout_s: float) -> Locations:
        """Wait until the replica that encodes the address has published it, and return where; or has given up."""
        return await self._index.wait_published(address, timeout_s)

    def kept(self, address: bytes, grid: Grid) -> None:
        """Say that this replica holds the address now."""
        self._leased.discard(address)
        self._outbox.held(address, grid)

    def gone(self, address: bytes) -> None:
        """Say that this replica no longer holds the address."""
        self._outbox.gone(address)

    def gave_up(self, address: bytes) -> None:
        """Say that this replica will not encode the address after all."""
        if address in self._leased:
            self._leased.discard(address)
            self._outbox.released(address)

    async def fetch_from_peer(self, key: ImageKey, locations: Locations) -> Pin | None:
        """Bring the rows over from one of `locations` into the store; None when none of them gives them.

        Each location is tried once. Callers share one transfer, and so may share the pin: it is for holding the entry
        until each has a pin of its own. Raises `OverloadedError` when the store has no room.
        """
        task = self._fetching.get(key.address)
        if task is None:
            task = asyncio.create_task(self._fetch_from_peer(key, locations))
            self._fetching[key.address] = task
            task.add_done_callback(lambda _: self._fetching.pop(key.address, None))
        return await asyncio.shield(task)

    def share_source(self, key: ImageKey, data: bytes) -> None:
        """Let any replica finish what this one begins: soon, and unless the index is too slow for it."""
        if self.joined and len(data) <= self._index.max_source_bytes:
            self.sharing.offer(key.source_key, data)

    async def find_source(self, key: ImageKey) -> bytes | None:
        """Return bytes that another replica was given."""
        return await self._index.get_source(key.source_key) if self.joined else None

    async def _fetch_from_peer(self, key: ImageKey, locations: Locations) -> Pin | None:
        for location in locations:
            async with self._turn(location.replica_id):
                if (fetched := await self._try(location, key)) is None:
                    continue
                grid, rows = fetched
                loop = asyncio.get_running_loop()
                pin = await loop.run_in_executor(self._threads, self._put, key.address, rows, grid)
                self.kept(key.address, grid)
                return pin
        return None

    async def _try(self, location: Location, key: ImageKey) -> tuple[Grid, Tensor] | None:
        if location.replica_id in self._quarantined_now():
            return None  # it failed another while we waited for our turn
        try:
            return await self._fetch(location.endpoint, key)
        except EncoderError as error:
            await self._quarantine(location, key.address, error)
            return None

    @asynccontextmanager
    async def _turn(self, replica_id: str) -> AsyncIterator[None]:
        # First the peer's own turn: who waits for a slow peer must not keep a turn from others.
        of_one = self._turns_of.setdefault(replica_id, asyncio.Semaphore(MAX_OF_ONE_PEER))
        async with of_one, self._turns:
            yield

    async def _quarantine(self, location: Location, address: bytes, error: EncoderError) -> None:
        """Take a stale location out of the index; shun a peer that fails: others may well be able to reach it."""
        log.info("peer %s (%s) did not give rows: %s", location.replica_id, location.endpoint, error)
        if isinstance(error, UnknownImageError):
            await self._index.retract([address], location.replica_id)
        else:
            self._quarantined[location.replica_id] = monotonic() + QUARANTINE_S

    def _quarantined_now(self) -> set[str]:
        now = monotonic()
        self._quarantined = {
            replica_id: until for replica_id, until in self._quarantined.items() if until > now
        }
        return set(self._quarantined)

    def _give_back(self, asking: "asyncio.Future[Acquired]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            for address in asking.result().granted - self._leased:
                self._outbox.released(address)
