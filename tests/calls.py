"""Calls to a real server: a Fetch read to its end, and raw messages."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client import EncoderClient, FetchedRows, RowRequest
from prefill_client.transport.connection import Connection
from tests.waiting import PATIENCE_S, soon


async def collect(
    client: EncoderClient, requests: list[RowRequest], **options: Any
) -> dict[int, FetchedRows]:
    """Return copies of all outcomes by index."""
    outcomes: dict[int, FetchedRows] = {}
    async with client.fetch(requests, timeout_s=PATIENCE_S, **options) as stream:  # type: ignore[arg-type]
        async for outcome in stream:
            assert outcome.index not in outcomes, "an image has one outcome"
            outcomes[outcome.index] = outcome.copy()
    return outcomes


def bytes_of(outcomes: Mapping[int, FetchedRows]) -> dict[int, bytes]:
    """Return the bytes of all rows by index. None has an error."""
    assert [rows.error for rows in outcomes.values()] == [None] * len(outcomes)
    return {index: rows.array.tobytes() for index, rows in outcomes.items()}


async def submitted(client: EncoderClient, images: Sequence[Any]) -> list[RowRequest]:
    """Submit images, of which none fails; return the requests for their rows."""
    answers = await client.submit(images, timeout_s=PATIENCE_S)
    assert [answer.error for answer in answers] == [None] * len(images)
    return [RowRequest(answer.digest) for answer in answers]


async def all_encoded(client: EncoderClient, images: Sequence[Any], **options: Any) -> list[FetchedRows]:
    """Submit images, and return the rows of each. Nothing fails; `options` are those of `fetch`."""
    outcomes = await collect(client, await submitted(client, images), **options)
    assert [rows.error for rows in outcomes.values()] == [None] * len(images)
    return [outcomes[index] for index in range(len(images))]


async def encoded(client: EncoderClient, image: Any, **options: Any) -> FetchedRows:
    """Do the same for one image."""
    return (await all_encoded(client, [image], **options))[0]


async def fetched(client: EncoderClient, digest: bytes) -> FetchedRows:
    """Return the rows of an image that is stored already, inline, or its error."""
    (rows,) = (await collect(client, [RowRequest(digest)], grace_ms=0, transports=["inline"])).values()
    return rows


async def connection(client: EncoderClient) -> Connection:
    """Return the client's connection, to send raw messages."""
    (endpoint,) = client._pool.router.endpoints
    return await client._pool.connection(endpoint)


async def all_connect(client: EncoderClient) -> None:
    """Wait until a client uses all of its servers. Those that connect late count as down at first."""
    pool = client._pool

    async def is_used(endpoint: str) -> bool:
        try:
            await pool.connection(endpoint)
        except EncoderError:
            return False
        return pool.router.is_up(endpoint)

    for endpoint in pool.router.endpoints:
        await soon(partial(is_used, endpoint))


async def stub(client: EncoderClient) -> Any:
    """Return the contract's stub. Any, because the generated types are those of a blocking channel."""
    return EncoderServiceStub((await connection(client)).channel)


def naming(*names: pb.ImageName) -> pb.SubmitRequest:
    return pb.SubmitRequest(names=pb.ImageNames(names=names))


LAST = pb.SubmitRequest(last=True)


async def begin_submit(
    client: EncoderClient, *names: pb.ImageName, metadata: Sequence[tuple[str, str]] = (), **caller: Any
) -> Any:
    """Open a Submit of a caller with these fields, and name images; return the call."""
    call = (await stub(client)).Submit(metadata=metadata, timeout=PATIENCE_S)
    await call.write(pb.SubmitRequest(open=pb.Caller(**caller)))
    if names:
        await call.write(naming(*names))
    return call


async def send(call: Any, index: int, data: bytes) -> None:
    """Send the file of an image in one piece."""
    await call.write(pb.SubmitRequest(bytes=[pb.ImageBytes(index=index, data=data, last=True)]))


async def next_states(call: Any, count: int) -> list[pb.ImageState]:
    """Return the next answers of a Submit, in any number of messages."""
    states: list[pb.ImageState] = []
    while len(states) < count:
        states += (await call.read()).states
    assert len(states) == count
    return states


async def next_state(call: Any) -> pb.ImageState:
    """Return the next answer of a Submit, which has a message of its own."""
    (state,) = await next_states(call, 1)
    return state


async def finish(call: Any) -> None:
    """Name no more images in a Submit, and read until the server ends the call."""
    await call.write(LAST)
    while await call.read() is not grpc.aio.EOF:
        pass


async def raw_submit(
    client: EncoderClient, images: list[tuple[pb.ImageName, bytes]], client_id: str = ""
) -> dict[int, list[pb.ImageState]]:
    """Submit with raw messages, without the client's own checks."""
    call = await begin_submit(client, *(name for name, _ in images), request_id="raw", client_id=client_id)
    states: dict[int, list[pb.ImageState]] = {}
    left = len(images)
    while left:
        for state in (await call.read()).states:
            states.setdefault(state.index, []).append(state)
            if state.state == pb.STATE_NEEDS_BYTES:
                await send(call, state.index, next(d for name, d in images if name.index == state.index))
            else:
                left -= 1
    await finish(call)
    return states


def named(index: int, data: bytes, **fields: Any) -> tuple[pb.ImageName, bytes]:
    return pb.ImageName(index=index, digest=content_digest(data), **fields), data  # type: ignore[arg-type]


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and the message with which a server refuses a call."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await (call.read() if hasattr(call, "read") else call)
    return refusal.value.code(), str(refusal.value.details())
