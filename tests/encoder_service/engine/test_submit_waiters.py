"""Waiting for images that nobody has submitted: quiet, bounded, and one sweep that looks elsewhere for all."""

import asyncio
from collections.abc import AsyncIterator, Collection

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import OverloadedError, Status
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.address import ImageKey
from encoder_service.app import Server
from encoder_service.cluster.index import Location, Locations, Tier
from encoder_service.engine.submit_waiters import SWEEP_IMAGES, SubmitWaiters
from prefill_client.client import EncoderClient
from prefill_client.images import RowRequest
from testing.photos import photo
from tests.calls import collect
from tests.operator_view import numbers
from tests.waiting import soon


def address(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key(number: int) -> ImageKey:
    return ImageKey(address(number), bytes(32))


class Elsewhere:
    """Where images turn up, and what was asked of it."""

    def __init__(self) -> None:
        self.held: dict[bytes, Locations] = {}
        self.asked: list[list[bytes]] = []

    async def look(self, keys: Collection[ImageKey]) -> dict[bytes, Locations]:
        """Answer one question."""
        addresses = [key.address for key in keys]
        self.asked.append(addresses)
        return {address: self.held[address] for address in addresses if address in self.held}


async def waiting(
    arrivals: SubmitWaiters, count: int, within_s: float = 20.0
) -> list["asyncio.Task[Locations]"]:
    """Have so many callers wait, each for an address of its own."""
    until = asyncio.get_running_loop().time() + within_s
    tasks = [asyncio.create_task(arrivals.wait(key(n), f"client {n % 10}", until)) for n in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_one_question_in_a_while_serves_all_who_wait_and_reaches_every_one_of_them() -> None:
    elsewhere = Elsewhere()
    arrivals = SubmitWaiters(elsewhere.look, lambda: True, max_waiters=10_000)
    count = 4 * SWEEP_IMAGES
    tasks = await waiting(arrivals, count)
    await soon(lambda: len(elsewhere.asked) == 4, within_s=20)
    assert all(len(asked) == SWEEP_IMAGES for asked in elsewhere.asked)
    assert len({address for asked in elsewhere.asked for address in asked}) == count
    where = (Location("r", "r:1", Tier.HOST, None),)  # type: ignore[arg-type]
    elsewhere.held = {address(7): where, address(8): ()}
    assert await tasks[7] == where
    assert await tasks[8] == ()
    assert sum(task.done() for task in tasks) == 2, "nobody else was woken"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asked = len(elsewhere.asked)
    await asyncio.sleep(0.6)
    assert len(elsewhere.asked) <= asked + 1, "nobody waits, nobody asks"


async def test_nobody_is_asked_where_nobody_could_answer_and_an_arrival_wakes_at_once() -> None:
    elsewhere = Elsewhere()
    arrivals = SubmitWaiters(elsewhere.look, lambda: False, max_waiters=100)
    tasks = await waiting(arrivals, 3)
    await asyncio.sleep(0.6)
    arrivals.wake(address(1))
    assert await tasks[1] == ()
    assert not elsewhere.asked
    assert not tasks[0].done()
    for task in tasks:
        task.cancel()


async def test_who_waits_is_bounded_over_all_and_for_each_client() -> None:
    arrivals = SubmitWaiters(Elsewhere().look, lambda: False, max_waiters=100)
    until = asyncio.get_running_loop().time() + 20
    greedy = [asyncio.create_task(arrivals.wait(key(n), "greedy", until)) for n in range(100)]
    await asyncio.sleep(0)
    refused = [task for task in greedy if task.done()]
    assert len(refused) == 25
    for task in refused:
        error = task.exception()
        assert isinstance(error, OverloadedError)
        assert error.retry_after_ms > 0
    other = asyncio.create_task(arrivals.wait(key(1), "other", until))
    await asyncio.sleep(0)
    arrivals.wake(address(1))
    assert await other == ()
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
    with pytest.raises(TimeoutError):
        await arrivals.wait(key(1), "greedy", asyncio.get_running_loop().time() + 0.01)


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[EncoderServiceStub]:
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        yield EncoderServiceStub(channel)


def unknown(count: int, grace_ms: int) -> pb.FetchRequest:
    images = [pb.FetchImage(index=n, digest=address(n)) for n in range(count)]
    return pb.FetchRequest(caller=pb.Caller(client_id="lost"), images=images, grace_ms=grace_ms)


async def test_a_flood_of_unknown_digests_is_refused_and_costs_nobody_else_an_answer(
    server: Server, client: EncoderClient, stub: EncoderServiceStub
) -> None:
    calls = [stub.Fetch(unknown(512, 30_000)) for _ in range(12)]
    image = photo(64, 64, 9)
    refused = await calls[-1].read()
    assert refused.error.code == Status.RESOURCE_EXHAUSTED.value
    assert refused.error.retry_after_ms > 0
    (submitted,) = await client.submit([image])
    outcomes = await collect(client, [RowRequest(content_digest(image))])
    assert submitted.error is None
    assert outcomes[0].error is None
    for call in calls:
        call.cancel()
    await soon(lambda: _no_calls(server), within_s=20)


async def _no_calls(server: Server) -> bool:
    return (await numbers(server)).total("calls_in_progress") == 0
