"""Bad days of the index in Redis: every one ends as `alone`, in bounded time, and the way back is found by itself."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from bench.redis_servers import RedisServer, redis_cluster, redis_server
from encoder_contract.digest import content_digest
from encoder_service.config import ConfigError
from encoder_service.index import IndexState, RedisIndex, RedisSettings, Replica, Tier, Watchers
from encoder_service.index.breaker import FAILURES_TO_OPEN, LAST_PROBE_S, Breaker
from encoder_service.index.leases import Leases
from encoder_service.index.link import Target
from encoder_service.index.republish import ADDRESSES_PER_S, BATCH_ADDRESSES, Republisher
from encoder_service.index.schema import Keys
from tests.cable import Cable

numbers = itertools.count()
CALL_TIMEOUT_S = 0.1
# What a busy machine may add to a bound before a test calls it broken.
SLACK_S = 0.5


def new_addresses(count: int) -> list[bytes]:
    return [content_digest(b"%d" % next(numbers)) for _ in range(count)]


@dataclass
class Watched:
    """A replica, what it holds, and what it said about itself."""

    index: RedisIndex
    held: list[tuple[bytes, Tier]]
    said: list[tuple[IndexState, str]] = field(default_factory=list)

    async def hold(self, addresses: list[bytes]) -> None:
        self.held += [(address, Tier.HOST) for address in addresses]
        await self.index.publish(addresses, Tier.HOST)

    async def until(self, state: IndexState, within_s: float = 8.0) -> None:
        await soon(lambda: self.index.state is state, within_s)


Join = Callable[..., Awaitable[Watched]]


async def soon(holds: Callable[[], bool | Awaitable[bool]], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    joined: list[Watched] = []

    async def join(url: str, name: str, epoch: int = 1, model: bytes = b"m" * 32) -> Watched:
        watched = Watched(None, [])  # type: ignore[arg-type]
        settings = RedisSettings(
            url=url,
            namespace="bad-days",
            call_timeout_ms=int(CALL_TIMEOUT_S * 1000),
            heartbeat_ms=100,
            replica_ttl_ms=700,
        )
        watched.index = RedisIndex(
            settings,
            held=lambda: iter(watched.held),
            load=lambda: 0.0,
            watchers=Watchers(on_state=lambda state, reason: watched.said.append((state, reason))),
        )
        joined.append(watched)
        await watched.index.register(Replica(name, epoch, f"{name}:1", model, b"p" * 32))
        return watched

    yield join
    for watched in joined:
        await watched.index.close()


async def answers_as_empty(replica: Watched) -> float:
    """Make every call once; each must answer as an empty index; return the seconds of the slowest."""
    index, (a, b) = replica.index, new_addresses(2)
    slowest = 0.0
    for call, expected in (
        (index.locate([a]), {}),
        (index.renew([b]), {b}),
        (index.publish([a], Tier.HOST), None),
        (index.retract([a]), None),
        (index.release([b]), None),
        (index.wait_published(a, 5.0), ()),
        (index.put_source(b"key", b"image"), False),
        (index.get_source(b"key"), None),
    ):
        began = time.monotonic()
        assert await call == expected
        slowest = max(slowest, time.monotonic() - began)
    assert (await index.acquire([a, b])).granted == {a, b}
    return slowest


async def test_redis_killed_and_back_empty_is_told_again_what_each_replica_holds(
    server: RedisServer, join: Join
) -> None:
    a, b = await join(server.url, "a"), await join(server.url, "b")
    of_a, of_b = new_addresses(150), new_addresses(3)
    await a.hold(of_a)
    await b.hold(of_b)
    working = new_addresses(2)
    await a.index.acquire(working)
    waiting = asyncio.create_task(b.index.wait_published(working[0], 30.0))
    await asyncio.sleep(0.1)
    server.kill()
    for replica in (a, b):
        await replica.until(IndexState.ALONE)
    assert await asyncio.wait_for(waiting, 0.1) == ()
    for replica in (a, b):
        assert await answers_as_empty(replica) < CALL_TIMEOUT_S
        assert replica.index.peers() == ()
    server.start()
    for replica in (a, b):
        await replica.until(IndexState.JOINED)

    async def told_again() -> bool:
        return len(await b.index.locate(of_a)) == 150 and len(await a.index.locate(of_b)) == 3

    await soon(told_again)

    def lease_is_back() -> bool:
        with server.client() as admin:
            return all(admin.exists(Keys("bad-days").lease(address)) for address in working)

    await soon(lease_is_back)
    waiting = asyncio.create_task(b.index.wait_published(working[0], 30.0))
    await asyncio.sleep(0.1)
    await a.hold(working)
    assert [place.replica_id for place in await asyncio.wait_for(waiting, 1.0)] == ["a"]
    assert [state for state, _ in a.said] == [IndexState.JOINED, IndexState.ALONE, IndexState.JOINED]


async def test_redis_that_answers_nothing_costs_three_bounds_and_then_nothing(
    server: RedisServer, join: Join
) -> None:
    a, b = await join(server.url, "a"), await join(server.url, "b")
    held = new_addresses(40)
    await a.hold(held)
    server.pause()
    began = time.monotonic()
    waiting = asyncio.create_task(b.index.wait_published(new_addresses(1)[0], 10.0))
    while b.index.state is IndexState.JOINED:
        called = time.monotonic()
        assert (await b.index.acquire(held)).granted == frozenset(held)
        assert time.monotonic() - called < CALL_TIMEOUT_S + SLACK_S
    assert time.monotonic() - began < FAILURES_TO_OPEN * CALL_TIMEOUT_S + SLACK_S
    assert await asyncio.wait_for(waiting, SLACK_S) == ()
    assert await answers_as_empty(b) < 0.05
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


async def test_one_slow_moment_does_not_send_a_busy_replica_alone(server: RedisServer, join: Join) -> None:
    a = await join(server.url, "a")
    server.pause()
    calls = [asyncio.create_task(a.index.acquire(new_addresses(4))) for _ in range(50)]
    await asyncio.sleep(1.5 * CALL_TIMEOUT_S)
    server.resume()
    await asyncio.wait_for(asyncio.gather(*calls), SLACK_S)
    assert [state for state, _ in a.said] == [IndexState.JOINED]


async def test_a_publication_that_did_not_get_through_is_made_up_for_before_the_lease_is_free(
    server: RedisServer, join: Join
) -> None:
    a, b = await join(server.url, "a"), await join(server.url, "b")
    (address,) = new_addresses(1)
    await a.index.acquire([address])
    waiting = asyncio.create_task(b.index.wait_published(address, 5.0))
    await asyncio.sleep(0.1)
    server.pause()
    await a.index.publish([address], Tier.HOST)  # into the void, for one bound
    server.resume()
    places = await waiting
    assert [place.replica_id for place in places] == ["a"]


async def test_a_server_out_of_memory_is_left_alone_until_it_takes_writes_again(
    server: RedisServer, join: Join
) -> None:
    a = await join(server.url, "a")
    with server.client() as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1")
        await a.until(IndexState.ALONE)
        assert "memory" in a.said[-1][1]
        assert await answers_as_empty(a) < CALL_TIMEOUT_S
        admin.config_set("maxmemory", "0")
    await a.until(IndexState.JOINED)


async def test_a_server_that_became_a_replica_is_left_alone_until_it_takes_writes_again(
    server: RedisServer, join: Join
) -> None:
    a = await join(server.url, "a")
    with server.client() as admin:
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        await a.until(IndexState.ALONE)
        assert "READONLY" in a.said[-1][1] or "read only" in a.said[-1][1]
        assert await answers_as_empty(a) < CALL_TIMEOUT_S
        admin.execute_command("REPLICAOF", "NO", "ONE")
    await a.until(IndexState.JOINED)


async def test_a_server_that_is_loading_is_waited_for(join: Join) -> None:
    # Loads 300 keys at 5 ms each, and answers LOADING meanwhile.
    slow_load = ("--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024")
    with redis_server(*slow_load) as server:
        with server.client() as admin:
            admin.mset({f"key{n}": bytes(100) for n in range(300)})
            admin.save()
        a = await join(server.url, "a")
        server.kill()
        await a.until(IndexState.ALONE)
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await asyncio.sleep(0.3)
        assert await answers_as_empty(a) < CALL_TIMEOUT_S
        await starting
        await a.until(IndexState.JOINED)


async def test_redis_that_is_not_there_at_the_start_is_joined_when_it_comes(join: Join) -> None:
    server = RedisServer()
    a = await join(server.url, "a")
    assert a.index.state is IndexState.ALONE
    assert [state for state, _ in a.said] == [IndexState.ALONE]
    assert await answers_as_empty(a) < CALL_TIMEOUT_S
    try:
        server.start()
        await a.until(IndexState.JOINED)
    finally:
        server.stop()


async def test_a_replica_cut_off_from_redis_goes_on_alone_and_the_others_without_it(
    server: RedisServer, join: Join
) -> None:
    cable = await Cable(server.port).lay()
    a, b = await join(server.url, "a"), await join(f"redis://127.0.0.1:{cable.port}", "b")
    held = new_addresses(3)
    await b.hold(held)
    assert len(await a.index.locate(held)) == 3
    cable.cut()
    await b.until(IndexState.ALONE)
    assert await answers_as_empty(b) < CALL_TIMEOUT_S

    async def gone() -> bool:
        return await a.index.locate(held) == {}

    await soon(gone)
    assert a.index.state is IndexState.JOINED
    cable.mend()
    await b.until(IndexState.JOINED)

    async def back() -> bool:
        return len(await a.index.locate(held)) == 3

    await soon(back)
    await cable.remove()


async def test_a_cluster_that_loses_a_master_is_joined_again_after_its_failover(join: Join) -> None:
    with redis_cluster(masters=3, replicas=3) as cluster:
        a, b = await join(cluster.url, "a"), await join(cluster.url, "b")
        held = new_addresses(200)
        await a.hold(held)
        assert len(await b.index.locate(held)) == 200
        cluster.nodes[1].kill()
        began = time.monotonic()

        async def recovered() -> bool:
            called = time.monotonic()
            found = await b.index.locate(held)
            assert time.monotonic() - called < CALL_TIMEOUT_S + SLACK_S
            return len(found) == 200 and b.index.state is IndexState.JOINED

        await asyncio.sleep(0.1)
        assert await b.index.locate(held) == {} or b.index.state is IndexState.JOINED
        await soon(recovered, within_s=15.0)
        assert time.monotonic() - began > 0.5  # the cluster really had to fail over


async def test_a_second_process_under_the_same_name_takes_over_and_the_first_says_so(
    server: RedisServer, join: Join
) -> None:
    first = await join(server.url, "a", epoch=1)
    await join(server.url, "a", epoch=2)
    await first.until(IndexState.ALONE)
    assert "later start" in first.said[-1][1]


async def test_another_model_that_took_the_namespace_during_an_outage_keeps_us_alone(
    server: RedisServer, join: Join
) -> None:
    cable = await Cable(server.port).lay()
    a = await join(f"redis://127.0.0.1:{cable.port}", "a")
    cable.cut()
    await a.until(IndexState.ALONE)
    await asyncio.sleep(0.8)  # until a is off the roll
    await join(server.url, "b", model=b"other" * 6 + b"xx")
    cable.mend()
    await soon(lambda: "another model" in a.said[-1][1])
    assert a.index.state is IndexState.ALONE
    await cable.remove()


async def test_two_hundred_calls_at_once_are_served_without_a_failure(
    server: RedisServer, join: Join
) -> None:
    a = await join(server.url, "a")
    batches = [new_addresses(8) for _ in range(200)]
    answers = await asyncio.gather(*(a.index.acquire(batch) for batch in batches))
    assert all(answer.granted == set(batch) for answer, batch in zip(answers, batches, strict=True))
    with server.client() as admin:
        leases = sum(1 for _ in admin.scan_iter("*:lease"))
    assert leases == 1600


def test_a_breaker_counts_overlapping_failures_once_and_opens_on_a_refusal() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    breaker.close()
    now = 10.0
    for _ in range(50):
        breaker.failed(9.9)
    assert not breaker.is_open
    now = 11.0
    assert not breaker.failed(10.5)
    now = 12.0
    assert breaker.failed(11.5)
    breaker.close()
    assert breaker.failed(12.0, refused=True)
    breaker.succeeded()
    assert breaker.is_open


def test_probes_come_more_and_more_seldom_and_never_all_at_once() -> None:
    for uniform, share in ((min, 0.5), (max, 1.5)):
        breaker = Breaker(uniform=uniform)
        delays = [breaker.probe_delay_s() for _ in range(10)]
        assert delays[:2] == [0.25 * share, 0.5 * share]
        assert delays[-1] == LAST_PROBE_S * share


def test_leases_come_due_in_time_and_one_that_its_holder_forgot_is_not_renewed_for_ever() -> None:
    now = 0.0
    leases = Leases(renew_s=3.0, clock=lambda: now)
    leases.add([b"a"])
    assert leases.due() == []
    now = 3.0
    assert leases.due() == [b"a"]
    leases.renewed([b"a", b"ended meanwhile"])
    assert leases.due() == []
    leases.hasten()
    assert leases.due() == [b"a"]
    now = 299.0
    leases.add([b"a", b"b"])
    now = 302.0
    assert leases.due() == [b"b"]
    assert leases.all() == [b"b"]


async def test_republishing_is_paced_and_complete() -> None:
    held = [(address, Tier(1 + n % 2)) for n, address in enumerate(new_addresses(400))]
    told: list[tuple[bytes, Tier]] = []
    largest = 0

    async def publish(addresses: object, tier: Tier) -> bool:
        nonlocal largest
        largest = max(largest, len(addresses))  # type: ignore[arg-type]
        told.extend((address, tier) for address in addresses)  # type: ignore[attr-defined]
        return True

    republisher = Republisher(lambda: held, publish, ttl_s=3600.0)
    running = asyncio.create_task(republisher.run())
    republisher.forgotten()
    began = time.monotonic()
    await soon(lambda: len(told) == 400)
    assert time.monotonic() - began > (400 - BATCH_ADDRESSES) / ADDRESSES_PER_S
    assert sorted(told) == sorted(held)
    assert largest <= BATCH_ADDRESSES
    running.cancel()


async def test_a_password_is_taken_from_the_url_and_a_wrong_one_keeps_us_alone(join: Join) -> None:
    with redis_server("--requirepass", "secret") as server:
        right = await join(f"redis://:secret@127.0.0.1:{server.port}/0", "a")
        wrong = await join(f"redis://:guess@127.0.0.1:{server.port}/0", "b")
        assert right.index.state is IndexState.JOINED
        assert wrong.index.state is IndexState.ALONE
        assert "password" in wrong.said[-1][1]


def test_urls_of_a_server_and_of_a_cluster_are_told_apart() -> None:
    one = Target("rediss://user:secret@redis:6380/0?ssl_cert_reqs=required")
    assert not one.is_cluster
    assert one.urls == ["rediss://user:secret@redis:6380/0?ssl_cert_reqs=required"]
    for url in ("redis+cluster://:pw@a:1,b:2", "redis://:pw@a:1,b:2?cluster=true"):
        cluster = Target(url)
        assert cluster.is_cluster
        assert cluster.urls == ["redis://:pw@a:1", "redis://:pw@b:2"]
        assert cluster.node_url("::1", 7) == "redis://:pw@[::1]:7"


@pytest.mark.parametrize("url", ["", "redis", "http://redis:6379", "redis+sentinel://redis:1", "redis://"])
def test_a_url_of_something_else_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://"):
        Target(url)
