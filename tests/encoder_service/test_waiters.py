"""Waits for images that are not submitted yet: bounded, and ended by an arrival here or elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import OverloadedError, Status, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.app import Server
from encoder_service.cluster.cluster import Cluster, Location, Locations
from encoder_service.images import UnsubmittedImages
from encoder_service.keys import ImageKey
from encoder_service.limits import Budget
from prefill_client import RowRequest
from testing.photos import photo
from tests.callers import caller
from tests.calls import collect
from tests.operator_view import settled
from tests.servers import client_elsewhere
from tests.small_store import address
from tests.waiting import PATIENCE_S


def key(number: int) -> ImageKey:
    return ImageKey(address(number), bytes(32))


async def test_an_arrival_wakes_only_its_own_waiters() -> None:
    searches: dict[bytes, Callable[[bytes, Locations], None]] = {}
    cluster = Cluster()
    cluster.start_search = lambda key, found: searches.update({key.address: found})  # type: ignore[method-assign]
    cluster.stop_search = lambda address: searches.pop(address, None)  # type: ignore[method-assign, assignment]
    waiters = UnsubmittedImages(cluster, Budget(100, "images"))
    until = asyncio.get_running_loop().time() + PATIENCE_S
    tasks = [asyncio.create_task(waiters.wait(key(n % 4), caller(f"client {n}"), until)) for n in range(8)]
    await asyncio.sleep(0)
    assert set(searches) == {address(n) for n in range(4)}
    waiters.wake(address(1))
    where = (Location("r", "r:1", Grid(1, 2, 2)),)
    searches[address(2)](address(2), where)
    assert await asyncio.gather(tasks[1], tasks[5], tasks[2], tasks[6]) == [(), (), where, where]
    assert sum(task.done() for task in tasks) == 4, "no other waiter was woken"
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert address(0) in searches, "one more waits for it"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not searches


async def test_waiters_are_bounded_in_total_and_per_client() -> None:
    waiters = UnsubmittedImages(Cluster(), Budget(100, "images"))
    until = asyncio.get_running_loop().time() + PATIENCE_S
    greedy = [asyncio.create_task(waiters.wait(key(n), caller("greedy"), until)) for n in range(100)]
    await asyncio.sleep(0)
    refused = [task for task in greedy if task.done()]
    assert len(refused) == 25
    for task in refused:
        error = task.exception()
        assert isinstance(error, OverloadedError)
        assert error.retry_after_ms > 0
    other = asyncio.create_task(waiters.wait(key(1), caller("other"), until))
    await asyncio.sleep(0)
    waiters.wake(address(1))
    assert await other == ()
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
    with pytest.raises(UnknownImageError):
        await waiters.wait(key(1), caller("greedy"), asyncio.get_running_loop().time() + 0.01)


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        yield EncoderServiceStub(channel)


def unknown(count: int, grace_ms: int) -> pb.FetchRequest:
    images = [pb.FetchImage(index=n, digest=address(n), row_end=1) for n in range(count)]
    return pb.FetchRequest(images=images, grace_ms=grace_ms, rows_inside=True)


async def test_a_flood_of_unknown_digests_is_refused_and_harms_nobody(server: Server, stub: Any) -> None:
    calls = [stub.Fetch(unknown(512, 30_000)) for _ in range(7)]  # as many as one caller may have
    image = photo(64, 64, 9)
    reading = [asyncio.ensure_future(call.read()) for call in calls]
    first, _ = await asyncio.wait(reading, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    refused = first.pop().result()  # of which call does not matter: they reach the server in any order
    assert refused.errors
    for error in refused.errors:
        assert error.code == Status.RESOURCE_EXHAUSTED.value
        assert error.retry_after_ms > 0
    async with client_elsewhere(server) as client:
        (submitted,) = await client.submit([image])
        outcomes = await collect(client, [RowRequest(content_digest(image))])
    assert submitted.error is None
    assert outcomes[0].error is None
    for call in calls:
        call.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await settled(server, "calls_in_progress", 0)
