"""Source sharing: image files go to the index in the background, so that any replica can finish what one begins."""

import asyncio
import logging

from encoder_contract.fleet_key import FleetKey
from encoder_service.cluster.redis.index import SharedSources
from encoder_service.cluster.tasks import begin, end

log = logging.getLogger(__name__)

AT_ONCE = 2  # files: enough to fill a gigabit link, few enough not to delay calls that a caller waits for
# The most that may wait: as much as a gigabit link carries in half a second. What exceeds it is not shared, and costs
# another upload if this replica dies.
MAX_WAITING_BYTES = 64 << 20
MAX_WAITING_IMAGES = 512


class SourceSharing:
    """`offer` returns at once; a few tasks send what was offered. Belongs to one event loop."""

    def __init__(self, sources: SharedSources, fleet_key: FleetKey | None) -> None:
        """With `fleet_key`, files are shared under its signature, and others are not found."""
        self._sources = sources
        self._fleet_key = fleet_key
        self._waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(MAX_WAITING_IMAGES)
        self._waiting_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.shared = 0
        self.dropped = 0
        self.foreign = 0

    def start(self) -> None:
        """Start sharing."""
        self._tasks = [begin(self._run(), "cluster-sharing") for _ in range(AT_ONCE)]

    def offer(self, key: bytes, data: bytes) -> None:
        """Share the file soon, unless too much is waiting already."""
        if self._waiting.full() or self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
            self.dropped += 1
            return
        self._waiting_bytes += len(data)
        self._waiting.put_nowait((key, data))

    async def finish(self, within_s: float) -> None:
        """Wait until what was offered is shared or dropped, or the time is up."""
        try:
            async with asyncio.timeout(within_s):
                await self._waiting.join()
        except TimeoutError:
            self.dropped += self._waiting.qsize()

    async def find(self, key: bytes) -> bytes | None:
        """Return the file that a replica shared, or None."""
        found = await self._sources.get(key)
        if found is None or self._fleet_key is None:
            return found
        file = await asyncio.to_thread(self._fleet_key.open_file, key, found)
        if file is None:
            self.foreign += 1
            log.warning("an image file in the index was ignored: it is not signed with the fleet's key")
        return file

    async def stop(self) -> None:
        """Stop sharing."""
        for task in self._tasks:
            await end(task)

    async def _run(self) -> None:
        while True:
            key, data = await self._waiting.get()
            shared = data
            if self._fleet_key is not None:
                shared = await asyncio.to_thread(self._fleet_key.seal_file, key, data)
            if await self._sources.put(key, shared):
                self.shared += 1
            else:
                self.dropped += 1
            self._waiting_bytes -= len(data)
            self._waiting.task_done()
