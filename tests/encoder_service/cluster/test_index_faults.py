"""Faults of the index in Redis: every one ends as `alone`, in bounded time, and the way back is found by itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from encoder_service.cluster.contract import IndexState
from encoder_service.cluster.index.breaker import FAILURES_TO_OPEN
from encoder_service.cluster.index.schema import Keys
from testing.redis_servers import RedisServer, redis_cluster, redis_server
from tests.index_replicas import (
    CALL_TIMEOUT_S,
    NAMESPACE,
    JoinWatched,
    Watched,
    grids,
    new_addresses,
    watched_replicas,
)
from tests.tcp_proxy import TcpProxy
from tests.waiting import PATIENCE_S, soon


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def join() -> AsyncIterator[JoinWatched]:
    async with watched_replicas() as join:
        yield join


async def costs_nothing(replica: Watched) -> bool:
    """Whether every call answers as an empty index without waiting; the best of some, on a machine that is busy."""
    return min([await slowest_empty_answer(replica) for _ in range(5)]) < CALL_TIMEOUT_S / 2


async def slowest_empty_answer(replica: Watched) -> float:
    """Make every call once; each must answer as an empty index; return the seconds of the slowest."""
    index, (a, b) = replica.index, new_addresses(2)
    slowest = 0.0
    for call, expected in (
        (index.locate([a]), {}),
        (index.renew([b]), {b}),
        (index.publish(grids([a])), None),
        (index.retract([a]), None),
        (index.release([b]), None),
        (index.wait_published(a, 120.0), ()),
        (index.put_source(b"key", b"image"), False),
        (index.get_source(b"key"), None),
    ):
        began = time.monotonic()
        assert await call == expected
        slowest = max(slowest, time.monotonic() - began)
    assert (await index.acquire([a, b])).granted == {a, b}
    return slowest


async def test_redis_killed_and_back_empty_is_told_again_what_each_replica_holds(
    server: RedisServer, join: JoinWatched
) -> None:
    a, b = await join(server.url, "a"), await join(server.url, "b")
    of_a, of_b = new_addresses(150), new_addresses(3)
    await a.hold(of_a)
    await b.hold(of_b)
    working = new_addresses(2)
    await a.index.acquire(working)
    waiting = asyncio.create_task(b.index.wait_published(working[0], 120.0))
    await asyncio.sleep(0.1)
    server.kill()
    for replica in (a, b):
        await replica.until(IndexState.ALONE)
    assert await asyncio.wait_for(waiting, PATIENCE_S) == ()
    for replica in (a, b):
        assert await costs_nothing(replica)
        assert replica.index.peers() == ()
    server.start()
    for replica in (a, b):
        await replica.until(IndexState.JOINED)

    async def told_again() -> bool:
        return len(await b.index.locate(of_a)) == 150 and len(await a.index.locate(of_b)) == 3

    await soon(told_again)

    def lease_is_back() -> bool:
        with server.client() as admin:
            return all(admin.exists(Keys(NAMESPACE).lease(address)) for address in working)

    await soon(lease_is_back)
    waiting = asyncio.create_task(b.index.wait_published(working[0], 120.0))
    await asyncio.sleep(0.1)
    await a.hold(working)
    assert [place.replica_id for place in await asyncio.wait_for(waiting, PATIENCE_S)] == ["a"]
    assert [state for state, _ in a.said] == [IndexState.JOINED, IndexState.ALONE, IndexState.JOINED]


async def test_redis_that_answers_nothing_costs_three_bounds_and_then_nothing(
    server: RedisServer, join: JoinWatched
) -> None:
    a, b = await join(server.url, "a"), await join(server.url, "b")
    held = new_addresses(40)
    await a.hold(held)
    server.pause()
    began = time.monotonic()
    waiting = asyncio.create_task(b.index.wait_published(new_addresses(1)[0], 120.0))
    calls = 0
    async with asyncio.timeout(PATIENCE_S):
        while b.index.state is IndexState.JOINED:
            assert (await b.index.acquire(held)).granted == frozenset(held)
            calls += 1
    assert calls <= FAILURES_TO_OPEN
    assert await asyncio.wait_for(waiting, PATIENCE_S) == ()
    assert await costs_nothing(b)
    await asyncio.sleep(3.0 - (time.monotonic() - began))
    server.resume()
    for replica in (a, b):
        await replica.until(IndexState.JOINED)

    async def answers_right() -> bool:
        found = await b.index.locate(held)
        return set(found) == set(held) and all(place[0].replica_id == "a" for place in found.values())

    await soon(answers_right)
    # Replies that came too late must not be taken for those of later calls.
    for address in held:
        assert list(await b.index.locate([address])) == [address]


async def test_one_slow_moment_does_not_send_a_busy_replica_alone(
    server: RedisServer, join: JoinWatched
) -> None:
    timeout_s = 4 * CALL_TIMEOUT_S  # so that what a busy machine adds does not count as another failure
    a = await join(server.url, "a", timeout_s=timeout_s)
    server.pause()
    calls = [asyncio.create_task(a.index.acquire(new_addresses(4))) for _ in range(50)]
    await asyncio.sleep(1.5 * timeout_s)
    server.resume()
    await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
    assert [state for state, _ in a.said] == [IndexState.JOINED]


async def test_a_publication_that_did_not_get_through_is_made_up_for_before_the_lease_is_free(
    server: RedisServer, join: JoinWatched
) -> None:
    a, b = await join(server.url, "a"), await join(server.url, "b")
    (address,) = new_addresses(1)
    await a.index.acquire([address])
    waiting = asyncio.create_task(b.index.wait_published(address, 5.0))
    await asyncio.sleep(0.1)
    server.pause()
    await a.index.publish(grids([address]))  # into the void, for one bound
    server.resume()
    places = await waiting
    assert [place.replica_id for place in places] == ["a"]


async def test_a_server_out_of_memory_is_left_alone_until_it_takes_writes_again(
    server: RedisServer, join: JoinWatched
) -> None:
    a = await join(server.url, "a")
    with server.client() as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1")
        await a.until(IndexState.ALONE)
        assert "memory" in a.said[-1][1]
        assert await slowest_empty_answer(a) < CALL_TIMEOUT_S
        admin.config_set("maxmemory", "0")
    await a.until(IndexState.JOINED)


async def test_a_server_that_became_a_replica_is_left_alone_until_it_takes_writes_again(
    server: RedisServer, join: JoinWatched
) -> None:
    a = await join(server.url, "a")
    with server.client() as admin:
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        await a.until(IndexState.ALONE)
        assert "READONLY" in a.said[-1][1] or "read only" in a.said[-1][1]
        assert await slowest_empty_answer(a) < CALL_TIMEOUT_S
        admin.execute_command("REPLICAOF", "NO", "ONE")
    await a.until(IndexState.JOINED)


async def is_loading(server: RedisServer) -> bool:
    try:
        with server.client() as client:
            await asyncio.to_thread(client.ping)
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        pass  # not there yet
    return False


async def test_a_server_that_is_loading_is_waited_for(join: JoinWatched) -> None:
    # Loads 60 keys of 256 KiB at 50 ms each, and answers LOADING after each 2 MiB.
    with redis_server("--key-load-delay", "50000", "--rdbcompression", "no") as server:
        with server.client() as admin:
            admin.mset({f"key{n}": bytes(1 << 18) for n in range(60)})
            admin.save()
        a = await join(server.url, "a")
        server.kill()
        await a.until(IndexState.ALONE)
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await soon(lambda: is_loading(server))
        assert await slowest_empty_answer(a) < CALL_TIMEOUT_S
        await starting
        await a.until(IndexState.JOINED)


async def test_redis_that_is_not_there_at_the_start_is_joined_when_it_comes(join: JoinWatched) -> None:
    server = RedisServer()
    a = await join(server.url, "a")
    assert a.index.state is IndexState.ALONE
    assert [state for state, _ in a.said] == [IndexState.ALONE]
    assert await slowest_empty_answer(a) < CALL_TIMEOUT_S
    try:
        server.start()
        await a.until(IndexState.JOINED)
    finally:
        server.stop()


async def test_a_replica_cut_off_from_redis_goes_on_alone_and_the_others_without_it(
    server: RedisServer, join: JoinWatched
) -> None:
    proxy = await TcpProxy(server.port).start()
    a, b = await join(server.url, "a"), await join(f"redis://127.0.0.1:{proxy.port}", "b")
    held = new_addresses(3)
    await b.hold(held)
    assert len(await a.index.locate(held)) == 3
    proxy.cut()
    await b.until(IndexState.ALONE)
    assert await slowest_empty_answer(b) < CALL_TIMEOUT_S

    async def gone() -> bool:
        return await a.index.locate(held) == {}

    await soon(gone)
    assert a.index.state is IndexState.JOINED
    proxy.mend()
    await b.until(IndexState.JOINED)

    async def back() -> bool:
        return len(await a.index.locate(held)) == 3

    await soon(back)
    await proxy.stop()


async def test_a_cluster_that_loses_a_master_is_joined_again_after_its_failover(join: JoinWatched) -> None:
    with redis_cluster(masters=3, replicas=3) as cluster:
        a, b = await join(cluster.url, "a"), await join(cluster.url, "b")
        held = new_addresses(200)
        await a.hold(held)
        assert len(await b.index.locate(held)) == 200
        cluster.nodes[1].kill()
        began = time.monotonic()

        async def recovered() -> bool:
            found = await b.index.locate(held)
            return len(found) == 200 and b.index.state is IndexState.JOINED

        await asyncio.sleep(0.1)
        assert await b.index.locate(held) == {} or b.index.state is IndexState.JOINED
        await soon(recovered)
        assert time.monotonic() - began > 0.5  # the cluster really had to fail over


async def test_two_hundred_calls_at_once_are_served_without_a_failure(
    server: RedisServer, join: JoinWatched
) -> None:
    a = await join(
        server.url, "a", timeout_s=20.0
    )  # all wait for one thread, which a busy machine may hold up
    batches = [new_addresses(8) for _ in range(200)]
    answers = await asyncio.gather(*(a.index.acquire(batch) for batch in batches))
    assert all(answer.granted == set(batch) for answer, batch in zip(answers, batches, strict=True))
    with server.client() as admin:
        leases = sum(1 for _ in admin.scan_iter("*:lease"))
    assert leases == 1600
