"""A Redis behind a slow line, and calls that end early."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis import RedisSettings
from encoder_service.cluster.redis_cluster import RedisCluster
from testing.holding import cluster_of
from testing.redis_servers import RedisServer
from testing.tcp_proxy import TcpProxy
from tests.index_replicas import joined, new_addresses
from tests.waiting import soon


@pytest.fixture
async def proxy(redis: RedisServer) -> AsyncIterator[TcpProxy]:
    proxy = await TcpProxy(redis.port).start()
    yield proxy
    await proxy.stop()


def cluster_behind(proxy: TcpProxy, calls: Counter[str], **settings: int) -> RedisCluster:
    return cluster_of(
        RedisSettings(url=f"redis://127.0.0.1:{proxy.port}", namespace="slow", **settings),  # type: ignore[arg-type]
        on_call=lambda name, _seconds, ok: calls.update([f"{name} {ok}"]),
    )


async def test_a_redis_fast_enough_only_for_heartbeats_counts_as_unavailable(proxy: TcpProxy) -> None:
    slow = cluster_behind(proxy, Counter(), call_timeout_ms=100, heartbeat_ms=50)
    async with joined(slow) as [cluster]:
        proxy.throttle(500)
        seen = set()
        for _ in range(12):
            await cluster.index.locate(new_addresses(4))
            seen.add(cluster.index.state)
            if IndexState.ALONE in seen:
                break
            await asyncio.sleep(1.2)  # at least one heartbeat gets through
            seen.add(cluster.index.state)
        assert IndexState.ALONE in seen


async def test_a_cancelled_call_is_not_a_failure_of_the_index(proxy: TcpProxy) -> None:
    calls: Counter[str] = Counter()
    patient = dict.fromkeys(
        ("call_timeout_ms", "socket_timeout_ms", "beat_timeout_ms", "heartbeat_ms"), 60_000
    )
    async with joined(cluster_behind(proxy, calls, **patient)) as [cluster]:
        proxy.hold_answers()
        asking = asyncio.create_task(cluster.index.locate(new_addresses(1)))
        await soon(lambda: proxy.held_bytes > 0)
        asking.cancel()
        await asyncio.wait([asking])
        proxy.mend()
        await cluster.index.locate(new_addresses(1))
        assert (calls["locate True"], calls["locate False"]) == (1, 0)
