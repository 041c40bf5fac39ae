"""URLs over a fleet: what one replica's caller found, the callers of all others are told."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from encoder_contract.fleet_key import FleetKey
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.address import url_key
from encoder_service.cluster.contract import IndexState
from encoder_service.config import Config
from encoder_service.engine.model import Model
from prefill_client import EncoderClient, Image, RowRequest
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_client.media.shared_loader import SharedLoader
from prefill_client.media.url_digest import shared_digest
from testing.photos import photo
from testing.redis_servers import redis_server
from tests.calls import collect
from tests.cluster_replica import PROMPTLY, Replica, Start, starting
from tests.image_host import Host, image_host
from tests.waiting import soon

SECRET = b"the secret of the fleet, 32 bytes"
PHOTO = photo(96, 64, 41)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with image_host() as host:
        host.body = PHOTO
        yield host


@pytest.fixture
def sharing(config: Config, tmp_path: Path) -> Config:
    """Replicas that share a key, and URLs."""
    path = tmp_path / "fleet-key"
    path.write_bytes(SECRET + b"\n")
    return replace(config, fleet_key_file=str(path), share_urls="yes")


@pytest.fixture
async def start(sharing: Config, model: Model, redis_url: str) -> AsyncIterator[Start]:
    async with starting(sharing, model, redis_url) as start:
        yield start


def loader_of(host: Host) -> SharedLoader:
    return SharedLoader(ImageLoader(Destinations([host.name]), max_bytes=1 << 20, timeout_s=30))


async def through(replica: Replica, host: Host) -> Image | bytes:
    """What a language server finds that knows this replica alone; whatever it is, it is submitted and fetched there."""
    loader = loader_of(host)
    found = await loader.open(f"http://{host.name}/a", replica.client)
    (submitted,) = await replica.client.submit([found])
    assert submitted.error is None, submitted.error
    (rows,) = (await collect(replica.client, [RowRequest(submitted.digest)])).values()
    assert rows.error is None, rows.error
    while loader._said:
        await next(iter(loader._said))
    return found


async def test_what_one_replicas_caller_downloaded_anothers_does_not(start: Start, host: Host) -> None:
    a, b = await start(), await start()
    assert isinstance(await through(a, host), bytes)
    assert isinstance(await through(b, host), Image)
    assert len(host.asked) == 1
    assert await a.encodes() + await b.encodes() == 1


async def test_clients_of_the_fleet_find_it_whichever_replica_a_url_goes_to(start: Start, host: Host) -> None:
    replicas = [await start() for _ in range(3)]
    endpoints = [replica.endpoint for replica in replicas]
    found: list[Image | bytes] = []
    for number in range(6):
        for _ in range(2):
            async with await EncoderClient.connect(endpoints) as client:
                loader = loader_of(host)
                found.append(await loader.open(f"http://{host.name}/{number}", client))
                (submitted,) = await client.submit([found[-1]])
                assert submitted.error is None
                while loader._said:
                    await next(iter(loader._said))
    assert [isinstance(each, Image) for each in found] == [False, True] * 6
    assert len(host.asked) == 6


async def test_a_record_that_the_fleet_did_not_sign_is_not_believed(start: Start, host: Host) -> None:
    a = await start()
    (submitted,) = await a.client.submit([evil := photo(64, 64, 42)])
    rules = Destinations([host.name])
    allowed = loader_of(host)._loader.allowed(f"http://{host.name}/a")
    key = url_key(shared_digest(allowed, rules), b"")
    record = pb.UrlRecord(digest=submitted.digest, size_bytes=len(evil), width=64, height=64)
    raw = record.SerializeToString()
    await a.index.url_records.record(key, raw, 600_000, 600_000)
    assert await through(a, host) == PHOTO
    assert a.cluster.status.foreign_urls > 0
    await a.index.url_records.record(key, FleetKey([SECRET]).seal_url(key, raw), 600_000, 600_000)
    believed = await through(a, host)
    assert isinstance(believed, Image), "so that the line above holds for no other reason"
    assert believed.digest == submitted.digest


async def test_without_redis_each_downloads_and_with_it_again_one(
    sharing: Config, model: Model, host: Host
) -> None:
    with redis_server() as redis:
        async with starting(sharing, model, redis.url) as start:
            # Seconds are enough to notice: Redis ends, no replica does.
            a, b = await start(patience=PROMPTLY), await start(patience=PROMPTLY)
            redis.kill()
            await soon(lambda: a.index.state is b.index.state is IndexState.ALONE)
            assert await through(a, host) == PHOTO
            assert await through(b, host) == PHOTO
            assert len(host.asked) == 2
            redis.start()
            await soon(lambda: a.index.state is b.index.state is IndexState.JOINED)

            async def one_finds_it_for_both() -> bool:
                await through(a, host)
                return isinstance(await through(b, host), Image)

            await soon(one_finds_it_for_both)  # a Redis that has just come back may be late once more
