"""TLS in a fleet: between replicas, and to Redis with a user that has only the documented rights."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from encoder_service.cluster.cluster import IndexState
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import Credentials
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from tests.cluster_replica import Start, held_by, starting, through_peer
from tests.redis_tls import redis_by_tls, redis_url


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The authority that signs all certificates; its own certificate is ca.pem."""
    authority = Authority()
    authority.write(tmp_path / "ca.pem")
    return authority


@pytest.fixture
def secured(config: Config, authority: Authority, tmp_path: Path) -> Config:
    """Replicas that share one certificate, and require certificates of each other and of callers."""
    cert, key = authority.issue(tmp_path, "server", HOSTS)
    return replace(config, tls_cert=cert, tls_key=key, tls_client_ca=str(tmp_path / "ca.pem"))


@pytest.fixture
async def start(
    secured: Config, authority: Authority, model: Model, redis_url: str, tmp_path: Path
) -> AsyncIterator[Start]:
    client = Credentials(str(tmp_path / "ca.pem"), *authority.issue(tmp_path, "client"))
    async with starting(secured, model, redis_url, client) as start:
        yield start


async def test_replicas_with_a_new_certificate_still_reach_each_other(
    start: Start, authority: Authority, tmp_path: Path
) -> None:
    a, b = await start(), await start()
    await through_peer(a, b, photo(64, 64, 1))
    for seed, signed_by in enumerate((authority, Authority("new"))):
        signed_by.write(tmp_path / "ca.pem")
        signed_by.issue(tmp_path, "server", HOSTS)
        signed_by.issue(tmp_path, "client")
        await through_peer(a, b, photo(64, 64, 10 + seed))


async def test_a_peer_with_another_certificate_name_is_refused(start: Start) -> None:
    a, b = await start(), await start(tls_peer_name="somebody.else")
    (submitted,) = await b.client.submit([await held_by(a, seen_by=b)])
    assert submitted.error is None
    await b.fetch_own(submitted.digest)


@pytest.fixture
async def redis_with_tls(authority: Authority, tmp_path: Path) -> AsyncIterator[str]:
    """A Redis with TLS that admits only the user of the documentation."""
    async with redis_by_tls(authority.issue(tmp_path, "redis", ["127.0.0.1"])) as port:
        yield redis_url(port, tmp_path / "ca.pem")


async def test_the_index_works_over_tls_with_the_documented_rights(
    config: Config, model: Model, redis_with_tls: str
) -> None:
    async with starting(config, model, redis_with_tls) as start:
        settings = {"index_prefix": "encoder:test"}
        a, b = await start(**settings), await start(**settings)
        shared = await through_peer(a, b, photo(64, 64, 3))
        # Uses leases, shared files, waiting for a publication, and a stale location.
        with a.gate.closed():
            (again,) = await a.client.submit([photo(64, 64, 4)])
            (there,) = await b.client.submit([photo(64, 64, 4)])
            assert again.error is there.error is None
        assert (await b.fetch(again.digest)).error is None
        a.server.store.flush()
        assert (await a.fetch(shared.digest)).error is None
        assert a.index.state is b.index.state is IndexState.JOINED


@pytest.mark.attack("a Redis user that tries other keys and commands")
async def test_the_documented_user_has_no_other_rights(redis_with_tls: str) -> None:
    async with redis.asyncio.Redis.from_url(redis_with_tls) as client:
        assert await client.ping()
        for forbidden in ("GET others:key", "KEYS *", "FLUSHALL", "CONFIG GET *", "ACL LIST"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                await client.execute_command(*forbidden.split())


async def test_a_redis_with_a_certificate_of_another_authority_is_refused(
    config: Config, model: Model, redis_with_tls: str, tmp_path: Path
) -> None:
    Authority("other").write(tmp_path / "ca.pem")
    async with starting(config, model, redis_with_tls) as start:
        a = await start()
        assert a.index.state is IndexState.ALONE
