"""Faults of the index in Redis: each leaves the replica `alone` in bounded time, and it rejoins by itself."""

import asyncio
import re
import time

import pytest
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError

from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis.schema import Keys
from encoder_service.cluster.redis.session import FAILURES_TO_OPEN
from testing.redis_servers import RedisServer, redis_cluster, redis_server
from testing.tcp_proxy import TcpProxy
from tests.index_replicas import (
    CALL_TIMEOUT_S,
    NAMESPACE,
    PATIENT_S,
    SHORT_TTL_MS,
    JoinWatched,
    Watched,
    grids,
    new_addresses,
    publish,
)
from tests.waiting import PATIENCE_S, soon


async def costs_nothing(replica: Watched) -> bool:
    """Whether every call answers like an empty index without waiting: best of five, as the machine may be busy."""
    for _ in range(5):
        if await slowest_empty_answer(replica) < CALL_TIMEOUT_S / 2:
            return True
    return False


async def slowest_empty_answer(replica: Watched) -> float:
    """Make every call once; each must answer like an empty index. Return the time of the slowest."""
    cluster, index, (a, b) = replica.cluster, replica.index, new_addresses(2)
    slowest = 0.0
    for call, expected in (
        (index.locate([a]), {}),
        (index.renew([b]), {b}),
        (publish(cluster, grids([a])), None),
        (index.retract([a]), None),
        (index.release([b]), False),
        (cluster.wait_published(a, 2 * PATIENCE_S), ()),
        (index.find([a]), {}),
    ):
        began = time.monotonic()
        assert await call == expected
        slowest = max(slowest, time.monotonic() - began)
    assert (await cluster.acquire([a, b])).granted == {a, b}
    return slowest


async def test_replicas_publish_again_to_empty_redis(redis: RedisServer, join_watched: JoinWatched) -> None:
    a, b = await join_watched(redis.url, "a"), await join_watched(redis.url, "b")
    of_a, of_b = new_addresses(150), new_addresses(3)
    await a.hold(of_a)
    await b.hold(of_b)
    working = new_addresses(2)
    await a.cluster.acquire(working)
    waiting = asyncio.create_task(b.cluster.wait_published(working[0], 2 * PATIENCE_S))
    await asyncio.sleep(0.1)
    redis.kill()
    for replica in (a, b):
        await replica.until(IndexState.ALONE)
    assert await asyncio.wait_for(waiting, PATIENCE_S) == ()
    for replica in (a, b):
        assert await costs_nothing(replica)
        assert replica.index.peers() == ()
    redis.start()
    for replica in (a, b):
        await replica.until(IndexState.JOINED)
    await soon(lambda: b.locates(of_a, "a"))
    await soon(lambda: a.locates(of_b, "b"))

    def lease_is_back() -> bool:
        with redis.client() as admin:
            return all(admin.exists(Keys(NAMESPACE).lease(address)) for address in working)

    await soon(lease_is_back)
    waiting = asyncio.create_task(b.cluster.wait_published(working[0], 2 * PATIENCE_S))
    await asyncio.sleep(0.1)
    await a.hold(working)
    assert [place.replica_id for place in await asyncio.wait_for(waiting, PATIENCE_S)] == ["a"]
    assert [state for state, _ in a.state_changes] == [IndexState.JOINED, IndexState.ALONE, IndexState.JOINED]


async def test_a_silent_redis_costs_three_timeouts_and_then_nothing(
    redis: RedisServer, join_watched: JoinWatched
) -> None:
    a, b = await join_watched(redis.url, "a"), await join_watched(redis.url, "b", timeout_s=CALL_TIMEOUT_S)
    held = new_addresses(40)
    await a.hold(held)
    redis.pause()
    waiting = asyncio.create_task(b.cluster.wait_published(new_addresses(1)[0], 2 * PATIENCE_S))
    assert await b.acquires_until_alone(held) <= FAILURES_TO_OPEN
    assert await asyncio.wait_for(waiting, PATIENCE_S) == ()
    assert await costs_nothing(b)
    redis.resume()
    for replica in (a, b):
        await replica.until(IndexState.JOINED)
    await soon(lambda: b.locates(held, "a"))
    # Late replies must not be taken for the replies of later calls, which have time here.
    b.index._session.calls = b.index._session.calls._replace(timeout_s=PATIENT_S)
    for address in held:
        assert list(await b.index.locate([address])) == [address]


async def test_a_short_stall_disconnects_no_replica(redis: RedisServer, join_watched: JoinWatched) -> None:
    a = await join_watched(redis.url, "a", timeout_s=CALL_TIMEOUT_S)
    for _ in range(10):
        a.state_changes.clear()
        paused = time.monotonic()
        redis.pause()
        calls = [asyncio.create_task(a.cluster.acquire(new_addresses(4))) for _ in range(50)]
        await asyncio.sleep(1.5 * CALL_TIMEOUT_S)
        redis.resume()
        lasted = time.monotonic() - paused
        await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
        if lasted < 2 * CALL_TIMEOUT_S:  # otherwise the stall was too long for this test
            break
        await a.until(IndexState.JOINED)
    assert a.state_changes == []


async def test_a_failed_publication_is_soon_repeated(redis: RedisServer, join_watched: JoinWatched) -> None:
    a, b = await join_watched(redis.url, "a", timeout_s=CALL_TIMEOUT_S), await join_watched(redis.url, "b")
    (address,) = new_addresses(1)
    await a.cluster.acquire([address])
    waiting = asyncio.create_task(b.cluster.wait_published(address, PATIENCE_S))
    await asyncio.sleep(0.1)
    redis.pause()
    await publish(a.cluster, grids([address]))  # gets no answer before its timeout
    redis.resume()
    places = await waiting
    assert [place.replica_id for place in places] == ["a"]


@pytest.mark.parametrize(
    ("refuse", "accept", "says"),
    [
        (
            ["CONFIG SET maxmemory-policy noeviction", "CONFIG SET maxmemory 1"],
            "CONFIG SET maxmemory 0",
            "memory",
        ),
        (["REPLICAOF 127.0.0.1 1"], "REPLICAOF NO ONE", "READONLY|read only"),
    ],
    ids=["out of memory", "read only"],
)
async def test_a_redis_that_refuses_writes_is_avoided_until_it_accepts_them(
    redis: RedisServer, join_watched: JoinWatched, refuse: list[str], accept: str, says: str
) -> None:
    a = await join_watched(redis.url, "a")
    with redis.client() as admin:
        for command in refuse:
            admin.execute_command(*command.split())
        await a.until(IndexState.ALONE)
        assert re.search(says, a.state_changes[-1][1])
        assert await costs_nothing(a)
        admin.execute_command(*accept.split())
    await a.until(IndexState.JOINED)


async def is_loading(redis: RedisServer) -> bool:
    try:
        with redis.client() as client:
            await asyncio.to_thread(client.ping)
    except BusyLoadingError:
        return True
    except RedisConnectionError:
        pass  # not listening yet
    return False


async def test_a_loading_redis_is_joined_when_it_is_ready(join_watched: JoinWatched) -> None:
    # Loads 120 keys of 256 KiB at 50 ms each, and answers LOADING after each 2 MiB.
    with redis_server("--key-load-delay", "50000", "--rdbcompression", "no") as server:
        with server.client() as admin:
            admin.mset({f"key{n}": bytes(1 << 18) for n in range(120)})
            admin.save()
        a = await join_watched(server.url, "a")
        server.kill()
        await a.until(IndexState.ALONE)
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await soon(lambda: is_loading(server))
        assert await costs_nothing(a)
        await starting
        await a.until(IndexState.JOINED)


async def test_a_redis_that_starts_later_is_joined(join_watched: JoinWatched) -> None:
    server = RedisServer()
    a = await join_watched(server.url, "a")
    assert a.index.state is IndexState.ALONE
    assert [state for state, _ in a.state_changes] == [IndexState.ALONE]
    assert await costs_nothing(a)
    try:
        server.start()
        await a.until(IndexState.JOINED)
    finally:
        server.stop()


async def test_a_replica_without_redis_works_alone(redis: RedisServer, join_watched: JoinWatched) -> None:
    proxy = await TcpProxy(redis.port).start()
    a = await join_watched(redis.url, "a", ttl_ms=SHORT_TTL_MS)
    b = await join_watched(f"redis://127.0.0.1:{proxy.port}", "b", ttl_ms=SHORT_TTL_MS)
    held = new_addresses(3)
    await b.hold(held)
    await soon(lambda: a.locates(held, "b"))
    proxy.cut()
    await b.until(IndexState.ALONE)
    assert await costs_nothing(b)

    async def gone() -> bool:
        return await a.index.locate(held) == {}

    await soon(gone)
    assert a.index.state is IndexState.JOINED
    proxy.mend()
    await b.until(IndexState.JOINED)
    await soon(lambda: a.locates(held, "b"))
    await proxy.stop()


async def test_a_cluster_that_loses_a_master_is_joined_after_its_failover(join_watched: JoinWatched) -> None:
    with redis_cluster(masters=3, replicas=3) as cluster:
        a, b = [await join_watched(cluster.url, name) for name in "ab"]
        held = new_addresses(200)
        await a.hold(held)
        assert len(await b.index.locate(held)) == 200
        began = time.monotonic()
        await asyncio.to_thread(cluster.kill_master, 1)

        async def recovered() -> bool:
            found = await b.index.locate(held)
            return len(found) == 200 and b.index.state is IndexState.JOINED

        await asyncio.sleep(0.1)
        assert await b.index.locate(held) == {} or b.index.state is IndexState.JOINED
        await soon(recovered, 3 * PATIENCE_S)
        assert time.monotonic() - began > 0.5  # the cluster really had to fail over


async def test_two_hundred_calls_at_once_do_not_fail(redis: RedisServer, join_watched: JoinWatched) -> None:
    a = await join_watched(redis.url, "a")
    batches = [new_addresses(8) for _ in range(200)]
    answers = await asyncio.gather(*(a.cluster.acquire(batch) for batch in batches))
    assert all(answer.granted == set(batch) for answer, batch in zip(answers, batches, strict=True))
    with redis.client() as admin:
        leases = sum(1 for _ in admin.scan_iter("*:lease"))
    assert leases == 1600
