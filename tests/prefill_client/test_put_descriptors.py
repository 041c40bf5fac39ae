"""The file through which a Put call sends rows is closed with the call, also after errors."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.errors import ForbiddenError
from encoder_contract.segment_file import CALLERS_PREFIX
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client import EncoderClient, PutSession
from prefill_client.transport import connection
from prefill_client.transport.put_stream import OutgoingSegment
from tests.put_calls import PRODUCER, new_image, rows_for
from tests.servers import server_of
from tests.waiting import START_S, soon


def open_segments() -> int:
    """Count this process's descriptors of segments: those of the client, and of servers in this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that lists the folder is closed
            found += Path(os.readlink(descriptor)).name.startswith(CALLERS_PREFIX)
    return found


@asynccontextmanager
async def opened(
    config: Config, model: Model, **settings: Any
) -> AsyncIterator[tuple[Server, EncoderClient, PutSession]]:
    """Yield a server that accepts Put, a client of it, and a session of the client."""
    async with (
        server_of(config, model, **{"accept_put": "yes", **settings}) as server,
        await EncoderClient.connect(server.endpoint) as client,
        client.put(PRODUCER) as session,
    ):
        yield server, client, session


async def test_calls_that_a_server_refuses_leave_no_descriptor(config: Config, model: Model) -> None:
    before = open_segments()
    async with opened(config, model, accept_put="no") as (_, _, session):
        for _ in range(5):
            (answer,) = await session.name([new_image()])
            assert isinstance(answer.error, ForbiddenError)
        assert open_segments() <= before


async def test_a_segment_that_a_server_refuses_leaves_no_descriptor(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_segments()
    monkeypatch.setattr(connection, "segment_proof", lambda *_: b"0" * 16)
    async with opened(config, model) as (_, client, session):
        (answer,) = await session.name([new_image()])
        assert open_segments() <= before
        assert (await session.put(answer, rows_for(client, 1))).state == "held", "they go inline"


async def test_an_ended_put_call_leaves_no_descriptor(config: Config, model: Model) -> None:
    before = open_segments()
    async with opened(config, model) as (server, client, session):
        for seed in range(3):
            (answer,) = await session.name([new_image()])
            assert (await session.put(answer, rows_for(client, seed))).state == "held"
            stream = session._streams[server.endpoint].result()
            assert stream._segment is not None, "rows go through shared memory"
            await stream._write(pb.PutRequest())  # the server ends a call that says nothing
            await soon(lambda: open_segments() <= before)


async def test_a_segment_is_closed_after_the_thread_that_writes_to_it(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, inside, may_write = open_segments(), threading.Event(), threading.Event()
    were_open: list[bool] = []
    write = OutgoingSegment.write

    def watched(segment: OutgoingSegment, *arguments: Any) -> Any:
        inside.set()
        assert may_write.wait(START_S)
        were_open.append(segment._file >= 0)
        return write(segment, *arguments)

    monkeypatch.setattr(OutgoingSegment, "write", watched)
    async with opened(config, model) as (_, client, session):
        answers = await session.name([new_image(), new_image()])
        puts = [asyncio.create_task(session.put(answer, rows_for(client, 1))) for answer in answers]
        await soon(inside.is_set)
        await session.close()
        may_write.set()
        assert {answer.state for answer in await asyncio.gather(*puts)} == {"failed"}
        assert were_open == [True]
        await soon(lambda: open_segments() <= before)  # the server's too
