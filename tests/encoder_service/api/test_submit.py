"""Submit: what an unfinished call may hold, and what happens to its images when it ends."""

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import OverloadedError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import GIB, Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient
from testing.photos import photo
from tests.calls import begin_submit, finish, naming, next_state, send
from tests.gate import Gate
from tests.operator_view import numbers, settled
from tests.servers import client_elsewhere, server_and_client, server_of
from tests.waiting import PATIENCE_S, soon, within_some_limit

MIB = 1 << 20
# A call keeps its space, however busy this machine is.
NEVER_STALLS = {"upload_idle_s": PATIENCE_S}
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 4, 8


async def name(call: Any, index: int, size_bytes: int = 0, digest: bytes | None = None) -> pb.ImageState:
    """Name a new image and return the answer."""
    digest = digest or content_digest(f"{id(call)} {index}".encode())
    await call.write(naming(pb.ImageName(index=index, digest=digest, size_bytes=size_bytes)))
    return await next_state(call)


async def test_an_unfinished_call_holds_one_image_and_others_are_served(config: Config, model: Model) -> None:
    async with server_of(config, model, max_queued_gib=16 * MIB / GIB, max_image_bytes=8 * MIB) as server:
        async with await EncoderClient.connect(server.endpoint) as greedy, client_elsewhere(server) as client:
            call = await begin_submit(greedy)
            for index in range(20):
                assert (await name(call, index)).state == pb.STATE_NEEDS_BYTES
            for index in range(3 * 15):  # 3 MB each, and never the last piece
                piece = pb.ImageBytes(index=index // 15, data=bytes(MIB // 5))
                await call.write(pb.SubmitRequest(bytes=[piece]))
            assert (await next_state(call)).error.code == 3, "a call holds one image's worth of pieces"
            assert server.budgets.upload_bytes.held <= 8 * MIB
            for n in range(4):
                (answer,) = await client.submit([photo(300 + n, 300, 40 + n)], timeout_s=PATIENCE_S)
                assert answer.error is None
            call.cancel()
        await soon(lambda: server.budgets.upload_bytes.held == 0)


@pytest.mark.parametrize("drip", [False, True])
async def test_a_stalled_upload_ends_alone_and_frees_its_space(
    config: Config, model: Model, drip: bool
) -> None:
    async with server_and_client(config, model, limits={"upload_idle_s": 0.5}) as (server, client):
        image = photo(400, 300, 77)
        call = await begin_submit(client)
        assert (await name(call, 1)).state == pb.STATE_NEEDS_BYTES

        async def dripping() -> None:
            while True:
                await call.write(pb.SubmitRequest(bytes=[pb.ImageBytes(index=1, data=b"x")]))
                await asyncio.sleep(0.05)

        dripper = asyncio.create_task(dripping()) if drip else None
        state = await next_state(call)
        assert (state.index, state.error.code) == (1, DEADLINE_EXCEEDED)
        # A piece that was under way counts until it is ignored.
        await soon(lambda: server.budgets.upload_bytes.held == 0)
        if dripper is not None:
            dripper.cancel()
            await asyncio.gather(dripper, return_exceptions=True)
        # The call continues and answers other images. This process may stall for too long itself.
        for index in range(2, 10):
            state = await name(call, index, len(image), content_digest(image))
            assert state.state == pb.STATE_NEEDS_BYTES
            await send(call, index, image)
            if (state := (await next_state(call))).state == pb.STATE_QUEUED:
                break
            assert state.error.code == DEADLINE_EXCEEDED
        assert state.state == pb.STATE_QUEUED
        await finish(call)


async def test_a_name_without_upload_space_is_refused_with_a_retry_hint(config: Config, model: Model) -> None:
    async with server_and_client(
        config, model, limits=NEVER_STALLS, max_queued_gib=4 * MIB / GIB, max_image_bytes=2 * MIB
    ) as (server, client):
        calls = [await begin_submit(client) for _ in range(3)]
        states = [await name(call, 1, 2 * MIB - 1) for call in calls]
        assert states[0].state == pb.STATE_NEEDS_BYTES
        assert {state.error.code for state in states[1:]} == {RESOURCE_EXHAUSTED}
        assert all(state.error.retry_after_ms > 0 for state in states[1:])
        calls[0].cancel()
        await soon(lambda: server.budgets.upload_bytes.held == 0)
        assert (await name(calls[1], 3, 2 * MIB - 1)).state == pb.STATE_NEEDS_BYTES
        for call in calls:
            call.cancel()


async def test_a_refused_client_backs_off_and_sends_bytes_once(config: Config, model: Model) -> None:
    async with server_and_client(
        config, model, limits=NEVER_STALLS, max_queued_gib=4 * MIB / GIB, max_image_bytes=4 * MIB
    ) as (server, client):
        image = photo(800, 600, 90)
        call = await begin_submit(client)
        assert (await name(call, 1, 4 * MIB)).state == pb.STATE_NEEDS_BYTES

        async def refused(limit_s: float) -> bool:
            (answer,) = await client.submit([image], timeout_s=limit_s)
            return isinstance(answer.error, OverloadedError)

        async def refusals() -> float:
            return (await numbers(server)).total("submitted_images_total", outcome="failed")

        await within_some_limit(refused)
        before, began = await refusals(), time.monotonic()
        waiting = asyncio.create_task(client.submit([image], timeout_s=PATIENCE_S))

        async def four_more() -> bool:
            return await refusals() >= before + 4

        await soon(four_more)
        assert time.monotonic() - began > 0.6, "at least 0.1, 0.2 and 0.4 s apart, or nearly"
        assert (await numbers(server)).total("uploaded_bytes_total") == 0
        call.cancel()
        (answer,) = await waiting
        assert answer.error is None
        assert (await numbers(server)).total("uploaded_bytes_total") == len(image)


# The images of a call that ends

SUBMITS = """
import asyncio, sys, grpc
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_contract.digest import content_digest
from testing.photos import photo

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        call = EncoderServiceStub(channel).Submit()
        await call.write(pb.SubmitRequest(open=pb.Caller()))
        for index in range(5):
            data = photo(120 + index, 90, 500 + index)
            await call.write(pb.SubmitRequest(names=pb.ImageNames(
                names=[pb.ImageName(index=index, digest=content_digest(data), size_bytes=len(data))])))
            await call.read()
            await call.write(pb.SubmitRequest(bytes=[pb.ImageBytes(index=index, data=data, last=True)]))
            assert (await call.read()).states[0].state == pb.STATE_QUEUED
        print("submitted", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_caller_withdraws_its_images_and_is_logged(server: Server, gate: Gate) -> None:
    with gate.closed():
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SUBMITS, server.endpoint, stdout=subprocess.PIPE
        )
        assert caller.stdout is not None
        assert await caller.stdout.readline() == b"submitted\n"
        assert len(server.jobs) == 5
        caller.kill()
        await caller.wait()
        await settled(server, "calls_total", 1, call="submit", status="CANCELLED")
        # The decoder has one of them, behind the gate.
        await soon(lambda: len(server.jobs) <= 1)


async def test_only_cancelled_calls_withdraw_at_any_moment(config: Config, model: Model, gate: Gate) -> None:
    async with server_and_client(config, gate.before(model)) as (server, client):
        rounds = 150
        with gate.closed():
            (first,) = await client.submit([photo(64, 64, 1)])  # occupies the decoder
            assert first.error is None

            async def submit(number: int, *, cancel: bool) -> None:
                data = photo(64 + number % 40, 64 + number // 40, number)
                ours = await begin_submit(client)
                state = await name(ours, 1, len(data), content_digest(data))
                assert state.state == pb.STATE_NEEDS_BYTES
                await send(ours, 1, data)
                assert (await next_state(ours)).state == pb.STATE_QUEUED
                if cancel:
                    ours.cancel()
                    with suppress(asyncio.CancelledError):
                        await ours.read()
                else:
                    await finish(ours)

            for begin in range(0, 2 * rounds, 10):
                await asyncio.gather(*(submit(2 + n, cancel=n % 2 == 0) for n in range(begin, begin + 10)))
            await settled(server, "calls_total", rounds, call="submit", status="CANCELLED")
            await settled(server, "calls_total", rounds + 1, call="submit", status="OK")
            assert len(server.jobs) == rounds + 1
