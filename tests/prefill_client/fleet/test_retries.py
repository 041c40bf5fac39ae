"""Retries: which errors are retried, how often, and which error the caller gets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import grpc
import pytest

from encoder_contract.errors import (
    DeadlineError,
    InternalError,
    InvalidImageError,
    OverloadedError,
    UnavailableError,
    UnknownImageError,
)
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.messages import Context
from encoder_service.api.service import SERVICE
from encoder_service.app import Server
from encoder_service.limits import Caller
from prefill_client import EncoderClient, RowRequest
from prefill_client.fleet.retries import MAX_FAILURES, MAX_REFUSED_PAUSE_S, Attempts
from testing.photos import photo
from tests.waiting import within_some_limit


def attempts(left_s: float = 60.0) -> Attempts:
    return Attempts(monotonic() + left_s)


@pytest.mark.parametrize("error", [InvalidImageError("x"), DeadlineError("x"), UnknownImageError("x")])
def test_permanent_errors_are_not_retried(error) -> None:
    assert attempts().pause_s(error, can_resubmit=False) is None


@pytest.mark.parametrize("hint_ms", [0, 1, 200, 4000])
def test_retries_follow_the_hint_and_back_off_until_the_deadline(hint_ms: int) -> None:
    tried = attempts(1e6)
    pauses = []
    for _ in range(2000):
        pause = tried.pause_s(OverloadedError("full", retry_after_ms=hint_ms), can_resubmit=False)
        assert pause is not None
        assert pause >= hint_ms / 1000
        pauses.append(pause)
    assert pauses[0] <= 1.5 * max(hint_ms / 1000, 0.1)
    assert sum(pauses[:6]) > 3
    assert max(pauses) <= 1.5 * max(hint_ms / 1000, MAX_REFUSED_PAUSE_S)
    assert attempts(0.1).pause_s(OverloadedError("full", retry_after_ms=200), can_resubmit=False) is None


@asynccontextmanager
async def client_of(server: Server, **calls: Any) -> AsyncIterator[EncoderClient]:
    """A client of a server with the description of `server`, whose `calls` these functions answer in bytes."""

    async def describe(request: pb.DescribeRequest, _: Context) -> pb.DescribeResponse:
        return await server.service.describe(request, Caller("this host", ("this host",)))

    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            describe, pb.DescribeRequest.FromString, pb.DescribeResponse.SerializeToString
        ),
        **{name: grpc.stream_stream_rpc_method_handler(answer) for name, answer in calls.items()},
    }
    other = grpc.aio.server()
    other.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    try:
        async with await EncoderClient.connect(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await other.stop(0)


async def test_a_refusing_server_gets_few_retries_per_second(server: Server) -> None:
    """A server that ends every Submit with RESOURCE_EXHAUSTED and no details, as gRPC itself does."""
    submits = 0

    async def refuse(requests: AsyncIterator[object], context: Context) -> None:
        nonlocal submits
        submits += 1
        await anext(requests)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")

    async with client_of(server, Submit=refuse) as client:

        async def refused_twice(limit_s: float) -> bool:
            nonlocal submits
            submits = 0
            (image,) = await client.submit([photo(64, 64, 1)], timeout_s=limit_s)
            assert submits <= 5 * limit_s
            return submits > 1 and isinstance(image.error, OverloadedError)

        await within_some_limit(refused_twice)


async def test_an_unparsable_answer_is_an_internal_error(server: Server) -> None:
    async def garbage(requests: AsyncIterator[bytes], _: Context) -> AsyncIterator[bytes]:
        await anext(requests)
        yield b"\xff"

    async with client_of(server, Submit=garbage, Fetch=garbage) as client:
        (image,) = await client.submit([photo(64, 64, 1)])
        assert isinstance(image.error, InternalError)
        assert "cannot be parsed" in str(image.error)
        async with client.fetch([RowRequest(bytes(32))]) as stream:
            (rows,) = [rows async for rows in stream]
        assert isinstance(rows.error, InternalError)
        assert "cannot be parsed" in str(rows.error)


def test_a_deadline_during_refusals_reports_the_refusal() -> None:
    tried = attempts()
    refusal = OverloadedError("full", retry_after_ms=10)
    tried.pause_s(refusal, can_resubmit=False)
    assert tried.outcome(DeadlineError("late")) is refusal
    assert isinstance(attempts().outcome(DeadlineError("late")), DeadlineError)
    other = InternalError("bug")
    assert tried.outcome(other) is other


def test_retries_after_failures_are_bounded() -> None:
    tried = attempts()
    pauses = [tried.pause_s(UnavailableError("gone"), can_resubmit=False) for _ in range(MAX_FAILURES + 1)]
    assert None not in pauses[:-1]
    assert pauses[-1] is None
    bug = attempts()
    assert bug.pause_s(InternalError("bug"), can_resubmit=False) is not None
    assert bug.pause_s(InternalError("bug"), can_resubmit=False) is None
    assert attempts().pause_s(UnknownImageError("lost"), can_resubmit=True) == 0.0
