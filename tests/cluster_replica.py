"""A replica in this process, on an address of its own, and a client of it alone."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from encoder_service.app import Server
from encoder_service.cluster.coordinator import Coordinator
from encoder_service.cluster.index import RedisIndex
from encoder_service.config import Config
from encoder_service.engine.model import Model
from encoder_service.image.decode import Decoder
from encoder_service.observability.scrape import scrape
from prefill_client import EncoderClient, FetchedRows, RowRequest
from tests.conftest import Gate


@dataclass
class Replica:
    """A replica of the test, in this process, and a client of this replica alone."""

    server: Server
    gate: Gate
    client: EncoderClient

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def cluster(self) -> Coordinator:
        assert isinstance(self.server.cluster, Coordinator)
        return self.server.cluster

    @property
    def index(self) -> RedisIndex:
        return self.cluster.index

    async def encodes(self) -> int:
        """Images it has encoded and kept."""
        found = await asyncio.to_thread(scrape, self.server.watch.endpoint, 10)
        return int(found.total("encoded_images_total", outcome="kept"))

    async def fetch(self, digest: bytes, **options: Any) -> FetchedRows:
        async with self.client.fetch(
            [RowRequest(digest)], transports=["inline"], timeout_s=60, **options
        ) as stream:  # type: ignore[arg-type]
            return await anext(aiter(stream))

    async def die(self) -> None:
        """As peers see kill -9: silence from one moment to the next, and no farewell to the index."""
        await self.index.close()
        await self.server._listener._server.stop(None)

    def address(self, digest: bytes, **variant: int) -> bytes:
        """The store address of an image."""
        return self.server._model.recipe.key(digest, **variant).address

    async def locates(self, digest: bytes, **variant: int) -> bool:
        """Whether it knows a peer that holds the image."""
        return bool(await self.index.locate([self.address(digest, **variant)]))


Start = Callable[..., Awaitable[Replica]]
fleets = itertools.count()


@asynccontextmanager
async def starting(config: Config, model: Model, index: str) -> AsyncIterator[Start]:
    """Give a function that starts a replica on an address of its own; all are gone at the end."""
    prefix = f"test-{next(fleets)}"
    hosts = (f"127.0.0.{n}" for n in itertools.count(2))
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> Replica:
            settings = {
                "index": index,
                "index_prefix": prefix,
                "index_timeout_ms": 2000,  # a busy machine is no fault
                "listen": f"{next(hosts)}:0",
                "metrics_listen": "127.0.0.1:0",
                "drain_s": 1,
                **changes,
            }
            gate = Gate(model.decoder)
            server = Server(replace(config, **settings), replace(model, decoder=cast(Decoder, gate)))  # type: ignore[arg-type]
            await server.start()
            stack.push_async_callback(server.drain)
            client = await stack.enter_async_context(await EncoderClient.connect(server.endpoint))
            return Replica(server, gate, client)

        yield start
