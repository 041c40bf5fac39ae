"""A vLLM request whose images stay submitted: the answer if images are lost, broken or fine."""

import asyncio
from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Any

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import (
    EncoderError,
    InvalidImageError,
    LostImageError,
    UnavailableError,
    UnknownImageError,
)
from encoder_service.app import Server
from prefill_client import EncoderClient, Submitted
from prefill_client.vllm.guarded_request import (
    FindFailed,
    GuardedRequest,
    Receive,
    Send,
    failed_image,
    first_encoded,
)
from testing.photos import photo
from tests.servers import kill
from tests.waiting import PATIENCE_S, soon

PHOTO = photo(90, 90, 41)
ANSWER = [
    {"type": "http.response.start", "status": 200, "headers": []},
    {"type": "http.response.body", "body": b"one"},
    {"type": "http.response.body", "body": b"two"},
]


class Caller:
    """A caller that keeps its connection and records the answer."""

    def __init__(self) -> None:
        self.received: list[MutableMapping[str, Any]] = []

    async def receive(self) -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.received.append(message)


async def never_answer(_: object, receive: Receive, send: Send) -> None:
    """Run as vLLM does until the caller disconnects, without an answer."""
    assert (await receive())["body"] == b"the body"
    while (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"null"})


async def never() -> None:
    raise AssertionError("no image should be checked")


def finding(client: EncoderClient, answers: Sequence[Submitted], *, continues: bool = False) -> FindFailed:
    names = [f"image {index}" for index in range(len(answers))]
    return partial(
        failed_image, client, answers, names, request_id="x", timeout_s=PATIENCE_S, continues=continues
    )


async def fails(_: object, __: Receive, send: Send) -> None:
    """Answer as vLLM does for a request that its connector ends."""
    await send({"type": "http.response.start", "status": 500, "headers": []})
    await send({"type": "http.response.body", "body": b"an error"})


@pytest.mark.parametrize("broken", [[], [1], [1, 2]])
async def test_an_error_for_a_broken_image_names_the_image(client: EncoderClient, broken: list[int]) -> None:
    caller, files = Caller(), [photo(90, 90, seed, "PNG") for seed in (42, 43, 44)]
    for index in broken:
        files[index] = files[index][: len(files[index]) // 2]  # its header is valid
    async with await client.keep(files) as kept:
        find = finding(client, kept.answers)
        error = await GuardedRequest(b"the body", kept, find, caller.receive, caller.send).run(fails, {})
    if broken:
        assert isinstance(error, InvalidImageError)
        assert any(error.message.startswith(f"image {index}: ") for index in broken), error.message
    else:
        assert error is None
    assert len(caller.received) == (0 if broken else 2)


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("continues", [True, False])
async def test_a_lost_image_that_was_not_submitted_is_an_error_with_advice(
    client: EncoderClient, sent: bool, continues: bool
) -> None:
    caller, other = Caller(), photo(90, 90, 45)
    async with await client.keep([PHOTO]) as kept:
        if sent:
            await client.submit([other])
        answers = [Submitted(content_digest(other)), *kept.answers]
        find = finding(client, answers, continues=continues)
        error = await GuardedRequest(b"the body", kept, find, caller.receive, caller.send).run(fails, {})
    if sent:
        assert error is None
        return
    assert isinstance(error, UnknownImageError)
    assert isinstance(error, LostImageError) is not continues
    kept_before = "image 0, of an earlier response, is no longer kept: send"
    assert (kept_before if continues else "render the request again") in error.message


@pytest.mark.parametrize("lost", [True, False])
async def test_vllms_errors_are_forwarded_unless_images_are_lost(
    server: Server, client: EncoderClient, lost: bool
) -> None:
    caller = Caller()
    async with await client.keep([PHOTO]) as kept:
        if lost:
            await kill(server)
            await soon(lambda: kept.error is not None)
        find = finding(client, kept.answers)
        error = await GuardedRequest(b"the body", kept, find, caller.receive, caller.send).run(fails, {})
    assert isinstance(error, UnavailableError) == lost
    assert len(caller.received) == (0 if lost else 2)


async def test_an_answer_that_has_begun_continues_after_images_are_lost(
    server: Server, client: EncoderClient
) -> None:
    caller, may_continue = Caller(), asyncio.Event()

    async def answers(_: object, __: Receive, send: Send) -> None:
        for message in ANSWER[:2]:
            await send(message)
        await may_continue.wait()
        await send(ANSWER[2])

    async with await client.keep([PHOTO], again_s=0.2) as kept:
        running = asyncio.create_task(
            GuardedRequest(b"the body", kept, never, caller.receive, caller.send).run(answers, {})
        )
        await soon(lambda: len(caller.received) == 2)
        await kill(server)
        await kept.lost()
        may_continue.set()
        assert await running is None
    assert caller.received == ANSWER


async def unreached(_: object, __: Receive, ___: Send) -> None:
    raise AssertionError("vLLM has nothing to do before the first image")


async def forever() -> EncoderError | None:
    """Wait for an image that is never encoded."""
    await asyncio.Event().wait()
    return None


@pytest.mark.parametrize("waits", [False, True], ids=["at vLLM", "for its first image"])
async def test_lost_images_end_a_request_before_its_answer_begins(
    server: Server, client: EncoderClient, waits: bool
) -> None:
    caller, first_image = Caller(), forever if waits else None
    async with await client.keep([PHOTO], again_s=0.2) as kept, asyncio.timeout(PATIENCE_S):
        exchange = GuardedRequest(
            b"the body", kept, never, caller.receive, caller.send, first_encoded=first_image
        )
        running = asyncio.create_task(exchange.run(unreached if waits else never_answer, {}))
        await asyncio.sleep(0)
        await kill(server)
        assert await running is await kept.lost()
    assert not caller.received


async def test_a_caller_who_leaves_while_the_first_image_is_encoded_ends_the_request(
    client: EncoderClient,
) -> None:
    caller, left = Caller(), asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async with await client.keep([PHOTO]) as kept, asyncio.timeout(PATIENCE_S):
        exchange = GuardedRequest(b"the body", kept, never, receive, caller.send, first_encoded=forever)
        running = asyncio.create_task(exchange.run(unreached, {}))
        await asyncio.sleep(0)
        left.set()
        assert await running is None
    assert not caller.received


@pytest.mark.parametrize("broken", [[], [0], [1]])
async def test_vllm_gets_a_request_when_its_first_image_is_encoded(
    client: EncoderClient, broken: list[int]
) -> None:
    caller, files = Caller(), [photo(90, 90, seed, "PNG") for seed in (46, 47)]
    for index in broken:
        files[index] = files[index][: len(files[index]) // 2]  # its header is valid
    bodies = []

    async def answer(_: object, receive: Receive, send: Send) -> None:
        bodies.append((await receive())["body"])
        for message in ANSWER:
            await send(message)

    async with await client.keep(files) as kept:
        first = partial(
            first_encoded,
            *(client, kept.answers, "image 0", 64),
            request_id="x",
            priority=0,
            timeout_s=PATIENCE_S,
        )
        exchange = GuardedRequest(b"the body", kept, never, caller.receive, caller.send, first_encoded=first)
        error = await exchange.run(answer, {})
        state = (await client.submit(files[:1]))[0]
    if broken == [0]:
        assert isinstance(error, InvalidImageError)
        assert error.message.startswith("image 0: "), error.message
        assert not bodies
    else:
        assert error is None
        assert bodies == [b"the body"]
        assert state.cached
        assert caller.received == ANSWER
