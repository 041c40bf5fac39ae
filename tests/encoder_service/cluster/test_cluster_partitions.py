"""Network partitions: replicas disconnected from Redis or from each other, and a failover of Redis Cluster."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.redis_servers import RedisServer, redis_cluster, redis_server
from testing.replicas import ReplicaProcess, fleet_of, start_all
from testing.tcp_proxy import TcpProxy
from testing.traffic import Supply, Traffic
from tests.cluster_load import alone, joined, seeds, steady, traffic
from tests.waiting import soon

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def test_a_replica_without_redis_works_alone_and_rejoins(checkpoint: Path, redis: RedisServer) -> None:
    proxy = await TcpProxy(redis.port).start()
    urls = (f"redis://127.0.0.1:{proxy.port}", redis.url)
    replicas = [
        ReplicaProcess(checkpoint, n, index=url, index_prefix="cut-from-redis") for n, url in enumerate(urls)
    ]
    try:
        await asyncio.to_thread(start_all, replicas)
        await joined(replicas)
        async with traffic(replicas) as load:
            await load.more(10)
            proxy.cut()
            await soon(lambda: alone(replicas[0]))
            await load.more(20)
            proxy.mend()
            await joined(replicas)
            await load.more(10)
        assert load.errors == []
        await steady(replicas)
    finally:
        for replica in replicas:
            replica.kill()
        await proxy.stop()


async def test_a_replica_disconnected_from_peers_encodes_itself(checkpoint: Path, redis: RedisServer) -> None:
    replicas = [
        ReplicaProcess(checkpoint, n, index=redis.url, index_prefix="cut-from-peers") for n in range(2)
    ]
    a, b = replicas
    a.endpoint = f"127.0.0.1:{a.port}"  # a proxy listens there
    proxy = await TcpProxy(a.port).start()
    try:
        await asyncio.gather(
            asyncio.to_thread(a.start, advertise=f"127.0.0.1:{proxy.port}"), asyncio.to_thread(b.start)
        )
        await joined(replicas)
        supply = Supply(seed=next(seeds), shared=0.0)
        async with Traffic([a.endpoint], supply) as at_a:
            await at_a.more(5)
        proxy.cut()
        supply.shared = 1.0  # only images that A holds, which is unreachable
        async with Traffic([b.endpoint], supply) as at_b:
            await at_b.more(10)
        assert at_b.errors == []
        assert {served.source for served in at_b.served} == {"encoded", "host"}
        proxy.mend()
        await soon(lambda: _reads(b, a, supply))  # gRPC pauses between its attempts to connect
        await steady(replicas)
    finally:
        for replica in replicas:
            replica.kill()
        await proxy.stop()


async def _reads(reader: ReplicaProcess, holder: ReplicaProcess, supply: Supply) -> bool:
    """Return whether a replica gets the rows of new images of another one from it."""
    supply.shared = 0.0
    async with Traffic([holder.endpoint], supply, workers=1) as first:
        await first.more(1)
    supply.shared, supply.hot = 1.0, 4
    async with Traffic([reader.endpoint], supply, workers=1) as second:
        await second.more(1)
    return "peer" in {served.source for served in second.served}


async def test_a_cluster_failover_costs_no_image(checkpoint: Path) -> None:
    with redis_cluster(masters=3, replicas=3) as cluster:
        replicas = [ReplicaProcess(checkpoint, n, index=cluster.url) for n in range(2)]
        with fleet_of(replicas):
            await joined(replicas)
            async with traffic(replicas) as load:
                await load.more(10)
                await asyncio.to_thread(cluster.kill_master, 0)
                await load.more(20)
                await soon(lambda: _is_healed(cluster.nodes[1]))
                await joined(replicas)
                await load.more(10)
            assert load.errors == []
            await steady(replicas)


def _is_healed(node: RedisServer) -> bool:
    with node.client() as client:
        state = client.execute_command("CLUSTER INFO")
    text = state.decode() if isinstance(state, bytes) else "\n".join(f"{k}:{v}" for k, v in state.items())
    return "cluster_state:ok" in text
