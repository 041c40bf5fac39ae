"""Faults of a fleet under load: every image gets its rows in time, and is encoded once unless a replica dies."""

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.credentials import NO_CREDENTIALS
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client import EncoderClient, RowRequest, read_images
from prefill_client.transport.channels import Channels
from prefill_client.transport.connection import Connection
from testing.checkpoints import write_checkpoint
from testing.photos import photo, with_comment
from testing.processes import StartError
from testing.redis_servers import RedisServer, redis_server
from testing.replicas import ReplicaProcess, fleet_of, start_all
from testing.traffic import Supply, Traffic
from tests.calls import next_states
from tests.cluster_load import alone, encodes, joined, seeds, steady, traffic
from tests.waiting import soon

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]
# The longest delay after a death: two seconds until the heartbeat expires, and one more encode on a busy machine.
BUMP_S = 8.0
Fleet = Sequence[ReplicaProcess]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def three(checkpoint: Path, redis: RedisServer) -> Iterator[Fleet]:
    with fleet_of([ReplicaProcess(checkpoint, n, index=redis.url) for n in range(3)]) as replicas:
        yield replicas


@pytest.fixture
async def fleet(three: Fleet, redis: RedisServer) -> Fleet:
    """Three replicas that see each other, restarted if the last test killed some."""
    if redis.process is None:
        redis.start()
    await asyncio.to_thread(start_all, three)
    await joined(three)
    return three


async def test_in_the_steady_state_each_image_is_encoded_once_per_fleet(fleet: Fleet) -> None:
    await steady(fleet, prompts=40)


async def test_a_replica_killed_while_encoding_loses_no_image(fleet: Fleet) -> None:
    victim, *others = fleet
    before = await encodes(others)
    async with traffic(fleet, workers=6) as load:
        await load.more(15)
        await soon(lambda: asyncio.to_thread(_encodes_now, victim))
        victim.kill()
        killed_s = time.monotonic()
        await load.more(40)
    assert load.errors == []
    # Images that the victim had encoded are encoded at most once more, at one of the others.
    assert await encodes(others) - before <= load.distinct
    assert max(served.seconds for served in load.since(killed_s)) < BUMP_S


def _encodes_now(replica: ReplicaProcess) -> bool:
    return replica.metrics().total("queue_images") > 0


async def test_a_stream_of_a_killed_replica_continues_elsewhere(fleet: Fleet) -> None:
    base, seed = photo(1280, 720, 1), next(seeds) << 32
    files = [with_comment(base, seed + n) for n in range(24)]  # 1.8 MB of rows each
    before = await encodes(fleet[1:])
    async with await EncoderClient.connect([r.endpoint for r in fleet], timeout_s=30) as client:
        images = await client.submit(files)
        assert [image.error for image in images] == [None] * len(files)
        seen = []
        async with client.fetch(
            [RowRequest(i.digest) for i in images], transports=["inline"], timeout_s=90
        ) as stream:
            async for outcome in stream:
                assert outcome.error is None
                assert outcome.array.shape[0] == images[outcome.index].tokens
                seen.append(outcome.index)
                if len(seen) == 4:
                    fleet[0].kill()
    assert sorted(seen) == list(range(len(files)))
    assert await encodes(fleet[1:]) - before <= len(files)


async def test_leases_of_a_killed_replica_expire(fleet: Fleet) -> None:
    victim, *others = fleet
    base, seed = photo(200, 200, 1), next(seeds) << 32
    files = [with_comment(base, seed + n) for n in range(8)]
    connection = await Connection.open(victim.endpoint, Channels(NO_CREDENTIALS))
    named = read_images(files, connection.description.geometry)
    call: Any = EncoderServiceStub(connection.channel).Submit()
    await call.write(pb.SubmitRequest(open=pb.Caller()))
    names = [pb.ImageName(index=n, digest=image.digest) for n, image in enumerate(named)]
    await call.write(pb.SubmitRequest(names=pb.ImageNames(names=names)))
    assert {state.state for state in await next_states(call, len(names))} == {pb.STATE_NEEDS_BYTES}
    before = await encodes(others)
    async with await EncoderClient.connect([r.endpoint for r in others], timeout_s=30) as client:
        images = await client.submit(files)
        victim.kill()
        killed_s = time.monotonic()
        async with client.fetch([RowRequest(i.digest) for i in images], timeout_s=60) as stream:
            assert [outcome.error async for outcome in stream] == [None] * len(files)
    assert time.monotonic() - killed_s < BUMP_S
    assert await encodes(others) - before == len(files)


async def test_kept_images_of_a_dead_replica_are_found_by_digest(fleet: Fleet) -> None:
    victim, *others = fleet
    base, seed = photo(1280, 720, 2), next(seeds) << 32
    files = [with_comment(base, seed + n) for n in range(12)]
    async with (
        await EncoderClient.connect([r.endpoint for r in fleet], timeout_s=30) as sender,
        await EncoderClient.connect([r.endpoint for r in others], timeout_s=30) as reader,
        await sender.keep(files) as kept,
    ):
        assert [image.error for image in kept.answers] == [None] * len(files)
        victim.kill()
        # The reader knows only the digests, and the sender sends the files of the dead replica again.
        wanted = [RowRequest(image.digest) for image in kept.answers]
        async with reader.fetch(wanted, timeout_s=60, kept=True) as stream:
            assert [outcome.error async for outcome in stream] == [None] * len(files)


async def test_a_restarted_empty_redis_costs_no_image(fleet: Fleet, redis: RedisServer) -> None:
    async with traffic(fleet) as load:
        await load.more(10)
        redis.kill()
        await load.more(20)
        redis.start()
        await load.more(10)
        await joined(fleet)
        await load.more(10)
    assert load.errors == []
    await steady(fleet)


async def test_redis_paused_for_ten_seconds_costs_no_image(fleet: Fleet, redis: RedisServer) -> None:
    async with traffic(fleet) as load:
        await load.more(10)
        redis.pause()
        paused_s = time.monotonic()
        try:
            await load.more(10)
            await asyncio.sleep(max(0.0, paused_s + 10 - time.monotonic()))
        finally:
            redis.resume()
        await joined(fleet)
        await load.more(10)
    assert load.errors == []
    assert max(served.seconds for served in load.since(paused_s)) < BUMP_S
    await steady(fleet)


async def test_redis_out_of_memory_costs_no_image(fleet: Fleet, redis: RedisServer) -> None:
    with redis.client() as client:
        async with traffic(fleet) as load:
            await load.more(10)
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            await load.more(20)
            client.config_set("maxmemory", 0)
            await joined(fleet)
            await load.more(10)
    assert load.errors == []
    await steady(fleet)


async def test_redis_on_a_full_disk_costs_no_image(fleet: Fleet, redis: RedisServer) -> None:
    with redis.client() as client, _unwritable(redis):
        async with traffic(fleet) as load:
            await load.more(10)
            client.config_set("save", "3600 1")  # from now on a failed snapshot stops all writes
            client.bgsave()
            await soon(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
            await load.more(20)
            assert await alone(fleet[0])
            client.config_set("save", "")
            client.config_set("stop-writes-on-bgsave-error", "no")
            await joined(fleet)
            await load.more(10)
    assert load.errors == []
    await steady(fleet)


@contextmanager
def _unwritable(redis: RedisServer) -> Iterator[None]:
    """Remove the folder of the server's snapshots."""
    shutil.rmtree(redis.folder)
    try:
        yield
    finally:
        redis.folder.mkdir()


async def test_a_stale_location_costs_one_try(fleet: Fleet, redis: RedisServer) -> None:
    endpoints, supply = [replica.endpoint for replica in fleet], Supply(seed=next(seeds))
    async with Traffic(endpoints, supply) as load:
        await load.more(10)
    # The locations outlive the replica in Redis; restarted at the same endpoint, it holds none of these images.
    fleet[0].kill()
    await asyncio.to_thread(start_all, fleet)
    supply.shared = 1.0  # only images that were sent before
    async with Traffic(endpoints, supply) as again:
        await again.more(20)
    assert load.errors + again.errors == []


async def test_a_rolling_restart_under_load_loses_nothing(fleet: Fleet) -> None:
    async with traffic(fleet, pause_s=0.02) as load:
        for replica in fleet:
            await load.more(10)
            assert await asyncio.to_thread(replica.process.terminate, 40) == 0
            await asyncio.to_thread(replica.start)
            await joined(fleet)
        await load.more(10)
    assert load.errors == []
    await steady(fleet)


async def test_a_namespace_refuses_another_processor_but_not_another_model(
    fleet: Fleet, redis: RedisServer, tmp_path: Path
) -> None:
    checkpoint = fleet[0]._model
    shutil.copytree(checkpoint, tmp_path / "processor")
    settings = tmp_path / "processor" / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"shortest_edge": 65536', '"shortest_edge": 131072'))
    stranger = ReplicaProcess(tmp_path / "processor", 8, index=redis.url)
    with pytest.raises(StartError, match=r"another model or processor"):
        await asyncio.to_thread(stranger.start)

    other = ReplicaProcess(write_checkpoint(tmp_path / "model", seed=7), 9, index=redis.url)
    with fleet_of([other]):
        assert (await asyncio.to_thread(other.metrics)).total("index_peers") == 0
        await steady(fleet)
        await steady([other])
