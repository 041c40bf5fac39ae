"""The identity of a replica in the index: its id, its model and its password."""

import asyncio

from encoder_service.cluster.cluster import IndexState
from testing.redis_servers import RedisServer, redis_server
from testing.tcp_proxy import TcpProxy
from tests.index_replicas import SHORT_TTL_MS, JoinWatched
from tests.waiting import soon


async def test_a_second_process_with_the_same_id_takes_over(
    redis: RedisServer, join_watched: JoinWatched
) -> None:
    first = await join_watched(redis.url, "a", epoch=1)
    await join_watched(redis.url, "a", epoch=2)
    await first.until(IndexState.ALONE)
    assert "later start" in first.state_changes[-1][1]


async def test_a_namespace_taken_during_an_outage_keeps_the_replica_alone(
    redis: RedisServer, join_watched: JoinWatched
) -> None:
    proxy = await TcpProxy(redis.port).start()
    a = await join_watched(f"redis://127.0.0.1:{proxy.port}", "a", ttl_ms=SHORT_TTL_MS)
    proxy.cut()
    await a.until(IndexState.ALONE)
    await asyncio.sleep(1.5 * SHORT_TTL_MS / 1000)  # until the entry of a has expired
    b = await join_watched(redis.url, "b", model=b"other" * 6 + b"xx")
    assert b.index.state is IndexState.JOINED
    proxy.mend()
    await soon(lambda: "another model" in a.state_changes[-1][1])
    assert a.index.state is IndexState.ALONE
    await proxy.stop()


async def test_the_password_of_the_url_is_used_and_a_wrong_one_keeps_the_replica_alone(
    join_watched: JoinWatched,
) -> None:
    with redis_server("--requirepass", "secret") as server:
        right = await join_watched(f"redis://:secret@127.0.0.1:{server.port}/0", "a")
        wrong = await join_watched(f"redis://:guess@127.0.0.1:{server.port}/0", "b")
        assert right.index.state is IndexState.JOINED
        assert wrong.index.state is IndexState.ALONE
        assert "password" in wrong.state_changes[-1][1]
