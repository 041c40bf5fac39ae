"""Cancelled callers of a Put call: neither their rows nor their writes affect other callers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Collection
from typing import Any

import numpy as np
import pytest

from encoder_contract.errors import UnavailableError
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client import EncoderClient, Grid, PutSession
from prefill_client.transport.put_stream import OutgoingSegment, PutStream
from tests.prefill_client.test_put_session import preferring
from tests.put_calls import PRODUCER, fetch_put, new_image, rows_for
from tests.servers import server_of
from tests.waiting import PATIENCE_S, START_S, soon

LARGE, LARGE_TOKENS = (
    Grid(1, 256, 256),
    16384,
)  # 8 MiB of rows: more than gRPC sends to a server that does not read


@pytest.fixture
async def store(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server that accepts Put, with at most two images of a call at the same time."""
    async with server_of(config, model, accept_put="yes") as server:
        yield server


@pytest.fixture
async def client(store: Server) -> AsyncIterator[EncoderClient]:
    async with await EncoderClient.connect(store.endpoint) as client:
        yield client


def stream_of(session: PutSession) -> PutStream:
    """Return the session's call to its only server."""
    (opened,) = session._streams.values()
    return opened.result()


def yours_at(session: PutSession, server: Server) -> Collection[int]:
    """Return the indexes of the images that this server answered with `yours`."""
    opening = session._streams.get(server.endpoint)
    return opening.result()._leases if opening is not None and opening.done() else ()


class HeldBack:
    """Wraps a method whose calls wait for `go_on`. Events report that a call has `begun` and `ended`."""

    def __init__(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        method = getattr(owner, name)

        async def held_back(*arguments: Any, **options: Any) -> Any:
            self.begun.set()
            await self.go_on.wait()
            try:
                return await method(*arguments, **options)
            finally:
                self.ended.set()

        monkeypatch.setattr(owner, name, held_back)


class Writers:
    """Counts the threads that write into segments at the same time. The first one waits for `may_write`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.may_write = threading.Event(), threading.Event()
        self.inside = self.most = 0
        self._lock = threading.Lock()
        write = OutgoingSegment.write

        def watched(segment: OutgoingSegment, *arguments: Any) -> Any:
            self._count(1)
            try:
                if not self.first.is_set():
                    self.first.set()
                    assert self.may_write.wait(START_S)
                return write(segment, *arguments)
            finally:
                self._count(-1)

        monkeypatch.setattr(OutgoingSegment, "write", watched)

    def _count(self, more: int) -> None:
        with self._lock:
            self.inside += more
            self.most = max(self.most, self.inside)


async def test_a_cancelled_put_keeps_shared_memory_until_its_thread_ends(
    store: Server, client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, images, rows = Writers(monkeypatch), [new_image(), new_image()], rows_for(client, 2)
    async with client.put(PRODUCER, transports=["shm"]) as session:
        one, two = await session.name(images)
        first = asyncio.create_task(session.put(one, rows_for(client, 1)))
        await soon(writers.first.is_set)
        second = asyncio.create_task(session.put(two, rows))
        has_left = []
        for _ in range(2):  # a second cancel is no reason to leave either
            first.cancel()
            await fetch_put(client, new_image())  # enough passes of the loop for the first call to end
            has_left.append(first.done())
        writers.may_write.set()
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], asyncio.CancelledError)
        assert (await second).state == "held"
        assert (has_left, writers.most) == ([False, False], 1)
        assert np.array_equal((await fetch_put(client, images[1])).array, rows)
        assert [answer.state for answer in await session.name(images)] == ["yours", "held"]


async def test_a_put_cancelled_during_a_write_keeps_the_call_open(
    store: Server, client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, rows = [new_image(LARGE), new_image()], rows_for(client, 2)
    async with client.put(PRODUCER, transports=["inline"]) as session:
        large, small = await session.name(images)
        reading = HeldBack(store.service._turns, "take", monkeypatch)
        putting = asyncio.create_task(session.put(large, rows_for(client, 1, LARGE_TOKENS)))
        await reading.begun.wait()
        await soon(stream_of(session)._writing.locked)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        reading.go_on.set()
        answer = await session.put(small, rows)
        assert (answer.state, answer.error) == ("held", None)
        assert np.array_equal((await fetch_put(client, images[1])).array, rows)
        await soon(lambda: not len(store.leases))


async def test_a_cancelled_abandon_frees_the_image_and_its_index(
    store: Server, client: EncoderClient
) -> None:
    async with client.put(PRODUCER) as session:
        one, two = await session.name([new_image(), new_image()])
        writing = stream_of(session)._writing
        abandoning = asyncio.create_task(session.abandon(one))
        while not writing.locked():
            await asyncio.sleep(0)
        abandoning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoning
        await soon(lambda: len(store.leases) == 1)
        assert (await session.put(two, rows_for(client, 2))).state == "held"
        assert {answer.state for answer in await session.name([new_image(), new_image()])} == {"yours"}


async def test_cancelling_the_call_fails_its_waiters_at_once(
    store: Server, client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client.put(PRODUCER, timeout_s=10 * PATIENCE_S) as session:
        await session.name([new_image()])
        answering = HeldBack(store.leases, "acquire", monkeypatch)
        naming = asyncio.create_task(session.name([new_image()]))
        await answering.begun.wait()
        stream_of(session)._call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            (answer,) = await naming
        assert isinstance(answer.error, UnavailableError)
        answering.go_on.set()
        (answer,) = await session.name([new_image()])
        assert answer.state == "yours", "the next names have a call of their own"


async def test_a_cancelled_name_gives_back_leases_of_all_servers(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = {"accept_put": "yes", "put_lease_s": 10 * PATIENCE_S}
    async with server_of(config, model, **lease) as quick, server_of(config, model, **lease) as slow:
        endpoints = [quick.endpoint, slow.endpoint]
        images = [image for endpoint in endpoints for image in preferring(endpoint, endpoints, 2)]
        async with await EncoderClient.connect(endpoints) as client, client.put(PRODUCER) as session:
            thinking = HeldBack(slow.leases, "acquire", monkeypatch)
            naming = asyncio.create_task(session.name(images))
            await thinking.begun.wait()
            await soon(lambda: len(yours_at(session, quick)) == 2)
            naming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await naming
            await soon(lambda: not len(quick.leases))
            thinking.go_on.set()
            await thinking.ended.wait()
            await soon(lambda: not len(slow.leases))
            assert {answer.state for answer in await session.name(images)} == {"yours"}
