"""Replicas for tests of the index."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from string import ascii_lowercase

from encoder_contract.digest import content_digest
from encoder_contract.geometry import Grid
from encoder_service.cluster.cluster import IndexState, Replica
from encoder_service.cluster.redis import RedisIndex, RedisSettings
from encoder_service.cluster.redis_cluster import RedisCluster
from testing.holding import Holding, cluster_of
from tests.waiting import PATIENCE_S, soon

MODEL, PROCESSOR = b"m" * 32, b"p" * 32
# Long enough for a stall of a busy machine. Tests in which a replica dies or a lease expires use `SHORT_TTL_MS`.
TTL_MS = 60_000
SHORT_TTL_MS, HEARTBEAT_MS = 800, 100
GRID = Grid(1, 18, 20)
numbers = itertools.count()
Join = Callable[..., Awaitable[RedisCluster]]
# Of a replica that must notice a silent Redis. Ten times the default: a busy machine may delay a thread by 0.1 s.
CALL_TIMEOUT_S = 1.0
PATIENT_S = 20.0  # of all others: a stall of a busy machine is not an outage
NAMESPACE = "faults"


def new_addresses(count: int) -> list[bytes]:
    return [content_digest(str(next(numbers)).encode()) for _ in range(count)]


def grids(addresses: Iterable[bytes]) -> dict[bytes, Grid]:
    """Return publications of the addresses, all with the same grid."""
    return dict.fromkeys(addresses, GRID)


def as_replica(name: str, epoch: int = 1, model: bytes = MODEL, processor: bytes = PROCESSOR) -> Replica:
    return Replica(name, epoch, f"{name}.example:50051", model, processor)


def redis_settings(url: str, space: str) -> RedisSettings:
    return RedisSettings(
        url=url,
        namespace=space,
        # These tests check answers, not speed: a stall of a busy machine must not count as an outage.
        call_timeout_ms=10_000,
        socket_timeout_ms=10_000,
        beat_timeout_ms=20_000,
        heartbeat_ms=HEARTBEAT_MS,
        replica_ttl_ms=TTL_MS,
        lease_ttl_ms=TTL_MS,
    )


@asynccontextmanager
async def joined(*clusters: RedisCluster) -> AsyncIterator[Sequence[RedisCluster]]:
    """Have replicas join, named by letters; they are closed at the end."""
    try:
        for name, cluster in zip(ascii_lowercase, clusters, strict=False):
            await cluster.join(as_replica(name))
        yield clusters
    finally:
        for cluster in clusters:
            await cluster.close()


async def publish(cluster: RedisCluster, grids: Mapping[bytes, Grid]) -> None:
    """Publish addresses, and wait until the changes are sent."""
    for address, grid in grids.items():
        cluster.publish(address, grid)
    await cluster.leases.send()


async def release(cluster: RedisCluster, addresses: Iterable[bytes]) -> None:
    """Release leases, and wait until the changes are sent."""
    for address in addresses:
        cluster.release(address)
    await cluster.leases.send()


@dataclass
class Watched:
    """A replica, the addresses that it holds, and its state changes."""

    cluster: RedisCluster
    held: Holding = field(default_factory=Holding)
    state_changes: list[tuple[IndexState, str]] = field(default_factory=list)

    @property
    def index(self) -> RedisIndex:
        return self.cluster.index

    async def hold(self, addresses: list[bytes]) -> None:
        self.held |= grids(addresses)
        await publish(self.cluster, grids(addresses))

    async def until(self, state: IndexState) -> None:
        await soon(lambda: self.index.state is state)

    async def acquires_until_alone(self, addresses: list[bytes]) -> int:
        """Acquire until the replica is alone; return the number of calls. Each must grant every address."""
        calls = 0
        async with asyncio.timeout(PATIENCE_S):
            while self.index.state is IndexState.JOINED:
                assert (await self.index.acquire(addresses)).granted == frozenset(addresses)
                calls += 1
        return calls

    async def locates(self, addresses: list[bytes], at: str) -> bool:
        """Whether it locates all addresses at the replica `at`."""
        found = await self.index.locate(addresses)
        return set(found) == set(addresses) and all(place[0].replica_id == at for place in found.values())


JoinWatched = Callable[..., Awaitable[Watched]]


@asynccontextmanager
async def watched_replicas() -> AsyncIterator[JoinWatched]:
    """Yield a function that joins a replica by a URL; all are closed at the end.

    Heartbeats are patient, and so are calls with the default `timeout_s`. A Redis that is gone fails them at once.
    """
    joined: list[Watched] = []

    async def join(
        url: str,
        name: str,
        epoch: int = 1,
        model: bytes = b"m" * 32,
        timeout_s: float = PATIENT_S,
        ttl_ms: int = TTL_MS,
    ) -> Watched:
        watched = Watched(None)  # type: ignore[arg-type]
        settings = RedisSettings(
            url=url,
            namespace=NAMESPACE,
            call_timeout_ms=int(timeout_s * 1000),
            socket_timeout_ms=int(PATIENT_S * 1000),
            beat_timeout_ms=int(PATIENT_S * 1000),
            heartbeat_ms=HEARTBEAT_MS,
            replica_ttl_ms=ttl_ms,
        )
        watched.cluster = cluster_of(settings, watched.held)
        session = watched.index._session
        set_state = session._set_state

        def record(state: IndexState, reason: str) -> None:
            if (state, reason) != (session.state, session._reason):
                watched.state_changes.append((state, reason))
            set_state(state, reason)

        session._set_state = record  # type: ignore[method-assign]
        joined.append(watched)
        await watched.cluster.join(Replica(name, epoch, f"{name}:1", model, b"p" * 32))
        return watched

    try:
        yield join
    finally:
        for watched in joined:
            await watched.cluster.close()
