"""The contract of an index, kept by memory, by Redis (installed and 6.2) and by a Redis Cluster alike."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from redis.exceptions import ResponseError

from bench.redis_servers import carried_binary, redis_cluster, redis_server
from encoder_contract.digest import content_digest
from encoder_contract.errors import InvalidRequestError, ModelMismatchError
from encoder_service.index import (
    Fleet,
    Index,
    IndexState,
    Location,
    MemoryIndex,
    RedisIndex,
    RedisSettings,
    Replica,
    Tier,
    namespace,
)

MODEL, PROCESSOR = b"m" * 32, b"p" * 32
LEASE_TTL_MS, REPLICA_TTL_MS, HEARTBEAT_MS = 800, 700, 100
numbers = itertools.count()

Join = Callable[..., Awaitable[Index]]


def new_addresses(count: int) -> list[bytes]:
    return [content_digest(str(next(numbers)).encode()) for _ in range(count)]


def as_replica(name: str, epoch: int = 1, model: bytes = MODEL, processor: bytes = PROCESSOR) -> Replica:
    return Replica(name, epoch, f"{name}.example:50051", model, processor)


def redis_settings(url: str, space: str) -> RedisSettings:
    return RedisSettings(
        url=url,
        namespace=space,
        # These tests are about answers, not about speed: a busy machine must not send them alone.
        call_timeout_ms=2000,
        heartbeat_ms=HEARTBEAT_MS,
        replica_ttl_ms=REPLICA_TTL_MS,
        lease_ttl_ms=LEASE_TTL_MS,
        max_source_bytes=1 << 20,
    )


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def old_redis_url() -> Iterator[str]:
    with redis_server(binary=carried_binary()) as server:
        yield server.url


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    with redis_cluster() as cluster:
        yield cluster.url


@pytest.fixture(params=["memory", "redis", "old_redis", "cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def join(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Join]:
    """Return a function that makes a replica join the fleet of this test."""
    url = "" if kind == "memory" else request.getfixturevalue(f"{kind}_url")
    shared, space = Fleet(max_source_bytes=1 << 20), namespace(f"test{next(numbers)}", MODEL)
    joined: list[Index] = []

    async def join(name: str, lease_ttl_ms: int = LEASE_TTL_MS, **identity: object) -> Index:
        index: Index = MemoryIndex(shared)
        if url:
            settings = replace(redis_settings(url, space), lease_ttl_ms=lease_ttl_ms)
            index = RedisIndex(settings, held=list, load=lambda: 0.5)
        joined.append(index)
        await index.register(as_replica(name, **identity))  # type: ignore[arg-type]
        return index

    yield join
    for index in joined:
        await index.close()


async def soon(holds: Callable[[], Awaitable[bool]], within_s: float = 3.0) -> None:
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)


async def test_what_one_publishes_all_others_locate_and_itself_does_not(join: Join) -> None:
    a, b, c = await join("a"), await join("b"), await join("c")
    held, other = new_addresses(40), new_addresses(1)
    await a.publish(held, Tier.HOST)
    expected = {address: (Location("a", "a.example:50051", Tier.HOST),) for address in held}
    assert await b.locate(held + other) == expected
    assert await c.locate(held + held) == expected
    assert await a.locate(held) == {}


async def test_publishing_again_moves_the_tier_and_retracting_ends_it(join: Join) -> None:
    a, b, c = await join("a"), await join("b"), await join("c")
    (address,) = new_addresses(1)
    await a.publish([address], Tier.DEVICE)
    await b.publish([address], Tier.HOST)
    await a.publish([address], Tier.HOST)
    assert {place.replica_id: place.tier for place in (await c.locate([address]))[address]} == {
        "a": Tier.HOST,
        "b": Tier.HOST,
    }
    await a.retract([address])
    assert [place.replica_id for place in (await c.locate([address]))[address]] == ["b"]
    await b.retract([address])
    assert await c.locate([address]) == {}


async def test_a_stale_location_can_be_retracted_by_whoever_found_out(join: Join) -> None:
    a, b = await join("a"), await join("b")
    (address,) = new_addresses(1)
    await a.publish([address], Tier.HOST)
    assert address in await b.locate([address])
    await b.retract([address], replica_id="a")
    assert await b.locate([address]) == {}
    await b.retract([address], replica_id="nobody")


async def test_an_address_is_granted_to_one_replica_only(join: Join) -> None:
    replicas = [await join(name) for name in "abcd"]
    addresses = new_addresses(32)
    answers = await asyncio.gather(*(replica.acquire(addresses) for replica in replicas))
    granted = [address for answer in answers for address in answer.granted]
    assert sorted(granted) == sorted(addresses)
    assert all(answer.located == {} for answer in answers)


async def test_asking_again_for_a_lease_grants_it_again(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(3)
    assert (await a.acquire(addresses)).granted == frozenset(addresses)
    assert (await a.acquire(addresses)).granted == frozenset(addresses)
    assert (await b.acquire(addresses)).granted == frozenset()


async def test_what_a_peer_holds_is_located_instead_of_granted(join: Join) -> None:
    a, b = await join("a"), await join("b")
    held, free = new_addresses(2), new_addresses(2)
    await a.acquire(held)
    await a.publish(held, Tier.HOST)
    answer = await b.acquire(held + free)
    assert answer.granted == frozenset(free)
    assert set(answer.located) == set(held)


async def test_a_location_that_just_failed_does_not_keep_one_from_encoding(join: Join) -> None:
    a, b = await join("a"), await join("b")
    (address,) = new_addresses(1)
    await a.publish([address], Tier.HOST)
    await b.locate([address])
    assert (await b.acquire([address], without={"a"})).granted == {address}


async def test_what_only_we_published_and_lost_is_granted_to_us(join: Join) -> None:
    a = await join("a")
    (address,) = new_addresses(1)
    await a.publish([address], Tier.HOST)
    assert (await a.acquire([address])).granted == {address}


async def test_a_released_lease_goes_to_the_next_who_asks(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(2)
    await a.acquire(addresses)
    await b.release(addresses)
    assert (await b.acquire(addresses)).granted == frozenset()
    await a.release(addresses)
    assert (await b.acquire(addresses)).granted == frozenset(addresses)


async def test_renewing_keeps_ours_takes_the_free_and_leaves_those_of_others(join: Join) -> None:
    a, b = await join("a"), await join("b")
    ours, free, theirs = new_addresses(3)
    await a.acquire([ours])
    await b.acquire([theirs])
    assert await a.renew([ours, free, theirs]) == {ours, free}


async def test_a_living_holder_keeps_its_lease_beyond_the_time_to_live(join: Join) -> None:
    a, b = await join("a"), await join("b")
    (address,) = new_addresses(1)
    await a.acquire([address])
    await asyncio.sleep(2 * LEASE_TTL_MS / 1000)
    assert (await b.acquire([address])).granted == frozenset()


@pytest.mark.parametrize("lease_ttl_ms", [LEASE_TTL_MS, 60_000])
async def test_the_lease_of_a_dead_holder_ends_and_one_waiter_takes_over(
    join: Join, lease_ttl_ms: int
) -> None:
    a, b, c = [await join(name, lease_ttl_ms=lease_ttl_ms) for name in "abc"]
    (address,) = new_addresses(1)
    await a.acquire([address])
    waiting = [asyncio.create_task(index.wait_published(address, 5.0)) for index in (b, c)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await a.close()
    assert await asyncio.gather(*waiting) == [(), ()]
    # Off the roll, the next heartbeat of the others, their next reread; and what a busy machine adds.
    assert time.monotonic() - began < (REPLICA_TTL_MS + HEARTBEAT_MS) / 1000 + 0.2 + 0.8
    granted = [(await index.acquire([address])).granted for index in (b, c)]
    assert sorted(map(len, granted)) == [0, 1]


async def test_a_dead_replica_vanishes_from_what_is_located_and_from_what_is_acquired(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(3)
    await a.publish(addresses, Tier.HOST)
    assert set(await b.locate(addresses)) == set(addresses)
    await a.close()

    async def gone() -> bool:
        return await b.locate(addresses) == {} and b.peers() == ()

    await soon(gone, within_s=(REPLICA_TTL_MS + 3 * HEARTBEAT_MS) / 1000 + 0.5)
    assert (await b.acquire(addresses)).granted == frozenset(addresses)


async def test_a_restarted_replica_is_not_asked_for_what_its_earlier_life_held(join: Join) -> None:
    a, b = await join("a", epoch=1), await join("b")
    addresses = new_addresses(2)
    await a.publish(addresses, Tier.HOST)
    assert set(await b.locate(addresses)) == set(addresses)
    await a.close()
    await join("a", epoch=2)

    async def renewed() -> bool:
        return [peer.epoch for peer in b.peers()] == [2]

    await soon(renewed)
    assert await b.locate(addresses) == {}


async def test_a_waiter_is_told_where_an_address_was_published(join: Join) -> None:
    a, b, c = await join("a"), await join("b"), await join("c")
    addresses = new_addresses(8)
    await a.acquire(addresses)
    waits = [asyncio.create_task(index.wait_published(x, 5.0)) for index in (b, c) for x in addresses]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waits)
    began = time.monotonic()
    await a.publish(addresses, Tier.DEVICE)
    places = await asyncio.gather(*waits)
    # Far below the reread interval would be flaky here; the hint's own speed has its test below.
    assert time.monotonic() - began < 1.0
    assert places == [(Location("a", "a.example:50051", Tier.DEVICE),)] * 16


async def test_waiting_for_what_is_there_or_for_nobody_returns_at_once(join: Join) -> None:
    a, b = await join("a"), await join("b")
    held, nobody = new_addresses(2)
    await a.publish([held], Tier.HOST)
    began = time.monotonic()
    assert [place.replica_id for place in await b.wait_published(held, 5.0)] == ["a"]
    assert await b.wait_published(nobody, 5.0) == ()
    assert time.monotonic() - began < 1.0


async def test_waiting_ends_at_its_timeout_and_when_the_holder_gives_up(join: Join) -> None:
    a, b = await join("a"), await join("b")
    slow, given_up = new_addresses(2)
    await a.acquire([slow, given_up])
    assert await b.wait_published(slow, 0.1) == ()
    waiting = asyncio.create_task(b.wait_published(given_up, 5.0))
    await asyncio.sleep(0.05)
    await a.release([given_up])
    assert await asyncio.wait_for(waiting, 1.0) == ()


async def test_replicas_see_each_other_until_one_leaves(join: Join) -> None:
    a, b = await join("a"), await join("b")

    async def both() -> bool:
        return [p.replica_id for p in a.peers()] == ["b"] and [p.replica_id for p in b.peers()] == ["a"]

    await soon(both)
    assert a.peers()[0].endpoint == "b.example:50051"
    held, working = new_addresses(2)
    await b.publish([held], Tier.HOST)
    await b.acquire([working])
    await b.leave()
    assert b.state is IndexState.LEFT

    async def alone() -> bool:
        return a.peers() == ()

    await soon(alone, within_s=1.0)  # a departure is not waited for as a death is
    assert await a.locate([held]) == {}
    assert (await a.acquire([working])).granted == {working}


async def test_one_that_left_is_answered_as_by_an_empty_index(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(2)
    await a.publish(addresses, Tier.HOST)
    await b.leave()
    assert await b.locate(addresses) == {}
    assert (await b.acquire(addresses)).granted == frozenset(addresses)
    assert await b.wait_published(addresses[0], 5.0) == ()
    assert not await b.put_source(b"key", b"image")
    await b.publish(addresses, Tier.HOST)
    assert [place.replica_id for place in (await a.acquire(addresses)).located.get(addresses[0], ())] == []


@pytest.mark.parametrize("other", [{"model": b"x" * 32}, {"processor": b"x" * 32}])
async def test_a_replica_with_another_model_is_refused(join: Join, other: dict[str, bytes]) -> None:
    a = await join("a")
    with pytest.raises(ModelMismatchError, match=r"a serves|b serves"):
        await join("b", **other)
    assert a.state is IndexState.JOINED
    assert a.peers() == ()


async def test_sources_are_shared_within_their_limit(join: Join) -> None:
    a, b = await join("a"), await join("b")
    key, too_large = b"digest" * 5 + b"salt", b"other"
    image = bytes(range(256)) * 1000
    assert await a.put_source(key, image)
    assert await b.get_source(key) == image
    assert not await a.put_source(too_large, bytes((1 << 20) + 1))
    assert await b.get_source(too_large) is None


async def test_an_empty_batch_is_no_call(join: Join) -> None:
    a = await join("a")
    assert await a.locate([]) == {}
    assert await a.acquire([]) == (await a.acquire([]))
    await a.publish([], Tier.HOST)
    assert await a.renew([]) == frozenset()


async def test_a_batch_larger_than_a_script_takes_is_split(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(700)
    assert len((await a.acquire(addresses)).granted) == 700
    await a.publish(addresses, Tier.HOST)
    assert len(await b.locate(addresses)) == 700


def test_a_replica_that_could_not_be_written_down_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        Replica("a", 1, "two words", MODEL, PROCESSOR)


@pytest.mark.parametrize("fixture", ["redis_url", "old_redis_url", "cluster_url"])
async def test_a_hint_wakes_a_waiter_long_before_the_next_reread(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.index.watch.REREAD_S", 30.0)
    settings = redis_settings(request.getfixturevalue(fixture), f"hints{next(numbers)}")
    a, b = (RedisIndex(settings, held=list, load=lambda: 0.0) for _ in range(2))
    try:
        await a.register(as_replica("a"))
        await b.register(as_replica("b"))
        addresses = new_addresses(16)
        await a.acquire(addresses)
        waits = [asyncio.create_task(b.wait_published(address, 10.0)) for address in addresses]
        await asyncio.sleep(0.2)
        await a.publish(addresses, Tier.HOST)
        async with asyncio.timeout(2.0):
            assert all(await asyncio.gather(*waits))
    finally:
        await a.close()
        await b.close()


async def test_a_single_server_url_to_a_cluster_node_says_so_and_stays_alone(cluster_url: str) -> None:
    reasons: list[str] = []
    node = "redis://" + cluster_url.removeprefix("redis+cluster://").split(",")[0]
    index = RedisIndex(redis_settings(node, "wrong"), held=list, load=lambda: 0.0)
    try:
        await index.register(as_replica("a"))
        # The roll may live on this very node; any batch of addresses does not.
        answer = await index.acquire(new_addresses(32))
        assert len(answer.granted) == 32
        assert index.state is IndexState.ALONE
    except ResponseError as escaped:
        reasons.append(str(escaped))
    finally:
        await index.close()
    assert reasons == []
