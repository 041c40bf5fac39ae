"""A single node: it takes no leases, and starts no tasks, threads or connections for a cluster."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from encoder_contract.errors import Status
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.app import Server
from encoder_service.cluster import peers, redis
from encoder_service.cluster.cluster import Cluster
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.calls import collect

FOLDER = str(Path(peers.__file__).parent)


@pytest.fixture
async def wakeups(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counter[str]]:
    """Count the tasks of `cluster/`, and the objects that talk to Redis or to peers, by name."""
    seen: Counter[str] = Counter()
    for module, name in (
        (redis.index, "RedisIndex"),
        (redis.connection, "RedisConnection"),
        (peers, "Peers"),
    ):
        made = getattr(module, name)

        def counted(self: object, *_: object, name: str = name, **__: Any) -> None:
            seen[name] += 1

        monkeypatch.setattr(made, "__init__", counted)
    loop = asyncio.get_running_loop()

    def factory(loop: asyncio.AbstractEventLoop, coroutine, **options) -> asyncio.Task:  # type: ignore[no-untyped-def, type-arg]
        code = getattr(
            coroutine, "cr_code", None
        )  # None for awaitables that are not coroutines, such as anext()
        if code is not None and code.co_filename.startswith(FOLDER):
            seen[code.co_qualname] += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(factory)
    yield seen
    loop.set_task_factory(None)


async def test_a_single_node_takes_no_lease_and_starts_no_cluster_task(
    wakeups: Counter[str], server: Server, client: EncoderClient
) -> None:
    assert type(server.cluster) is Cluster
    images = [photo(64, 64, n) for n in range(3)]
    known = await client.submit(images)
    outcomes = await collect(client, [RowRequest(image.digest) for image in known])
    assert [outcome.error for outcome in outcomes.values()] == [None] * 3
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        unknown = pb.FetchRequest(images=[pb.FetchImage(digest=bytes(32))], grace_ms=600)
        answers = [
            error.code
            async for message in EncoderServiceStub(channel).Fetch(unknown)
            for error in message.errors
        ]
    assert answers == [Status.NOT_FOUND.value]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("cluster")]
    await server.drain()
    assert wakeups == {}
