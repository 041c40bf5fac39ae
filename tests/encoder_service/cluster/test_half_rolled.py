"""A fleet in the middle of an update: replicas of earlier commits, and then a newer Redis, beside today's replicas."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis.schema import Keys, fingerprint, namespace, packed, records, replica_token
from encoder_service.cluster.redis_cluster import RedisCluster
from testing.holding import cluster_of
from testing.redis_servers import RedisServer, redis_binary
from tests.index_replicas import (
    GRID,
    MODEL,
    TTL_MS,
    as_replica,
    grids,
    new_addresses,
    publish,
    redis_settings,
)
from tests.waiting import PATIENCE_S, soon

SPACE = namespace("encoder", MODEL)
SCRIPTS = Path(__file__).with_name("earlier")  # as earlier commits had them
JoinToday = Callable[[str], Awaitable[RedisCluster]]


class EarlierReplica:
    """A replica of an earlier commit, by its scripts; `layout` is the version of its keys."""

    def __init__(self, client: Redis, layout: int, name: str = "earlier") -> None:
        self._client = client
        self._layout = layout
        self._keys = Keys(SPACE.rpartition(":")[0] + f":{layout}")
        self._replica = as_replica(name)
        self.token = replica_token(name, self._replica.epoch)

    def _run(self, script: str, keys: list[bytes], *arguments: Any) -> Any:
        source = (SCRIPTS / "records.lua").read_bytes() + (SCRIPTS / f"{script}.lua").read_bytes()
        return self._client.eval(source, len(keys), *keys, *arguments)  # type: ignore[no-untyped-call]

    def beat(self, verb: str = "beat") -> list[str]:
        """Send a heartbeat; return the replicas that it lists."""
        ours = self._replica
        who = [ours.replica_id, ours.epoch, fingerprint(ours)]
        if self._layout == 3:
            reply = self._run("heartbeat_3", [self._keys.replicas], verb, *who, 0, ours.endpoint, TTL_MS)
        else:
            reply = self._run("heartbeat_4", [*self._keys.membership], verb, *who, ours.endpoint, TTL_MS, b"")
        assert reply[0] == b"ok", reply
        return [name.decode() for name in reply[-1][::2]]

    def _pair(self, address: bytes) -> list[bytes]:
        return [self._keys.location(address), self._keys.lease(address)]

    def acquire(self, address: bytes) -> Any:
        """Return 1 if it got the lease, a location, or a list with the token of the holder of the lease."""
        [reply] = self._run("acquire", self._pair(address), self.token, TTL_MS, b"", b"")
        return reply

    def publish(self, address: bytes) -> None:
        self._run("publish", self._pair(address), self.token, TTL_MS, b"PUBLISH", packed(GRID))


@pytest.fixture
def client(redis: RedisServer) -> Iterator[Redis]:
    with redis.client() as connected:
        yield connected


@pytest.fixture
async def join_today(redis: RedisServer) -> AsyncIterator[JoinToday]:
    async with AsyncExitStack() as stack:

        async def join(name: str) -> RedisCluster:
            cluster = cluster_of(redis_settings(redis.url, SPACE))
            await cluster.join(as_replica(name))
            stack.push_async_callback(cluster.close)
            return cluster

        yield join


async def test_replicas_with_the_earlier_heartbeat_share_the_index_with_ours(
    client: Redis, join_today: JoinToday
) -> None:
    earlier = EarlierReplica(client, layout=4)
    earlier.beat("join")
    today = await join_today("today")
    await soon(lambda: [peer.replica_id for peer in today.index.peers()] == ["earlier"])
    assert sorted(earlier.beat()) == ["earlier", "today"]

    theirs, ours = new_addresses(2)
    assert earlier.acquire(theirs) == 1
    assert (await today.index.acquire([theirs])).granted == frozenset()
    earlier.publish(theirs)
    [place] = (await today.index.locate([theirs]))[theirs]
    assert place.replica_id == "earlier"

    assert (await today.index.acquire([ours])).granted == {ours}
    token = replica_token("today", 1)
    assert earlier.acquire(ours) == [token]
    await publish(today, grids([ours]))
    assert [record.token for record in records(earlier.acquire(ours))] == [token]

    earlier.beat("leave")
    await soon(lambda: today.index.peers() == ())
    assert (await today.index.acquire([theirs])).granted == {theirs}


async def test_replicas_with_the_earlier_keys_work_beside_ours_until_they_are_gone(
    client: Redis, join_today: JoinToday
) -> None:
    earlier = [EarlierReplica(client, layout=3, name=name) for name in ("earlier", "earlier-2")]
    for each in earlier:
        each.beat("join")
    today, second = await join_today("today"), await join_today("today-2")
    await soon(lambda: [peer.replica_id for peer in today.index.peers()] == ["today-2"])
    assert earlier[0].beat() == ["earlier-2"], "its list has the others, of its own kind"

    [address] = new_addresses(1)  # each kind encodes it once
    assert earlier[0].acquire(address) == 1
    assert earlier[1].acquire(address) == [earlier[0].token]
    assert (await today.index.acquire([address])).granted == {address}
    assert (await second.index.acquire([address])).granted == frozenset()
    earlier[0].publish(address)
    await publish(today, grids([address]))
    assert [record.token for record in records(earlier[1].acquire(address))] == [earlier[0].token]
    [place] = (await second.index.locate([address]))[address]
    assert place.replica_id == "today"

    for each in earlier:
        each.beat("leave")
    assert {today.index.state, second.index.state} == {IndexState.JOINED}
    assert await second.index.locate([address])


@pytest.mark.skipif("TEST_REDIS_SERVER" not in os.environ, reason="needs a newer Redis: TEST_REDIS_SERVER")
async def test_replicas_go_on_when_redis_is_replaced_by_a_newer_one(
    redis: RedisServer, join_today: JoinToday, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = redis_binary()
    monkeypatch.delenv("TEST_REDIS_SERVER")
    redis.kill()
    redis.binary = redis_binary()  # that of the project's packages: the oldest that it supports
    redis.start()
    a, b = await join_today("a"), await join_today("b")
    await _hands_over(a, b)
    redis.kill()
    redis.binary = newer
    redis.start()
    await soon(lambda: _lists(redis, 2) and len(a.index.peers()) == len(b.index.peers()) == 1)
    await _hands_over(a, b)


def _lists(redis: RedisServer, replicas: int) -> bool:
    with redis.client() as client:
        return client.hlen(Keys(SPACE).replicas) == replicas


async def _hands_over(a: RedisCluster, b: RedisCluster) -> None:
    """Check that `b`, which waits for an image that `a` encodes, learns of its publication."""
    [address] = new_addresses(1)
    assert (await a.acquire([address])).granted == {address}
    assert (await b.acquire([address])).granted == frozenset()
    await publish(a, grids([address]))
    [place] = await b.wait_published(address, PATIENCE_S)
    assert place.replica_id == "a"
