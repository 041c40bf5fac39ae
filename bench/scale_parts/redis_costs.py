"""What the index costs Redis: processor time of its thread and bytes, by Redis's own counters."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import Replica
from encoder_service.cluster.redis import RedisSettings, namespace
from encoder_service.cluster.redis.connection import RedisConnection, RedisUrl
from encoder_service.cluster.redis.schema import Keys, Membership
from encoder_service.cluster.redis_cluster import RedisCluster
from testing.holding import cluster_of
from testing.redis_servers import RedisServer

MODEL, PROCESSOR = b"m" * 32, b"p" * 32
GRID = Grid(1, 44, 80)
ALIVE_MS = 600_000  # longer than a measurement
ROUNDS = 8
AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Spent:
    """What servers have spent: microseconds of their main threads, and bytes received and sent."""

    us: float
    bytes: float

    @classmethod
    def by(cls, servers: Sequence[RedisServer]) -> Self:
        """Read the counters of all servers."""
        us, moved = 0.0, 0.0
        for server in servers:
            with server.client() as client:
                found: Any = client.info("all")
            us += 1e6 * (found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"])
            moved += found["total_net_input_bytes"] + found["total_net_output_bytes"]
        return cls(us, moved)

    def each(self, before: Self, count: int) -> "Spent":
        """Return what each of `count` operations since `before` has cost."""
        return Spent((self.us - before.us) / count, (self.bytes - before.bytes) / count)


async def at_a_time(calls: Iterable[Awaitable[object]]) -> None:
    """Make calls, `AT_A_TIME` at a time: a busy Redis finds several requests whenever it looks."""
    made = list(calls)
    for first in range(0, len(made), AT_A_TIME):
        await asyncio.gather(*made[first : first + AT_A_TIME])


async def least(servers: Sequence[RedisServer], operation: Callable[[], Awaitable[int]]) -> Spent:
    """Return what one part of an operation costs, which returns how many parts it had: the cheapest of some rounds.

    Other work on the machine takes caches away and can only add to it.
    """
    await operation()  # warm up: scripts, connections
    found = []
    for _ in range(ROUNDS):
        before = Spent.by(servers)
        count = await operation()
        found.append(Spent.by(servers).each(before, count))
    return min(found, key=lambda spent: spent.us)


async def heartbeat(server: RedisServer, replicas: int) -> Spent:
    """Return the cost of one heartbeat among so many replicas, which none joins or leaves."""
    connection = await RedisConnection.open(RedisUrl(server.url), 30)
    keys = Keys(namespace("heartbeats", replicas.to_bytes(32))).membership
    members = [
        Membership(
            Replica(f"encoder-7c9d8b6f5-{n:05d}", n, f"10.12.{n // 250}.{n % 250}:50051", MODEL, PROCESSOR),
            keys,
            ALIVE_MS,
        )
        for n in range(replicas)
    ]
    for member in members:
        await member.heartbeat(connection, "join")

    async def beat() -> int:
        await at_a_time(member.heartbeat(connection, "beat") for member in members)
        return replicas

    try:
        return await least([server], beat)
    finally:
        await connection.close()


async def joined(stack: AsyncExitStack, url: str, replica: str = "a") -> RedisCluster:
    """Return the cluster of a replica that has joined; its calls have time, as the machine may be busy."""
    settings = RedisSettings(url=url, namespace=namespace("costs", MODEL), call_timeout_ms=10_000)
    cluster = cluster_of(settings)
    await cluster.join(Replica(replica, 1, f"{replica}.encoder:50051", MODEL, PROCESSOR))
    stack.push_async_callback(cluster.close)
    return cluster


async def image(
    servers: Sequence[RedisServer], url: str, together: int, replicas: int = 1, images: int = 512
) -> Spent:
    """Return the cost of a new image, its lease and its publication, while callers submit `together` images each.

    `AT_A_TIME` callers are spread over the replicas. A replica collects what its callers ask within a millisecond.
    """
    draw = random.Random(f"{together} {replicas}")
    async with AsyncExitStack() as stack:
        clusters = [await joined(stack, url, f"replica-{n}") for n in range(replicas)]

        async def submit(cluster: RedisCluster) -> None:
            addresses = [draw.randbytes(32) for _ in range(together)]
            acquired = await cluster.acquire(addresses)
            assert acquired.granted == frozenset(addresses)
            for address in addresses:
                cluster.publish(address, GRID)

        async def encode() -> int:
            calls = images // together
            await at_a_time(submit(clusters[n % replicas]) for n in range(calls))
            for cluster in clusters:
                await cluster.leases.send()
            return calls * together

        return await least(servers, encode)


async def renewal(server: RedisServer, images: int = 4096) -> Spent:
    """Return the cost of renewing one lease among as many as a full queue has."""
    async with AsyncExitStack() as stack:
        index = (await joined(stack, server.url)).index
        addresses = [n.to_bytes(32) for n in range(images)]
        await index.acquire(addresses)

        async def renew() -> int:
            return len(await index.renew(addresses))

        return await least([server], renew)
