"""A replica in this process, on a separate address, and a client of only this replica."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from encoder_contract.credentials import NO_CREDENTIALS, Credentials
from encoder_service.app import Server
from encoder_service.cluster.redis import RedisIndex
from encoder_service.cluster.redis_cluster import RedisCluster
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.image.decoder import FileDecoder
from prefill_client import EncoderClient, FetchedRows, RowRequest
from testing.device_thread import DeviceThread
from testing.photos import photo
from tests.gate import Gate
from tests.servers import kill
from tests.waiting import PATIENCE_S, soon


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
    def cluster(self) -> RedisCluster:
        assert isinstance(self.server.cluster, RedisCluster)
        return self.server.cluster

    @property
    def index(self) -> RedisIndex:
        return self.cluster.index

    async def encodes(self) -> int:
        """Return the number of images that it has encoded and stored."""
        text = await asyncio.to_thread(self.server.metrics.exposition)  # its port may want certificates
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
            if sample.name == "encsvc_encoded_images_total" and sample.labels["outcome"] == "kept"
        )

    async def fetch(self, digest: bytes, **options: Any) -> FetchedRows:
        async with self.client.fetch(
            [RowRequest(digest)], transports=["inline"], timeout_s=PATIENCE_S, **options
        ) as stream:  # type: ignore[arg-type]
            return await anext(aiter(stream))

    async def fetch_own(self, digest: bytes, encodes: int = 1) -> FetchedRows:
        """Fetch an image that no peer has for it; check that it has encoded it, perhaps before the Fetch arrived.

        `encodes` is the number of images that it has then encoded.
        """
        fetched = await self.fetch(digest)
        assert fetched.error is None
        assert fetched.source in ("encoded", "host")
        assert await self.encodes() == encodes
        return fetched

    async def die(self) -> None:
        """Stop like kill -9 does, for peers: at once, and without leaving the index."""
        await self.index.close()
        await kill(self.server)

    def address(self, digest: bytes, **variant: int) -> bytes:
        """The store address of an image."""
        return self.server.model.facts.recipe.key(digest, **variant).address

    async def locates(self, digest: bytes, **variant: int) -> bool:
        """Whether it locates the image at a peer."""
        return bool(await self.index.locate([self.address(digest, **variant)]))


async def held_by(holder: Replica, seen_by: Replica) -> bytes:
    """Have a replica hold a new photo, and wait until another locates it; return its file."""
    file = new_photo()
    (image,) = await holder.client.submit([file])
    assert (await holder.fetch(image.digest)).error is None
    await soon(lambda: seen_by.locates(image.digest))
    return file


async def through_peer(a: Replica, b: Replica, file: bytes) -> FetchedRows:
    """Have `a` encode an image, and fetch it through `b`; check that `b` returns the rows of `a`."""
    (image,) = await a.client.submit([file])
    own = await a.fetch(image.digest)
    await soon(lambda: b.locates(image.digest))
    fetched = await b.fetch(image.digest)
    assert (fetched.error, fetched.source) == (None, "peer")
    assert fetched.array.tobytes() == own.array.tobytes()
    return fetched


async def at_slow_peer(a: Replica, b: Replica, warm: bytes, file: bytes) -> bytes:
    """Submit an image to both, and have `a` encode it; return its digest. For `b`, encoding it again would be faster.

    `warm` is another image: with it, `b` measures how fast it encodes.
    """
    (warmed,) = await b.client.submit([warm])
    await b.fetch(warmed.digest)
    with a.gate.closed():
        await a.client.submit([file])
        (image,) = await b.client.submit([file])
    await a.fetch(image.digest)
    await soon(lambda: b.locates(image.digest))
    b.cluster._peers.bytes_per_s = 1.0
    return image.digest


Start = Callable[..., Awaitable[Replica]]
# Replicas that share a process and a busy machine stall together, for seconds. So the timeouts that detect a dead
# replica are longer here. A test starts the replica that is to die with `PROMPTLY`, which is how long its entry lives.
PATIENCE = 15.0
PROMPTLY = 1.0
fleets = itertools.count()
seeds = itertools.count(1000)


def new_photo(width: int = 300, height: int = 280) -> bytes:
    """Return a photo that no replica of this process has seen."""
    return photo(width, height, next(seeds))


@asynccontextmanager
async def starting(
    config: Config, model: Model, index: str, credentials: Credentials = NO_CREDENTIALS
) -> AsyncIterator[Start]:
    """Yield a function that starts a replica on a separate address; all are drained at the end."""
    prefix = f"test-{next(fleets)}"
    hosts = (f"127.0.0.{n}" for n in itertools.count(2))
    async with AsyncExitStack() as stack:

        async def start(served: Model = model, patience: float = PATIENCE, **changes: Any) -> Replica:
            settings = {
                "index": index,
                "index_prefix": prefix,
                "index_timeout_ms": 2000,  # a stall of a busy machine is not an outage
                "listen": f"{next(hosts)}:0",
                "metrics_listen": "127.0.0.1:0",
                "drain_s": 1,
                **changes,
            }
            gate = Gate(served.decoder)
            changed = replace(config, **settings)  # type: ignore[arg-type]
            files = cast(FileDecoder, gate)
            server = Server(changed, [DeviceThread(changed, gate.before(served))], files, patience=patience)
            await server.start()
            stack.push_async_callback(server.drain)
            client = await stack.enter_async_context(
                await EncoderClient.connect(server.endpoint, credentials=credentials)
            )
            return Replica(server, gate, client)

        yield start
