"""The identity of a replica in the index: its id, its model and its password."""

from redis import Redis

from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis.schema import Keys
from testing.redis_servers import RedisServer, redis_server
from testing.tcp_proxy import TcpProxy
from tests.index_replicas import NAMESPACE, SHORT_TTL_MS, JoinWatched
from tests.waiting import soon

_, DEADLINES, _ = Keys(NAMESPACE).membership


def has_expired(client: Redis, name: str) -> bool:
    """Whether the entry of a replica has expired, by the clock of Redis."""
    seconds, microseconds = client.time()
    deadline_ms = client.zscore(DEADLINES, name)
    assert deadline_ms is not None
    return deadline_ms < 1000 * seconds + microseconds / 1000


async def test_a_second_process_of_an_id_takes_over(redis: RedisServer, join_watched: JoinWatched) -> None:
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
    with redis.client() as client:  # Redis may have a heartbeat that it has not read
        client.ping()
        await soon(lambda: has_expired(client, "a"))
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
