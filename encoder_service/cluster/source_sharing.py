"""Source sharing: image files go to the index behind the answers, so that any replica can finish what one begins."""

import asyncio

from encoder_service.cluster.index import RedisIndex
from encoder_service.cluster.index.tasks import end

AT_ONCE = 2  # files: enough to fill a gigabit, few enough to leave it to whoever waits for an answer
# What waits: as much as a Redis at the end of a gigabit takes in half a second. What comes on top is not shared, and
# costs one more upload should this replica die with it.
MAX_WAITING_BYTES = 64 << 20
MAX_WAITING_IMAGES = 512


class SourceSharing:
    """`offer` returns at once; a few tasks hand on what was offered. One event loop's."""

    def __init__(self, index: RedisIndex) -> None:
        self._index = index
        self._waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(MAX_WAITING_IMAGES)
        self._waiting_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.shared = 0
        self.dropped = 0

    def start(self) -> None:
        """Begin to share."""
        self._tasks = [asyncio.create_task(self._run(), name="cluster-sharing") for _ in range(AT_ONCE)]

    def offer(self, key: bytes, data: bytes) -> None:
        """Have the file shared, unless too much waits already."""
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

    async def stop(self) -> None:
        """Share nothing more."""
        for task in self._tasks:
            await end(task)

    async def _run(self) -> None:
        while True:
            key, data = await self._waiting.get()
            if await self._index.put_source(key, data):
                self.shared += 1
            else:
                self.dropped += 1
            self._waiting_bytes -= len(data)
            self._waiting.task_done()
