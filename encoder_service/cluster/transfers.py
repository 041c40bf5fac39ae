"""Transfers: rows fetched from peers into the store, each once, a few at a time, not from peers that just failed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import monotonic
from weakref import WeakValueDictionary

from cachetools import TTLCache
from torch import Tensor

from encoder_contract.errors import EncoderError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Location, Locations
from encoder_service.cluster.index import RedisIndex
from encoder_service.cluster.outbox import Outbox
from encoder_service.cluster.peers import MAX_CHANNELS, Peers
from encoder_service.store import Pin, Store

log = logging.getLogger(__name__)

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

    async def fetch(self, key: ImageKey, locations: Locations) -> Pin | None:
        """Fetch the rows into the store, as in `Cluster.fetch_from_peer`."""
        task = self._under_way.get(key.address)
        if task is None:
            task = asyncio.create_task(self._fetch(key, locations))
            self._under_way[key.address] = task
            task.add_done_callback(lambda _: self._under_way.pop(key.address, None))
        return await asyncio.shield(task)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    async def _fetch(self, key: ImageKey, locations: Locations) -> Pin | None:
        for location in locations:
            async with self._turn(location.replica_id):
                if (fetched := await self._try(location, key)) is None:
                    continue
                grid, rows = fetched
                loop = asyncio.get_running_loop()
                pin = await loop.run_in_executor(self._threads, self._store.put, key.address, rows, grid)
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
