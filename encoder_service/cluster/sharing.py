"""Source sharing: sends image files to the index in the background, so that any replica can encode them."""

import asyncio
import logging

from encoder_contract.fleet_key import FleetKey
from encoder_service.cluster.redis.index import SharedSources
from encoder_service.cluster.tasks import cancel_task, start_task

log = logging.getLogger(__name__)

CONCURRENT_FILES = 2  # enough to fill a gigabit link, few enough not to delay calls that a caller waits for
# As much as a gigabit link carries in half a second. Files beyond this are not shared: if this replica dies, they must
# be uploaded again.
MAX_WAITING_BYTES = 64 << 20
MAX_WAITING_IMAGES = 512


class SourceSharing:
    """A queue of files to share, and the tasks that send them. Not thread-safe: use from one event loop."""

    def __init__(self, sources: SharedSources, fleet_key: FleetKey | None) -> None:
        """With `fleet_key`, shared files are signed, and `find` ignores unsigned ones."""
        self._sources = sources
        self._fleet_key = fleet_key
        self._waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(MAX_WAITING_IMAGES)
        self._waiting_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.shared = 0
        self.dropped = 0
        self.foreign = 0

    def start(self) -> None:
        """Start to send files."""
        self._tasks = [start_task(self._run(), "cluster-sharing") for _ in range(CONCURRENT_FILES)]

    def offer(self, key: bytes, data: bytes) -> None:
        """Queue the file, unless the queue is full. Returns at once."""
        if self._waiting.full() or self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
            self.dropped += 1
            return
        self._waiting_bytes += len(data)
        self._waiting.put_nowait((key, data))

    async def finish(self, within_s: float) -> None:
        """Wait until the queued files are shared or dropped, at most `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._waiting.join()
        except TimeoutError:
            self.dropped += self._waiting.qsize()

    async def find(self, key: bytes) -> bytes | None:
        """Return the file that a replica shared, None if there is none."""
        found = await self._sources.get(key)
        if found is None or self._fleet_key is None:
            return found
        file = await asyncio.to_thread(self._fleet_key.open_file, key, found)
        if file is None:
            self.foreign += 1
            log.warning(
                "the image file %s in the index was ignored: it is not signed with this fleet's key",
                key.hex(),
            )
        return file

    async def stop(self) -> None:
        """Stop sending files."""
        for task in self._tasks:
            await cancel_task(task)

    async def _run(self) -> None:
        while True:
            key, data = await self._waiting.get()
            value = data
            if self._fleet_key is not None:
                value = await asyncio.to_thread(self._fleet_key.seal_file, key, data)
            if await self._sources.put(key, value):
                self.shared += 1
            else:
                self.dropped += 1
            self._waiting_bytes -= len(data)
            self._waiting.task_done()
