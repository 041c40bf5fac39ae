"""Unit tests of the index in Redis: breaker, leases, republishing, URLs."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import cast

import pytest

from encoder_contract.geometry import Grid
from encoder_service.cluster.leases import ADDRESSES_PER_S, BATCH_ADDRESSES, Leases, Republisher
from encoder_service.cluster.redis import RedisIndex
from encoder_service.cluster.redis.connection import RedisUrl
from encoder_service.cluster.redis.schema import parse_peers
from encoder_service.cluster.redis.session import LAST_PROBE_S, Breaker, IndexEvents, RedisSettings
from encoder_service.config import ConfigError
from testing.holding import Holding
from tests.index_replicas import grids, new_addresses, redis_settings
from tests.waiting import soon


def test_a_breaker_counts_overlapping_failures_once_and_opens_on_a_refusal() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    breaker.close()
    now = 10.0
    assert not any(breaker.failed(9.9) for _ in range(50))
    now = 11.0
    assert not breaker.failed(10.5)
    now = 12.0
    assert breaker.failed(11.5)
    breaker.close()
    assert not breaker.failed(12.0)
    assert breaker.failed(12.0, refused=True)


def test_a_success_resets_the_failure_count() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now)
    for now in (1.0, 2.0):
        assert not breaker.failed(now)
    breaker.succeeded()
    for now in (3.0, 4.0):
        assert not breaker.failed(now)
    now = 5.0
    assert breaker.failed(now)


def test_probe_delays_double_up_to_a_limit_and_have_jitter() -> None:
    for uniform, share in ((min, 0.5), (max, 1.5)):
        breaker = Breaker(uniform=uniform)
        delays = [breaker.probe_delay_s() for _ in range(10)]
        assert delays[:2] == [0.25 * share, 0.5 * share]
        assert delays[-1] == LAST_PROBE_S * share


def test_a_breaker_that_reopens_soon_keeps_its_long_delays() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now, uniform=max)
    delays = []
    for _ in range(8):
        breaker.close()
        now += 1.0
        assert breaker.failed(now, refused=True)
        delays.append(breaker.probe_delay_s())
        now += delays[-1]
    assert delays == sorted(delays)
    assert delays[-1] == LAST_PROBE_S * 1.5
    breaker.close()
    now += 60.0
    breaker.failed(now, refused=True)
    assert breaker.probe_delay_s() == delays[0]


@pytest.mark.parametrize(
    ("replica_id", "endpoint"),
    [
        *((name, "b:1") for name in ("b\nINFO all is well", "b\x1b[2K", "", "b" * 1000)),
        *(("b", endpoint) for endpoint in ("b:1\n", "b\x1b:1", "b", "b:1/path", "é:1")),
    ],
)
def test_an_invalid_entry_of_the_replica_list_is_skipped(replica_id: str, endpoint: str) -> None:
    record = f"1 m.p {endpoint}"
    entries = [b"a", b"1 m.p a.example:50051", replica_id.encode(), record.encode()]
    (peer,) = parse_peers(entries).values()
    assert (peer.replica_id, peer.endpoint) == ("a", "a.example:50051")


def test_leases_become_due_and_are_not_renewed_forever() -> None:
    now = 0.0
    index = RedisIndex(redis_settings("redis://127.0.0.1:1", "nowhere"), cast(IndexEvents, None))
    leases = Leases(index, renew_s=3.0, clock=lambda: now)
    leases.add([b"a"])
    assert leases.due() == []
    now = 3.0
    assert leases.due() == [b"a"]
    leases.add([b"a"])
    assert leases.due() == []
    leases.mark_all_due()
    assert leases.due() == [b"a"]
    now = 299.0
    leases.add([b"a", b"b"])
    now = 302.0
    assert leases.due() == [b"b"]
    assert not leases.holds(b"a")
    assert leases.holds(b"b")


async def test_republishing_is_paced_and_complete() -> None:
    held = Holding(grids(new_addresses(400)))
    published: dict[bytes, Grid] = {}
    largest = 0

    async def publish(grids: Mapping[bytes, Grid]) -> bool:
        nonlocal largest
        largest = max(largest, len(grids))
        published.update(grids)
        return True

    republisher = Republisher(held.grids, publish, ttl_s=3600.0)
    running = asyncio.create_task(republisher.run())
    republisher.trigger()
    began = time.monotonic()
    await soon(lambda: len(published) == 400)
    assert time.monotonic() - began > (400 - BATCH_ADDRESSES) / ADDRESSES_PER_S
    assert published == held
    assert largest <= BATCH_ADDRESSES
    running.cancel()


def test_cluster_urls_are_recognized() -> None:
    one = RedisUrl("rediss://user:secret@redis:6380/0?ssl_cert_reqs=required")
    assert not one.is_cluster
    assert one.urls == ["rediss://user:secret@redis:6380/0?ssl_cert_reqs=required"]
    for url in ("redis+cluster://:pw@a:1,b:2", "redis://:pw@a:1,b:2?cluster=true"):
        cluster = RedisUrl(url)
        assert cluster.is_cluster
        assert cluster.urls == ["redis://:pw@a:1", "redis://:pw@b:2"]
        assert cluster.node_url("::1", 7) == "redis://:pw@[::1]:7"


@pytest.mark.parametrize(
    "url", ["", "redis", "http://redis:6379", "redis+sentinel://:secret@redis:1", "redis://"]
)
def test_a_url_of_another_scheme_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://") as refusal:
        RedisUrl(url)
    assert "secret" not in str(refusal.value)


def test_scaling_timeouts_changes_nothing_else() -> None:
    settings = RedisSettings(url="redis://host", namespace="n")
    patient = asdict(settings.with_timeouts_scaled(3))
    changed = {name: value for name, value in asdict(settings).items() if patient[name] != value}
    times = ("call_timeout", "socket_timeout", "beat_timeout", "replica_ttl", "lease_ttl")
    assert changed.keys() == {f"{name}_ms" for name in times}
    assert {patient[name] / value for name, value in changed.items()} == {3}
