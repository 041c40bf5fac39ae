"""A replica in this process, on an address of its own, and a client of it alone."""

import asyncio
from dataclasses import dataclass

from encoder_service.scrape import scrape
from encoder_service.server import Server
from prefill_client.client import EncoderClient
from prefill_client.images import FetchedRows, RowRequest
from tests.conftest import Gate


@dataclass
class Replica:
    """A replica of the test's fleet, in this process, and a client of this replica alone."""

    server: Server
    gate: Gate
    client: EncoderClient

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    async def encodes(self) -> int:
        """Images it has encoded and kept."""
        found = await asyncio.to_thread(scrape, self.server.watch.endpoint, 10)
        return int(found.total("encoded_images_total", outcome="kept"))

    async def fetch(self, digest: bytes, **options: object) -> FetchedRows:
        async with self.client.fetch([RowRequest(digest)], shm=False, timeout_s=60, **options) as stream:  # type: ignore[arg-type]
            return await anext(aiter(stream))

    async def die(self) -> None:
        """As peers see kill -9: silence from one moment to the next, and no farewell to the index."""
        await self.server.index.close()
        await self.server._listener._server.stop(None)
