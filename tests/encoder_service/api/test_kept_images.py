"""Retaining Submit calls: lost images are requested again, a drain ends the call, its end withdraws the images."""

import asyncio
import gc
from typing import Any

import grpc

from encoder_contract.digest import content_digest
from encoder_contract.errors import UnavailableError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.cluster.cluster import Cluster
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.images import KeepingCall, UnsubmittedImages
from encoder_service.keys import ImageKey
from encoder_service.limits import Budget
from encoder_service.scheduler import Claim
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.callers import caller
from tests.calls import begin_submit, collect, named, next_state, send
from tests.gate import Gate
from tests.operator_view import flush
from tests.servers import server_and_client
from tests.waiting import PATIENCE_S, soon

PHOTO = photo(120, 80, 77)


async def keeping_call(client: EncoderClient, image: bytes = PHOTO, *, retain: bool = True) -> Any:
    """Submit an image in a call that stays open; return the call after the answer to the image."""
    call, (name, _) = await begin_submit(client), named(3, image)
    await call.write(pb.SubmitRequest(names=pb.ImageNames(names=[name], kept=retain)))
    if await state_of(call) == pb.STATE_NEEDS_BYTES:
        await send(call, 3, image)
        assert await state_of(call) == pb.STATE_QUEUED
    return call


async def state_of(call: Any) -> int:
    state = await next_state(call)
    assert state.index == 3
    return int(state.state)


async def lose(server: Server) -> None:
    """Drop all rows and files, as if others had filled the store and the source cache."""
    await flush(server)
    assert not server.store.contains(server.model.facts.recipe.key(content_digest(PHOTO)).address)


async def test_a_lost_kept_image_is_requested_if_a_fetch_waits(server: Server, client: EncoderClient) -> None:
    call = await keeping_call(client)
    wanted = [RowRequest(content_digest(PHOTO))]
    first = (await collect(client, wanted, transports=["inline"]))[0]
    for _ in range(3):
        await soon(lambda: server.store.stats().pins == 0)
        await lose(server)
        fetching = asyncio.create_task(collect(client, wanted, transports=["inline"]))
        assert await state_of(call) == pb.STATE_NEEDS_BYTES
        await send(call, 3, PHOTO)
        assert await state_of(call) == pb.STATE_QUEUED
        again = (await fetching)[0]
        assert again.error is None
        assert (again.array == first.array).all()
    await soon(lambda: claims() <= 1)
    call.cancel()


def claims() -> int:
    """Return the number of claims: a keeping call must not add one each time its image is lost."""
    gc.collect()
    return sum(type(each) is Claim for each in gc.get_objects())


async def test_a_lost_image_that_is_not_kept_stays_unknown(server: Server, client: EncoderClient) -> None:
    assert (await client.submit([PHOTO]))[0].error is None
    wanted = [RowRequest(content_digest(PHOTO))]
    await collect(client, wanted, transports=["inline"])
    await soon(lambda: server.store.stats().pins == 0)
    await lose(server)
    async with await EncoderClient.connect(server.endpoint) as other:
        assert (await collect(other, wanted, grace_ms=100))[0].error is not None


async def test_an_ended_call_withdraws_kept_images(server: Server, client: EncoderClient, gate: Gate) -> None:
    with gate.closed():
        first = await keeping_call(client, photo(64, 64, 1))
        second = await keeping_call(client)
        assert len(server.jobs) == 2
        second.cancel()
        await soon(lambda: len(server.jobs) == 1)
        first.cancel()
        await soon(lambda: len(server.jobs) == 0)


async def test_a_drain_ends_keeping_calls_at_once(config: Config, model: Model) -> None:
    async with server_and_client(config, model, drain_s=10 * PATIENCE_S) as (server, client):
        call = await keeping_call(client)
        async with asyncio.timeout(PATIENCE_S):
            await server.drain()
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "draining" in await call.details()


async def test_a_drain_ends_a_call_that_starts_to_keep_images(config: Config, model: Model) -> None:
    async with server_and_client(config, model, drain_s=10 * PATIENCE_S) as (server, client):
        call = await keeping_call(client, retain=False)
        async with asyncio.timeout(PATIENCE_S):
            draining = asyncio.create_task(server.drain())
            await soon(lambda: server.draining)
            name, _ = named(4, PHOTO)
            await call.write(pb.SubmitRequest(names=pb.ImageNames(names=[name], kept=True)))
            assert (await next_state(call)).index == 4
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            await draining


async def test_keeping_calls_leave_room_for_fetches(config: Config, model: Model) -> None:
    async with server_and_client(config, model, max_calls=4) as (_, client):
        calls = [await keeping_call(client) for _ in range(3)]
        (outcome,) = (await collect(client, [RowRequest(content_digest(PHOTO))])).values()
        assert outcome.error is None
        for call in calls:
            call.cancel()


async def test_if_a_keeping_call_leaves_the_image_is_requested_from_another() -> None:
    waiters, key = UnsubmittedImages(Cluster(), Budget(9, "images")), ImageKey(bytes(32), bytes(32))
    first, second, other = KeepingCall(), KeepingCall(), KeepingCall()
    waiters.keep(key.address, first)
    waiters.keep(key.address, second)
    waiters.keep(bytes([1] * 32), other)
    until = asyncio.get_running_loop().time() + PATIENCE_S
    waiting = asyncio.create_task(waiters.wait(key, caller("client"), until))
    await asyncio.sleep(0)
    assert (len(first.requested), len(second.requested), len(other.requested)) == (0, 1, 0)
    waiters.release(key.address, second)
    assert first.requested == {key.address: None}
    assert first.changed.is_set()
    waiters.wake(key.address)
    await waiting
    waiters.end(UnavailableError("over"))
    assert isinstance(first.error, UnavailableError)
    assert second.error is None
