"""Ended calls: every ending frees memory and budgets at once, and is not logged as an error."""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from encoder_contract.errors import InvalidRequestError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.app import Server
from encoder_service.limits import Budget, Budgets
from testing.attacks import FETCH, SUBMIT
from testing.raw_http2 import RawConnection, framed
from tests.calls import LAST
from tests.processes import running
from tests.waiting import PATIENCE_S, soon

CALLS = 20
# Types of a call's messages and state, including those of gRPC: no instance may outlive the call.
HELD = (
    "FetchRequest",
    "SubmitRequest",
    "Caller",
    "Requests",
    "Inbound",
    "CallRecord",
    "_ServicerContext",
    "RPCState",
)
MIB = 1 << 20


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Disable garbage collection: only reference counts free memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that sends serialized messages, so the caller creates no message objects."""
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        yield channel


def held() -> Counter[str]:
    """Count the objects of calls that exist now, by type."""
    names = Counter(type(each).__name__ for each in gc.get_objects())
    return Counter({name: names[name] for name in HELD if names[name]})


def more_than_one(before: Counter[str]) -> Counter[str]:
    """Count the objects created since; gRPC keeps one state per method for the next call, so one may remain."""
    return Counter({name: count for name, count in (held() - before).items() if count > 1})


def in_use(server: Server) -> dict[str, int]:
    """Return the amounts that callers hold, for each budget of the server that is in use."""
    budgets = ((each.name, getattr(server.budgets, each.name)) for each in fields(Budgets))
    return {name: each.held for name, each in budgets if isinstance(each, Budget) and each.held}


UNKNOWN_MODEL = pb.Caller(model_fingerprint=bytes(32))
IMAGE = pb.FetchImage(digest=bytes(32))
NAME = pb.SubmitRequest(names=pb.ImageNames(names=[pb.ImageName(digest=b"no digest")]))
OPEN = pb.SubmitRequest(open=pb.Caller(request_id="r"))
WHOLE = pb.SubmitRequest(
    open=pb.Caller(request_id="r"),
    names=pb.ImageNames(names=[pb.ImageName(digest=bytes(32))]),
    bytes=[pb.ImageBytes(data=bytes(MIB), last=True)],
    last=True,
)
ENDINGS: dict[str, tuple[str, list[Any]]] = {
    "refused after it is parsed": (FETCH, [pb.FetchRequest(caller=UNKNOWN_MODEL, images=[IMAGE])]),
    "answered": (FETCH, [pb.FetchRequest(images=[IMAGE])]),
    "refused at the first message of a stream": (SUBMIT, [NAME]),
    "refused in the middle of a stream": (SUBMIT, [OPEN, NAME, OPEN]),
    "answered, a stream": (SUBMIT, [OPEN, NAME, LAST]),
    "answered, in one message": (SUBMIT, [WHOLE]),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_ended_call_is_freed_without_a_garbage_collection(
    server: Server, channel: grpc.aio.Channel, no_collections: None, ending: str
) -> None:
    path, requests = ENDINGS[ending]
    raw = [request.SerializeToString() for request in requests]
    before = held()
    for _ in range(CALLS):
        call: Any = channel.stream_stream(path)(timeout=PATIENCE_S)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in raw:
                await call.write(message)
            await call.done_writing()
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert await call.code() is not grpc.StatusCode.INTERNAL
        del call
    await soon(lambda: not more_than_one(before))
    await soon(lambda: not in_use(server))


async def test_a_call_whose_caller_leaves_is_freed_without_a_garbage_collection(
    server: Server, no_collections: None, caplog: pytest.LogCaptureFixture
) -> None:
    before, places = held(), server._listener._submit_gate._budget
    async with await RawConnection.open(server.endpoint) as connection:
        for _ in range(CALLS):
            stream = await connection.call(SUBMIT)
            await connection.send(stream, framed(OPEN.SerializeToString()))
            await soon(lambda: places.held == 1)
            connection.reset_stream(stream)
            await soon(lambda: places.held == 0)
        await soon(lambda: not more_than_one(before))
    await soon(lambda: not in_use(server))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", [SUBMIT, FETCH])
async def test_a_caller_that_leaves_during_its_refusal_logs_no_error(
    server: Server, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """A call without a request is refused; here the caller has left by then."""
    listener = server._listener
    places = (listener._submit_gate if path == SUBMIT else listener._gate)._budget
    async with await RawConnection.open(server.endpoint) as connection:
        for _ in range(CALLS):
            stream = await connection.call(path)
            await soon(lambda: places.held == 1)
            connection.reset_stream(stream)
            await soon(lambda: places.held == 0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_requests_of_many_empty_messages_are_refused_unparsed() -> None:
    """Two bytes of a message can take a hundred in memory, so the fields are counted first."""
    empty = b"\x12\x00" * 49_000
    names = b"\x0a\x00" * 49_000
    opens_and_names = b"\x0a\x00\x12\x00" * 24_000  # each creates a message
    in_list = pb.SubmitRequest(names=pb.ImageNames(names=[pb.ImageName()] * 49_000)).SerializeToString()
    assert in_list.endswith(names)
    for parse, raw in (
        (messages.parse_fetch, empty),
        (messages.parse_submit, in_list),
        (messages.parse_submit, opens_and_names),
    ):
        with pytest.raises(InvalidRequestError, match="more fields than a call of 512 images"):
            parse(raw, 512)


TOGETHER = 10


@pytest.mark.attack("many refused calls, to fill the memory")
async def test_refused_calls_take_no_memory(checkpoint: Path) -> None:
    """A parsed message of this kind takes 5 MB: 300 that were never freed would take 1500 MB."""
    message = b"\x12\x00" * (messages.names_bytes(512) // 2)
    with running(checkpoint) as server:
        process = psutil.Process(server.process.pid)
        async with grpc.aio.insecure_channel(server.endpoint) as channel:

            async def refused() -> None:
                call = channel.stream_stream(FETCH)(iter([message]), timeout=PATIENCE_S)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

            async def many_refused(calls: int) -> None:
                for _ in range(calls // TOGETHER):  # each refusal is delayed
                    await asyncio.gather(*(refused() for _ in range(TOGETHER)))

            await many_refused(30)  # memory for the first calls stays allocated
            before = process.memory_info().rss
            await many_refused(300)
            assert process.memory_info().rss - before < 200 * MIB
