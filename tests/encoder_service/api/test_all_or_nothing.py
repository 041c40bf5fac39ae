"""Submit with `all_or_nothing`: the queue takes all images of the names, or none, before their bytes travel."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from encoder_contract.errors import InvalidImageError, OverloadedError, Status
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import GIB, Config
from encoder_service.devices.model import Model
from encoder_service.limits import Caller
from prefill_client import EncoderClient, Image
from prefill_client.images import read_images
from testing.photos import photo
from tests.calls import finish, next_states, stub
from tests.gate import Gate
from tests.operator_view import numbers
from tests.servers import server_and_client, server_of
from tests.waiting import PATIENCE_S, soon, within_some_limit

QUEUE = 8
# An upload that waits for this process, however busy its machine is, does not count as stalled.
NEVER_STALLS = {"upload_idle_s": PATIENCE_S}
PHOTOS = [photo(100 + number, 80, 900 + number) for number in range(12)]


def small_queue(config: Config, model: Model, **settings: Any) -> Any:
    return server_and_client(config, model, max_queued_images=QUEUE, **settings)


def queued(server: Server) -> int:
    """The number of images that are queued or have a place."""
    return server.jobs.scheduler.queued.images


async def name_together(client: EncoderClient, numbers: range, *, together: bool = True) -> Any:
    """Name these photos in the first message of a Submit; return the call."""
    images = read_images([PHOTOS[number] for number in numbers], client.description.geometry)
    names = [cast(Image, image).to_message(number) for number, image in zip(numbers, images, strict=True)]
    call = (await stub(client)).Submit(timeout=PATIENCE_S)
    named = pb.ImageNames(names=names, all_or_nothing=together)
    await call.write(pb.SubmitRequest(open=pb.Caller(), names=named))
    return call


async def states(call: Any, count: int) -> set[int]:
    """Return the states in the next answers."""
    return {state.state for state in await next_states(call, count)}


async def send(call: Any, numbers: range) -> None:
    pieces = [pb.ImageBytes(index=number, data=PHOTOS[number], last=True) for number in numbers]
    await call.write(pb.SubmitRequest(bytes=pieces))


@pytest.mark.parametrize("together", [True, False])
async def test_images_that_do_not_fit_together_are_refused_before_bytes_travel(
    config: Config, model: Model, gate: Gate, together: bool
) -> None:
    async with small_queue(config, gate.before(model)) as (server, other):
        with gate.closed():
            first = await other.submit(PHOTOS[:4])
            assert [answer.error for answer in first] == [None] * 4
            sent = (await numbers(server)).total("uploaded_bytes_total")
            call = await name_together(other, range(4, 10), together=together)
            refused = [each for each in await next_states(call, 6) if each.state == pb.STATE_FAILED]
            if together:
                assert len(refused) == 6
                assert {state.error.code for state in refused} == {Status.RESOURCE_EXHAUSTED.value}
                assert len({state.error.retry_after_ms for state in refused} - {0}) == 1, "one hint"
                assert (queued(server), len(server.jobs)) == (4, 4)
                assert server.budgets.upload_bytes.held == 0
                assert (await numbers(server)).total("uploaded_bytes_total") == sent
            else:
                assert refused == []
                await send(call, range(4, 10))
                assert await states(call, 6) == {pb.STATE_QUEUED, pb.STATE_FAILED}, "half a request"
            call.cancel()
            await soon(lambda: queued(server) == 4)


async def test_a_place_is_held_until_the_bytes_arrive(config: Config, model: Model, gate: Gate) -> None:
    async with small_queue(config, gate.before(model), limits=NEVER_STALLS) as (server, other):
        with gate.closed():
            call = await name_together(other, range(6))
            assert await states(call, 6) == {pb.STATE_NEEDS_BYTES}
            assert (queued(server), len(server.jobs)) == (6, 0)
            late = await name_together(other, range(6, 10))
            assert await states(late, 4) == {pb.STATE_FAILED}, "no room beside them"
            late.cancel()
            await send(call, range(6))
            assert await states(call, 6) == {pb.STATE_QUEUED}
            await call.write(pb.SubmitRequest(last=True))
            await finish(call)
            assert queued(server) == len(server.jobs) >= 6, "a place is used up by its image"
        await soon(lambda: queued(server) == 0)


@pytest.mark.parametrize("way", ["cancelled", "half-closed", "held elsewhere in the meantime"])
async def test_places_are_freed_when_the_bytes_do_not_arrive(config: Config, model: Model, way: str) -> None:
    async with small_queue(config, model, limits=NEVER_STALLS) as (server, other):
        call = await name_together(other, range(4))
        assert await states(call, 4) == {pb.STATE_NEEDS_BYTES}
        assert queued(server) == 4
        match way:
            case "cancelled":
                call.cancel()
            case "half-closed":
                await call.write(pb.SubmitRequest(last=True))
                await call.done_writing()
                assert await states(call, 4) == {pb.STATE_FAILED}
                assert await call.read() is grpc.aio.EOF
            case _:
                for number in range(4):
                    [answer] = await other.submit([PHOTOS[number]])
                    assert answer.error is None
                await soon(lambda: len(server.jobs) == 0)
                await send(call, range(4))
                assert await states(call, 4) <= {pb.STATE_QUEUED, pb.STATE_CACHED}
        await soon(lambda: queued(server) == 0)
        call.cancel()


async def test_places_are_freed_when_the_upload_stalls(config: Config, model: Model) -> None:
    async def were_held(limit_s: float) -> bool:
        async with small_queue(config, model, limits={"upload_idle_s": limit_s}) as (server, client):
            call = await name_together(client, range(4))
            assert await states(call, 4) == {pb.STATE_NEEDS_BYTES}
            held = queued(server)
            assert await states(call, 4) == {pb.STATE_FAILED}
            await soon(lambda: queued(server) == 0)
            call.cancel()
            return held == 4

    await within_some_limit(were_held)


async def test_images_that_never_fit_together_are_refused_for_good(config: Config, model: Model) -> None:
    async with small_queue(config, model) as (server, client):
        answers = await client.submit(PHOTOS, all_or_nothing=True)
        assert {type(answer.error) for answer in answers} == {InvalidImageError}
        assert "12 images together do not fit into the empty queue" in str(answers[0].error)
        assert queued(server) == 0
        answers = await client.submit(PHOTOS)
        assert [answer.error for answer in answers] == [None] * len(PHOTOS), "one after another they do"


async def test_without_upload_space_all_are_refused_and_may_come_again(config: Config, model: Model) -> None:
    size = len(PHOTOS[0])
    space = {"max_queued_gib": 8 * size / GIB, "max_image_bytes": size + 999}
    async with small_queue(config, model, **space) as (server, client):
        with server.budgets.upload_bytes.hold(Caller("host", "host"), int(7.9 * size)):

            async def refused(limit_s: float) -> bool:
                answers = await client.submit(PHOTOS[:2], all_or_nothing=True, timeout_s=limit_s)
                return all(isinstance(answer.error, OverloadedError) for answer in answers)

            await within_some_limit(refused)
        assert queued(server) == 0
        answers = await client.submit(PHOTOS[:2], all_or_nothing=True)
        assert [answer.error for answer in answers] == [None] * 2


async def test_an_image_at_fault_fails_alone(config: Config, model: Model) -> None:
    async with small_queue(config, model) as (server, client):
        answers = await client.submit([PHOTOS[0], b"no image", PHOTOS[1]], all_or_nothing=True)
        assert [type(answer.error) for answer in answers] == [type(None), InvalidImageError, type(None)]
        await soon(lambda: queued(server) == 0)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_client_takes_back_what_one_server_accepted_if_another_is_full(
    config: Config, model: Model, gate: Gate, kept: bool
) -> None:
    gated = gate.before(model)
    async with (
        server_of(config, gated, max_queued_images=QUEUE) as full,
        server_of(config, gated) as free,
        await EncoderClient.connect(full.endpoint, client_id="other") as other,
        await EncoderClient.connect([full.endpoint, free.endpoint]) as client,
    ):
        with gate.closed():
            await other.submit([photo(64, 64, number) for number in range(6)])
            before = queued(full)
            assert before == 6
            submit = client.keep if kept else client.submit

            async def refused(limit_s: float) -> bool:
                result = await submit(PHOTOS, all_or_nothing=True, timeout_s=limit_s)  # type: ignore[operator]
                answers = result.answers if kept else result
                assert all(answer.error is not None for answer in answers)
                return any(isinstance(answer.error, OverloadedError) for answer in answers)

            await within_some_limit(refused)
            await soon(lambda: (queued(full), queued(free)) == (before, 0))


async def test_a_client_waits_until_all_of_its_images_fit(config: Config, model: Model, gate: Gate) -> None:
    async with (
        small_queue(config, gate.before(model)) as (server, other),
        await EncoderClient.connect(server.endpoint) as client,
    ):
        with gate.closed():
            await other.submit(PHOTOS[:6])
            submitting = asyncio.create_task(client.submit(PHOTOS[6:], all_or_nothing=True))

            async def refused_twice() -> bool:
                return (await numbers(server)).total("submitted_images_total", outcome="failed") >= 12

            await soon(refused_twice)
            assert queued(server) == 6
        answers = await submitting
        assert [answer.error for answer in answers] == [None] * 6
