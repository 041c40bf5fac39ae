"""Source sharing: in the background, bounded, and paused while Redis is too slow for it."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from encoder_service.cluster.cluster import IndexState
from encoder_service.cluster.redis import RedisSettings
from encoder_service.cluster.redis.schema import Keys
from encoder_service.cluster.redis_cluster import RedisCluster
from encoder_service.cluster.sharing import (
    CONCURRENT_FILES,
    MAX_WAITING_BYTES,
    MAX_WAITING_IMAGES,
    SourceSharing,
)
from encoder_service.config import Config
from encoder_service.engine.model import Model
from testing.holding import cluster_of
from testing.photos import photo
from testing.redis_servers import RedisServer
from tests.cluster_replica import Start, starting
from tests.index_replicas import as_replica, new_addresses
from tests.tcp_proxy import TcpProxy
from tests.waiting import PATIENCE_S, soon

numbers = itertools.count(90_000)
SLOW_BYTES_PER_S = 40_000  # calls of some hundred bytes are fast enough, a picture takes seconds
SOURCE_TIMEOUT_MS = 300


def new_picture() -> bytes:
    picture = photo(400, 300, next(numbers), "PNG")
    assert len(picture) > 2 * SLOW_BYTES_PER_S
    return picture


@pytest.fixture
async def proxy(redis: RedisServer) -> AsyncIterator[TcpProxy]:
    proxy = await TcpProxy(redis.port).start()
    yield proxy
    await proxy.stop()


@pytest.fixture
async def start(config: Config, model: Model, proxy: TcpProxy) -> AsyncIterator[Start]:
    async with starting(config, model, f"redis://127.0.0.1:{proxy.port}") as start:
        yield start


async def test_a_redis_too_slow_for_files_delays_no_answer(
    start: Start, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start()
    proxy.throttle(SLOW_BYTES_PER_S)
    put_keys: list[bytes] = []

    async def put_forever(key: bytes, _file: bytes) -> bool:
        put_keys.append(key)
        return await asyncio.Event().wait()

    monkeypatch.setattr(a.index.sources, "put", put_forever)
    async with asyncio.timeout(4 * PATIENCE_S):  # waiting for the sharing would never end
        images = await a.client.submit([new_picture() for _ in range(6)])
    assert [image.error for image in images] == [None] * 6
    await soon(lambda: len(put_keys) == CONCURRENT_FILES)
    assert a.index.state is IndexState.JOINED


async def test_images_submitted_before_a_drain_are_shared_after_it(start: Start, redis: RedisServer) -> None:
    a = await start()
    with a.gate.closed():
        images = await a.client.submit([new_picture() for _ in range(4)])
        await a.server.cluster.leave()
    keys = Keys(a.index.settings.namespace)
    with redis.client() as client:
        for image in images:
            assert client.exists(keys.source(a.server._model.recipe.key(image.digest).source_key))


async def joined(proxy: TcpProxy, calls: Counter[str], **settings: int) -> RedisCluster:
    cluster = cluster_of(
        RedisSettings(url=f"redis://127.0.0.1:{proxy.port}", namespace="slow", **settings),  # type: ignore[arg-type]
        on_call=lambda name, _seconds, ok: calls.update([f"{name} {ok}"]),
    )
    await cluster.join(as_replica("a"))
    return cluster


async def test_calls_with_large_values_pause_after_three_failures_and_others_continue(
    proxy: TcpProxy,
) -> None:
    calls: Counter[str] = Counter()
    patient = {"call_timeout_ms": 30_000, "socket_timeout_ms": 30_000, "beat_timeout_ms": 30_000}
    cluster = await joined(proxy, calls, source_timeout_ms=SOURCE_TIMEOUT_MS, **patient)
    try:
        proxy.throttle(SLOW_BYTES_PER_S)
        picture = new_picture()
        for _ in range(40):
            assert not await cluster.index.sources.put(b"key", picture)
            assert (await cluster.acquire(new_addresses(1))).granted
        assert cluster.index.state is IndexState.JOINED
        assert 3 <= calls["put_source False"] < 20, "each of them timed out"
        assert calls["acquire True"] == 40
        proxy.mend()
        await soon(lambda: cluster.index.sources.put(b"key", picture))
        assert await cluster.index.sources.get(b"key") == picture
    finally:
        await cluster.close()


async def test_a_redis_fast_enough_only_for_heartbeats_counts_as_unavailable(proxy: TcpProxy) -> None:
    cluster = await joined(proxy, Counter(), call_timeout_ms=100, heartbeat_ms=50)
    try:
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
    finally:
        await cluster.close()


async def test_a_cancelled_call_is_not_a_failure_of_the_index(proxy: TcpProxy) -> None:
    calls: Counter[str] = Counter()
    patient = dict.fromkeys(("call_timeout_ms", "socket_timeout_ms", "beat_timeout_ms"), 60_000)
    cluster = await joined(proxy, calls, **patient)
    try:
        proxy.delay(0.5)
        asking = asyncio.create_task(cluster.index.locate(new_addresses(1)))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking])
        proxy.delay(0.0)
        await cluster.index.locate(new_addresses(1))
        assert (calls["locate True"], calls["locate False"]) == (1, 0)
    finally:
        await cluster.close()


async def test_a_source_larger_than_any_image_is_not_read(redis: RedisServer, proxy: TcpProxy) -> None:
    patient = dict.fromkeys(("call_timeout_ms", "source_timeout_ms", "socket_timeout_ms"), 60_000)
    cluster = await joined(proxy, Counter(), max_source_bytes=1 << 20, **patient)
    try:
        with redis.client() as client:
            client.set(Keys("slow").source(b"fits"), bytes(1 << 20))
            client.set(Keys("slow").source(b"huge"), bytes(64 << 20))
            before = client.info("stats")["total_net_output_bytes"]
            assert await cluster.index.sources.get(b"fits") == bytes(1 << 20)
            assert await cluster.index.sources.get(b"huge") is None
            assert await cluster.index.sources.get(b"none") is None
            assert client.info("stats")["total_net_output_bytes"] - before < 4 << 20
    finally:
        await cluster.close()


async def test_files_waiting_to_be_shared_are_bounded() -> None:
    for size, most in ((10, MAX_WAITING_IMAGES), (MAX_WAITING_BYTES // 8, 8)):
        released = asyncio.Event()

        async def put(_key: bytes, _data: bytes, released: asyncio.Event = released) -> bool:
            return await released.wait()

        sharing = SourceSharing(SimpleNamespace(put=put), None)  # type: ignore[arg-type]
        sharing.start()
        for number in range(most + 5):
            sharing.offer(number.to_bytes(4, "big"), bytes(size))
        assert sharing.dropped == 5
        released.set()
        await sharing.finish(within_s=30)
        assert (sharing.shared, sharing.dropped) == (most, 5)
        sharing.offer(b"more", bytes(size))
        await sharing.finish(within_s=30)
        assert sharing.shared == most + 1
        await sharing.stop()


async def test_stuck_sharing_ends_at_its_time_limit() -> None:
    async def put(_key: bytes, _data: bytes) -> bool:
        return await asyncio.Event().wait()

    sharing = SourceSharing(SimpleNamespace(put=put), None)  # type: ignore[arg-type]
    sharing.start()
    for number in range(CONCURRENT_FILES + 3):
        sharing.offer(number.to_bytes(4, "big"), b"picture")
    began = time.monotonic()
    await sharing.finish(within_s=0.2)
    await sharing.stop()
    assert time.monotonic() - began < PATIENCE_S
    assert sharing.shared == 0
