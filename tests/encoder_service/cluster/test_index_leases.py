"""Leases, and waiting for images that other replicas encode, over Redis and over Redis Cluster."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from encoder_service.cluster.cluster import Location
from encoder_service.cluster.waiting import REREAD_S
from testing.holding import cluster_of
from testing.redis_servers import RedisServer
from testing.tcp_proxy import TcpProxy
from tests.index_replicas import (
    GRID,
    NAMESPACE,
    SHORT_TTL_MS,
    TTL_MS,
    Join,
    grids,
    joined,
    new_addresses,
    numbers,
    publish,
    redis_settings,
    release,
)
from tests.waiting import PATIENCE_S, soon


async def test_an_address_is_granted_to_one_replica_only(join: Join) -> None:
    replicas = [await join(name) for name in "abcd"]
    addresses = new_addresses(32)
    answers = await asyncio.gather(*(replica.acquire(addresses) for replica in replicas))
    granted = [address for answer in answers for address in answer.granted]
    assert sorted(granted) == sorted(addresses)
    assert all(answer.located == {} for answer in answers)


async def test_acquiring_a_held_lease_grants_it_again(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(3)
    assert (await a.acquire(addresses)).granted == frozenset(addresses)
    assert (await a.acquire(addresses)).granted == frozenset(addresses)
    assert (await b.acquire(addresses)).granted == frozenset()


async def test_an_image_of_a_peer_is_located_instead_of_granted(join: Join) -> None:
    a, b = await join("a"), await join("b")
    held, free = new_addresses(2), new_addresses(2)
    await a.acquire(held)
    await publish(a, grids(held))
    answer = await b.acquire(held + free)
    assert answer.granted == frozenset(free)
    assert set(answer.located) == set(held)


async def test_an_address_held_only_by_excluded_replicas_is_granted(join: Join) -> None:
    a, b = await join("a"), await join("b")
    (address,) = new_addresses(1)
    await publish(a, grids([address]))
    await b.index.locate([address])
    assert (await b.acquire([address], excluding={"a"})).granted == {address}


async def test_a_replica_is_granted_an_address_that_it_published_and_lost(join: Join) -> None:
    a = await join("a")
    (address,) = new_addresses(1)
    await publish(a, grids([address]))
    assert (await a.acquire([address])).granted == {address}


async def test_a_released_lease_goes_to_the_next_caller(join: Join) -> None:
    a, b = await join("a"), await join("b")
    addresses = new_addresses(2)
    await a.acquire(addresses)
    await release(b, addresses)
    assert (await b.acquire(addresses)).granted == frozenset()
    await release(a, addresses)
    assert (await b.acquire(addresses)).granted == frozenset(addresses)


async def test_renewing_keeps_own_takes_free_and_leaves_other_leases(join: Join) -> None:
    a, b = await join("a"), await join("b")
    ours, free, theirs = new_addresses(3)
    await a.acquire([ours])
    await b.acquire([theirs])
    assert await a.index.renew([ours, free, theirs]) == {ours, free}


async def test_a_lease_lost_to_another_replica_is_acquired_anew(join: Join) -> None:
    a, b = await join("a"), await join("b")
    (address,) = new_addresses(1)
    await a.acquire([address])
    await a.index.release([address])  # like a lease that expired while Redis was unreachable
    assert (await b.acquire([address])).granted == {address}
    a.on_entries_lost()
    await a.on_heartbeat()
    assert (await a.acquire([address])).granted == frozenset()


async def test_a_live_holder_keeps_its_lease_beyond_the_time_to_live(join: Join) -> None:
    ttl_ms = 6 * SHORT_TTL_MS  # renewed three times within it, so that a short stall does not matter
    a, b = await join("a", lease_ttl_ms=ttl_ms), await join("b")
    (address,) = new_addresses(1)
    await a.acquire([address])
    await asyncio.sleep(1.5 * ttl_ms / 1000)
    assert (await b.acquire([address])).granted == frozenset()


@pytest.mark.parametrize("lease_ttl_ms", [SHORT_TTL_MS, int(2000 * PATIENCE_S)])
async def test_the_lease_of_a_dead_holder_ends_and_a_waiter_takes_over(join: Join, lease_ttl_ms: int) -> None:
    # Only the holder dies: a stall of a busy machine must end neither waiter, nor the lease that one of them takes.
    a = await join("a", lease_ttl_ms=lease_ttl_ms, replica_ttl_ms=SHORT_TTL_MS)
    b, c = await join("b"), await join("c")
    (address,) = new_addresses(1)
    await a.acquire([address])
    waiting = [asyncio.create_task(index.wait_published(address, 2 * PATIENCE_S)) for index in (b, c)]
    await asyncio.sleep(0.05)
    await a.close()
    async with asyncio.timeout(PATIENCE_S):  # half of the timeout, and of the longer lease
        assert await asyncio.gather(*waiting) == [(), ()]
    granted = [(await index.acquire([address])).granted for index in (b, c)]
    assert sorted(map(len, granted)) == [0, 1]


async def test_a_dead_replica_vanishes_from_locate_and_acquire(join: Join) -> None:
    a, b = [await join(name, replica_ttl_ms=SHORT_TTL_MS) for name in "ab"]
    addresses = new_addresses(3)
    await publish(a, grids(addresses))

    async def there() -> bool:
        return set(await b.index.locate(addresses)) == set(addresses)

    await soon(there)
    await a.close()

    async def gone() -> bool:
        return await b.index.locate(addresses) == {} and b.index.peers() == ()

    await soon(gone)
    assert (await b.acquire(addresses)).granted == frozenset(addresses)


async def test_a_waiter_gets_the_location_that_was_published(join: Join) -> None:
    a, b, c = await join("a"), await join("b"), await join("c")
    addresses = new_addresses(8)
    await a.acquire(addresses)
    waits = [
        asyncio.create_task(index.wait_published(x, 2 * PATIENCE_S)) for index in (b, c) for x in addresses
    ]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waits)
    await publish(a, grids(addresses))
    async with asyncio.timeout(PATIENCE_S):  # another test below checks the speed of notifications
        places = await asyncio.gather(*waits)
    assert places == [(Location("a", "a.example:50051", GRID),)] * 16


async def test_waiting_for_published_or_unleased_images_returns_at_once(join: Join) -> None:
    a, b = await join("a"), await join("b")
    held, nobody = new_addresses(2)
    await publish(a, grids([held]))
    async with asyncio.timeout(PATIENCE_S):
        assert [place.replica_id for place in await b.wait_published(held, 2 * PATIENCE_S)] == ["a"]
        assert await b.wait_published(nobody, 2 * PATIENCE_S) == ()


async def test_waiters_ignore_excluded_replicas_and_get_other_locations(join: Join) -> None:
    a, b, c = await join("a"), await join("b"), await join("c")
    (address,) = new_addresses(1)
    await publish(a, grids([address]))
    assert (await b.acquire([address], {"a"})).granted == {address}
    waiting = asyncio.create_task(c.wait_published(address, 2 * PATIENCE_S, {"a"}))
    assert [place.replica_id for place in await c.wait_published(address, 2 * PATIENCE_S)] == ["a"]
    await asyncio.sleep(2 * REREAD_S)
    assert not waiting.done()
    await publish(b, grids([address]))
    assert [place.replica_id for place in await asyncio.wait_for(waiting, PATIENCE_S)] == ["b"]


async def test_waiting_ends_at_its_timeout_and_when_the_holder_gives_up(join: Join) -> None:
    a, b = await join("a"), await join("b")
    slow, given_up = new_addresses(2)
    await a.acquire([slow, given_up])
    assert await b.wait_published(slow, 0.1) == ()
    waiting = asyncio.create_task(b.wait_published(given_up, 2 * PATIENCE_S))
    await asyncio.sleep(0.05)
    await release(a, [given_up])
    assert await asyncio.wait_for(waiting, PATIENCE_S) == ()


@pytest.mark.parametrize("fixture", ["redis_url", "cluster_url"])
async def test_a_notification_wakes_a_waiter_long_before_the_next_reread(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.cluster.waiting.REREAD_S", 300.0)
    settings = redis_settings(request.getfixturevalue(fixture), f"notified{next(numbers)}")
    async with joined(cluster_of(settings), cluster_of(settings)) as (a, b):
        addresses = new_addresses(16)
        await a.acquire(addresses)
        waits = [asyncio.create_task(b.wait_published(address, 2 * PATIENCE_S)) for address in addresses]
        await asyncio.sleep(0.2)
        await publish(a, grids(addresses))
        async with asyncio.timeout(PATIENCE_S):
            assert all(await asyncio.gather(*waits))


async def test_a_lease_that_is_released_while_it_is_renewed_goes_to_the_next_caller(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis gets the release before the renewal, which then creates the lease again."""
    settings = replace(redis_settings(redis.url, NAMESPACE), heartbeat_ms=TTL_MS)
    a, b = cluster_of(settings), cluster_of(settings)
    renew = a.index.renew

    async def renew_late(addresses: Sequence[bytes]) -> frozenset[bytes]:
        await release(a, addresses)
        renewed = await renew(addresses)
        assert (await b.acquire(addresses)).granted == frozenset()
        return renewed

    monkeypatch.setattr(a.index, "renew", renew_late)
    async with joined(a, b):
        (address,) = new_addresses(1)
        await a.acquire([address])
        a.leases.mark_all_due()
        await a.leases.renew()
        assert (await b.acquire([address])).granted == {address}


async def test_a_lease_that_is_released_during_an_outage_is_released_after_it(redis: RedisServer) -> None:
    """Leases live for minutes, and a live replica keeps its own: nobody else could encode the image."""
    proxy = await TcpProxy(redis.port).start()
    settings = replace(redis_settings(redis.url, NAMESPACE), lease_ttl_ms=10 * TTL_MS)
    through_proxy = cluster_of(replace(settings, url=f"redis://127.0.0.1:{proxy.port}"))
    async with joined(through_proxy, cluster_of(settings)) as (a, b):
        (address,) = new_addresses(1)
        assert (await a.acquire([address])).granted == {address}
        proxy.cut()
        await release(a, [address])
        assert (await b.acquire([address])).granted == frozenset()
        proxy.mend()

        async def granted() -> bool:
            return (await b.acquire([address])).granted == {address}

        await soon(granted, TTL_MS / 1000)
    await proxy.stop()
