"""Put in a fleet: one lease over all replicas, put rows from peers, and operation without the index."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from encoder_contract.errors import UnknownImageError
from encoder_service.config import Config
from encoder_service.engine.model import Model
from tests.cluster_replica import PATIENCE, PROMPTLY, Replica, Start, starting
from tests.put_calls import PRODUCER, fetch_put, new_image, rows_for
from tests.waiting import PATIENCE_S, soon


@pytest.fixture
async def start(config: Config, model: Model, redis_url: str) -> AsyncIterator[Start]:
    async with starting(replace(config, accept_put="yes", put_lease_s=60.0), model, redis_url) as start:
        yield start


def seen_by(replica: Replica, peers: int) -> bool:
    return len(replica.index.peers()) == peers


async def test_one_caller_over_all_replicas_gets_the_lease(start: Start) -> None:
    a, b = await start(), await start()
    image, rows = new_image(), rows_for(a.client, 1)
    async with a.client.put(PRODUCER) as ours, b.client.put(PRODUCER) as theirs:
        (leased,), (other,) = await ours.name([image]), await theirs.name([image])
        assert (leased.state, other.state) == ("yours", "wait")
        waiting = asyncio.create_task(fetch_put(b.client, image, grace_ms=30_000))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await ours.put(leased, rows)).state == "held"
        outcome = await asyncio.wait_for(waiting, PATIENCE_S)
        assert (outcome.error, outcome.source) == (None, "peer")
        assert np.array_equal(outcome.array, rows)
        assert [answer.state for answer in await theirs.name([image])] == ["held"]
    assert (await fetch_put(b.client, image)).source == "host"


async def test_rows_at_a_peer_count_as_held_for_every_caller(start: Start) -> None:
    a, b = await start(), await start()
    image, rows = new_image(by_digest=True), rows_for(a.client, 2)
    async with a.client.put(PRODUCER) as ours:
        await ours.put((await ours.name([image]))[0], rows)

    async def held() -> bool:
        async with b.client.put(PRODUCER) as theirs:
            (answer,) = await theirs.name([image])
            return answer.state == "held"

    await soon(held)
    assert np.array_equal((await fetch_put(b.client, image)).array, rows)


@pytest.mark.parametrize("how", ["gives it up", "its replica dies"])
async def test_the_end_of_a_lease_reaches_waiters_at_other_replicas(start: Start, how: str) -> None:
    patience = PROMPTLY if how == "its replica dies" else PATIENCE
    a, b = await start(patience=patience), await start(patience=patience)
    await soon(lambda: seen_by(b, 1))
    image = new_image()
    async with a.client.put(PRODUCER) as ours, b.client.put(PRODUCER) as theirs:
        (leased,) = await ours.name([image])
        assert [answer.state for answer in await theirs.name([image])] == ["wait"]
        waiting = asyncio.create_task(fetch_put(b.client, image, grace_ms=30_000))
        await asyncio.sleep(0.1)
        await (ours.abandon(leased) if how == "gives it up" else a.die())
        outcome = await asyncio.wait_for(waiting, PATIENCE_S)
        assert isinstance(outcome.error, UnknownImageError)

        async def ours_to_compute() -> bool:
            (answer,) = await theirs.name([image])
            return answer.state == "yours"

        await soon(ours_to_compute)


async def test_put_rows_are_handed_over_and_fetched_from_a_peer(
    start: Start,
) -> None:
    a, b = await start(hand_over_s=10.0), await start()
    await soon(lambda: seen_by(a, 1))
    image, rows = new_image(), rows_for(a.client, 3)
    async with a.client.put(PRODUCER) as ours:
        await ours.put((await ours.name([image]))[0], rows)
    assert np.array_equal((await fetch_put(a.client, image)).array, rows)
    await a.server.drain()
    outcome = await fetch_put(b.client, image, transports=["shm"])
    assert (outcome.error, outcome.source) == (None, "host")
    assert np.array_equal(outcome.array, rows)


async def test_without_its_index_a_replica_continues_alone(start: Start) -> None:
    a, b = await start(), await start()
    image, rows = new_image(), rows_for(a.client, 4)
    await a.index.close()
    async with a.client.put(PRODUCER) as ours, b.client.put(PRODUCER) as theirs:
        (leased,), (other,) = await ours.name([image]), await theirs.name([image])
        assert (leased.state, other.state) == ("yours", "yours")
        for session, answer, replica in ((ours, leased, a), (theirs, other, b)):
            assert (await session.put(answer, rows)).state == "held"
            assert np.array_equal((await fetch_put(replica.client, image)).array, rows)
