"""Put: names are answered at once, leases expire, incomplete rows are never served, and rights are checked."""

import asyncio
import gc
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from encoder_contract.errors import ForbiddenError, UnavailableError, UnknownImageError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from prefill_client import EncoderClient, PutImage
from tests.operator_view import numbers, settled
from tests.put_calls import GRID, PRODUCER, RawPut, fetch_put, new_image, nothing_is_left, rows_for
from tests.waiting import PATIENCE_S, soon

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, CANCELLED = 3, 4, 8, 13, 1
HELD, YOURS, WAIT, FAILED = pb.HOLDING_HELD, pb.HOLDING_YOURS, pb.HOLDING_WAIT, pb.HOLDING_FAILED


async def test_a_server_refuses_puts_without_accept_put(server: Server, client: EncoderClient) -> None:
    async with client.put(PRODUCER) as session:
        (answer,) = await session.name([new_image()])
    assert answer.state == "failed"
    assert isinstance(answer.error, ForbiddenError)
    assert "--accept-put" in str(answer.error)


@pytest.mark.parametrize("by_digest", [False, True])
@pytest.mark.parametrize("transport", ["inline", "shm"])
async def test_put_rows_are_fetched_bit_for_bit(start: Any, transport: str, by_digest: bool) -> None:
    server, client = await start()
    image, rows = new_image(by_digest=by_digest), rows_for(client, 1)
    async with client.put(PRODUCER, transports=[transport]) as session:
        (answer,) = await session.name([image])
        assert answer.state == "yours"
        answer = await session.put(answer, rows)
        assert (answer.state, answer.error) == ("held", None)
    async with await EncoderClient.connect(server.endpoint) as other:
        for way in ("inline", "shm"):
            fetched = await fetch_put(other, image, transports=[way])
            assert fetched.error is None
            assert (fetched.source, fetched.grid, fetched.address) == ("host", GRID, answer.address)
            assert np.array_equal(fetched.array, rows)
        async with other.put(PRODUCER) as session:
            (again,) = await session.name([image])
            assert (again.state, again.address) == ("held", answer.address)
    await soon(lambda: nothing_is_left(server))


async def test_rows_go_through_shared_memory_where_they_can(start: Any) -> None:
    server, client = await start()
    images, rows = [new_image(), new_image()], rows_for(client, 2)
    for image, transports in zip(images, (["inline"], ["shm"]), strict=True):
        async with client.put(PRODUCER, transports=transports) as session:
            answer = await session.put((await session.name([image]))[0], rows)
            assert answer.state == "held"
            (opened,) = session._streams.values()
            assert (opened.result()._segment is not None) == (transports == ["shm"])
    assert not list(server.store.segment.path.parent.glob(f"encoder-client-{os.getpid()}-*"))


async def test_one_caller_computes_an_image_and_the_others_wait(start: Any) -> None:
    server, client = await start()
    image, rows = new_image(), rows_for(client, 3)
    async with client.put(PRODUCER) as ours, client.put(PRODUCER) as theirs:
        leased, twice = await ours.name([image, image])
        assert (leased.state, twice.state) == ("yours", "wait")
        (answer,) = await theirs.name([image])
        assert answer.state == "wait"
        assert 0 < answer.lease_s <= leased.lease_s == server._config.put_lease_s
        waiting = asyncio.create_task(fetch_put(client, image, grace_ms=20_000))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await ours.put(leased, rows)).state == "held"
        assert np.array_equal((await waiting).array, rows)
        assert [answer.state for answer in await theirs.name([image])] == ["held"]


@pytest.mark.parametrize("how", ["abandons it", "ends its call"])
async def test_abandoning_an_image_wakes_its_waiters_at_once(start: Any, how: str) -> None:
    server, client = await start(put_lease_s=120.0, limits={"max_grace_ms": 120_000})
    image = new_image()
    async with client.put(PRODUCER) as ours, client.put(PRODUCER) as theirs:
        (leased,) = await ours.name([image])
        waiting = asyncio.create_task(fetch_put(client, image, grace_ms=120_000))
        await soon(lambda: bool(waiting_at(server)))
        await (ours.abandon(leased) if how == "abandons it" else ours.close())
        outcome = await asyncio.wait_for(waiting, PATIENCE_S)  # much less than the lease and the grace period
        assert isinstance(outcome.error, UnknownImageError)
        assert "compute them" in str(outcome.error)
        await soon(lambda: len(server.leases) == 0)
        (answer,) = await theirs.name([image])
        assert answer.state == "yours"


def waiting_at(server: Server) -> int:
    return server.budgets.awaited_images.held


async def test_rows_that_arrive_after_the_lease_are_refused(start: Any) -> None:
    server, client = await start(put_lease_s=0.3)
    image, rows = new_image(), rows_for(client, 4).tobytes()
    call = await RawPut.open(client)
    assert (await call.name(client, image)).holding == YOURS
    await call.rows(rows[:1000])
    state = await call.state()
    assert (state.holding, state.error.code) == (FAILED, DEADLINE_EXCEEDED)
    server.leases.lease_s = 300.0  # longer than the rest of the test
    await call.rows(rows[1000:])
    await call.call.write(pb.PutRequest(end=pb.PutEnd(index=0, checksum=0)))
    async with client.put(PRODUCER) as session:
        assert [answer.state for answer in await session.name([image])] == ["yours"]
        assert (await call.name(client, image, 1)).holding == WAIT
    assert isinstance((await fetch_put(client, image)).error, UnknownImageError)
    call.call.cancel()
    await soon(lambda: nothing_is_left(server))


async def test_a_slow_put_holds_no_space_beyond_its_lease(start: Any) -> None:
    server, client = await start(put_lease_s=0.5)
    first, second, third = new_image(), new_image(), new_image()
    call = await RawPut.open(client)
    answered: dict[int, set[int]] = {YOURS: set(), WAIT: set(), FAILED: set()}

    async def name(image: PutImage, index: int) -> None:
        """Name an image and read one answer; it may be for an earlier image whose lease has ended."""
        state = await call.name(client, image, index)
        answered[state.holding].add(state.index)

    for index, image in enumerate((first, second)):
        await name(image, index)
        await call.rows(b"x", index)
    async with asyncio.timeout(PATIENCE_S):
        for index in itertools.count(2):
            await name(third, index)
            if answered[FAILED] >= {0, 1}:
                break
            await asyncio.sleep(0.01)
    assert answered[YOURS] >= {0, 1}
    call.call.cancel()
    await soon(lambda: nothing_is_left(server))


async def test_evicted_put_rows_are_unknown_and_leased_again(
    start: Any,
) -> None:
    server, client = await start()
    image, rows = new_image(), rows_for(client, 8)
    async with client.put(PRODUCER) as session:
        held = await session.put((await session.name([image]))[0], rows)
        await soon(lambda: server.store.evict(held.address))
        outcome = await fetch_put(client, image)
        assert isinstance(outcome.error, UnknownImageError)
        assert "evicted" in str(outcome.error)
        (answer,) = await session.name([image])
        assert answer.state == "yours"
        assert (await session.put(answer, rows)).state == "held"


async def test_rows_of_a_producer_are_separate_from_others_and_the_tower(start: Any) -> None:
    _, client = await start()
    image, rows = new_image(by_digest=True), rows_for(client, 9)
    async with client.put(PRODUCER) as session:
        await session.put((await session.name([image]))[0], rows)
    other = replace(PRODUCER, weights=b"other weights")
    assert isinstance((await fetch_put(client, image, producer=other)).error, UnknownImageError)
    assert isinstance((await fetch_put(client, image, producer=None)).error, UnknownImageError)


PUTS = """
import asyncio, sys
from prefill_client import EncoderClient
from tests.put_calls import RawPut, new_image, rows_for

async def main():
    client = await EncoderClient.connect(sys.argv[1])
    call = await RawPut.open(client)
    await call.name(client, new_image())
    await call.rows(rows_for(client, 1).tobytes()[:2000])
    print("half way", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_producer_that_is_killed_leaves_nothing(start: Any) -> None:
    server, _ = await start(put_lease_s=300.0)
    command = [sys.executable, "-c", PUTS, server.endpoint]
    producer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert producer.stdout is not None
    assert await producer.stdout.readline() == b"half way\n"
    await soon(lambda: server.budgets.put_bytes.held > 0)
    producer.kill()
    await producer.wait()
    await soon(lambda: nothing_is_left(server))


async def test_a_finished_image_is_not_put_under_a_reused_index(start: Any) -> None:
    """The index was reused for another image: rows must not be stored under that name."""
    _, client = await start()
    images, rows = [new_image(), new_image()], rows_for(client, 11)
    async with client.put(PRODUCER) as session:
        (first,) = await session.name([images[0]])
        await session.put(first, rows)
        (second,) = await session.name([images[1]])
        assert second.index == first.index
        again = await session.put(first, rows_for(client, 12))
        assert again.state == "failed"
        assert (await session.put(second, rows)).state == "held"
    assert np.array_equal((await fetch_put(client, images[1])).array, rows)


async def test_a_caller_cancelled_while_acquiring_holds_no_lease(start: Any) -> None:
    server, client = await start(put_lease_s=300.0)
    async with client.put(PRODUCER) as session:
        (leased,) = await session.name([new_image()])
        asking = asyncio.create_task(session.name([new_image()]))
        for _ in range(2):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await soon(lambda: len(server.leases) == 1)
        assert (await session.put(leased, rows_for(client, 13))).state == "held"


async def test_a_drain_waits_for_incomplete_rows_but_not_for_idle_calls(start: Any) -> None:
    server, client = await start(drain_s=300.0)
    rows = rows_for(client, 16)
    async with client.put(PRODUCER) as idle, client.put(PRODUCER) as busy:
        (done,) = await idle.name([new_image()])
        await idle.abandon(done)
        (leased,) = await busy.name([new_image()])
        draining = asyncio.create_task(server.drain())
        await soon(lambda: not next(iter(idle._streams.values())).result().is_open())
        assert not draining.done()
        assert (await busy.put(leased, rows)).state == "held"
        await asyncio.wait_for(draining, 60)
        (gone,) = await busy.name([new_image()])
        assert isinstance(gone.error, UnavailableError)


async def test_a_call_that_a_drain_ends_leaves_no_traceback(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = await start()
    async with client.put(PRODUCER) as session:
        (answer,) = await session.name([new_image()])
        await session.abandon(answer)
        await server.drain()
        gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_puts_are_counted(start: Any) -> None:
    server, client = await start()
    image, rows = new_image(), rows_for(client, 14)
    async with client.put(PRODUCER) as session:
        (answer,) = await session.name([image])
        assert (await numbers(server)).total("put_leases") == 1
        await session.put(answer, rows)
        await session.name([image])
    seen = await settled(server, "calls_total", 1, call="put")
    counts = {name: seen.total("put_images_total", outcome=name) for name in ("yours", "kept", "held")}
    assert counts == {"yours": 1, "kept": 1, "held": 1}
    assert seen.total("put_bytes_total") == rows.nbytes
