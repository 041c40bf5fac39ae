"""The script of heartbeats: who learns of a change of the list, and how long the list lives."""

from collections.abc import AsyncIterator

import pytest

from encoder_contract.errors import ModelMismatchError
from encoder_service.cluster.redis.connection import RedisConnection, RedisUrl
from encoder_service.cluster.redis.schema import LOOKS, Keys, Membership
from testing.redis_servers import RedisServer
from tests.index_replicas import TTL_MS, as_replica

KEYS = Keys("heartbeats").membership
DAY_S = 86_400


@pytest.fixture
async def connection(redis: RedisServer) -> AsyncIterator[RedisConnection]:
    opened = await RedisConnection.open(RedisUrl(redis.url), 30)
    yield opened
    await opened.close()


def membership(name: str, model: bytes = b"m" * 32) -> Membership:
    return Membership(as_replica(name, model=model), KEYS, TTL_MS)


async def test_a_death_is_seen_by_all_although_a_refused_replica_found_it(
    redis: RedisServer, connection: RedisConnection
) -> None:
    a, dead, stranger = membership("a"), membership("dead"), membership("stranger", b"x" * 32)
    for each in (a, dead):
        await each.heartbeat(connection, "join")
    await a.heartbeat(connection, "beat")
    assert [peer.replica_id for peer in a.peers.values()] == ["dead"]
    with redis.client() as client:
        client.zadd(KEYS[1], {"dead": 1})
    with pytest.raises(ModelMismatchError):
        await stranger.heartbeat(connection, "join")
    assert await a.heartbeat(connection, "beat")
    assert not a.peers


async def test_heartbeats_renew_an_unchanged_list(redis: RedisServer, connection: RedisConnection) -> None:
    a = membership("a")
    await a.heartbeat(connection, "join")
    with redis.client() as client:
        now_us = int(client.get(KEYS[2]))  # type: ignore[arg-type]
        client.set(KEYS[2], now_us - DAY_S * 500_000 - 1)  # as if half a day had passed
        for key in KEYS:
            client.expire(key, 60)
        assert await a.heartbeat(connection, "beat")
        assert all(client.ttl(key) > DAY_S / 2 for key in KEYS)  # type: ignore[operator]


async def test_a_large_fleet_notices_a_death_although_few_heartbeats_look_for_one(
    redis: RedisServer, connection: RedisConnection
) -> None:
    members = [membership(f"member-{number}") for number in range(5 * LOOKS)]
    for each in members:
        await each.heartbeat(connection, "join")
    for each in members:
        await each.heartbeat(connection, "beat")
    with redis.client() as client:
        calls = client.info("commandstats")["cmdstat_zrangebyscore"]["calls"]  # type: ignore[index]
        for each in members:
            assert await each.heartbeat(connection, "beat")
        looked = client.info("commandstats")["cmdstat_zrangebyscore"]["calls"] - calls  # type: ignore[index]
        assert 0 < looked < len(members), "each look has two of these calls"
        client.zadd(KEYS[1], {"member-0": 1})
    _, *living = members
    for _ in range(2):  # the first round finds it, the second tells everyone
        for each in living:
            await each.heartbeat(connection, "beat")
    assert all(peer.replica_id != "member-0" for each in living for peer in each.peers.values())
