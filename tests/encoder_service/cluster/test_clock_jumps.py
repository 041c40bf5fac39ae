"""The wall clock of a replica jumps by an hour under load: no lease, entry or call ends or gets stuck."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client import EncoderClient
from testing.jumping_clock import BACK, FORWARD, HOUR_S
from testing.photos import photo
from testing.redis_servers import redis_server
from testing.replicas import ReplicaProcess, fleet_of
from tests.calls import begin_submit, encoded, next_state
from tests.cluster_load import alone, encodes, joined, traffic
from tests.cluster_replica import PATIENCE
from tests.pages import ROOT
from tests.waiting import PATIENCE_S, soon

# One hour forward and back, then one hour back and forward.
JUMPS = (FORWARD, BACK, BACK, FORWARD)
# By so much the client's estimate of the server's clock may be off on a busy machine. A jump is an hour.
OFF_S = 60.0
Pair = tuple[ReplicaProcess, ReplicaProcess]


@pytest.fixture(scope="module")
def replicas(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A replica whose clock jumps, and one with a correct clock. A stall of a busy machine ends no lease of theirs."""
    command = tmp_path_factory.mktemp("clock") / "encoder-service"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[str(ROOT), str(ROOT / 'proto')]}\n"
        f"from testing.jumping_clock import main\nsys.exit(main(patience={PATIENCE}))\n"
    )
    command.chmod(0o755)
    with redis_server() as redis:
        settings = {"index": redis.url, "log_format": "json", "executable": command}
        with fleet_of([ReplicaProcess(checkpoint, n, **settings) for n in range(2)]) as (jumper, steady):
            yield jumper, steady


def hours_off(replica: ReplicaProcess) -> set[int]:
    """Return by how many hours the times in its log are off."""
    lines = [json.loads(line) for line in replica.process.lines if line.startswith("{")]
    times = (datetime.fromisoformat(line["time"]) for line in lines)
    return {round((at - datetime.now(UTC)).total_seconds() / HOUR_S) for at in times}


async def test_clock_jumps_under_load_end_no_lease_entry_or_call(replicas: Pair) -> None:
    jumper, _ = replicas
    await joined(replicas)
    before = await encodes(replicas)
    async with traffic(replicas) as load:
        for jump in JUMPS:
            await load.more(6)
            jumper.process.process.send_signal(jump)
            await load.more(6)
            assert not await alone(jumper)
    assert load.errors == []
    assert await encodes(replicas) - before == load.distinct, "no image was encoded twice: leases held"
    await joined(replicas)
    assert hours_off(jumper) == {-1, 0, 1}, "the clock did jump"


async def answered(client: EncoderClient, name: pb.ImageName) -> pb.ImageState:
    """Name one image, and return the answer."""
    call = await begin_submit(client, name)
    state: pb.ImageState = await next_state(call)
    call.cancel()
    return state


async def test_clock_jumps_change_no_duration_and_no_stage_time(replicas: Pair) -> None:
    """An image's file, kept for two minutes, and the moments of a trace."""
    jumper, _ = replicas
    picture = photo(96, 64, 61)
    async with await EncoderClient.connect(jumper.endpoint) as client:
        await client.submit([picture])
        for number, jump in enumerate(JUMPS):
            jumper.process.process.send_signal(jump)
            variant = pb.Variant(max_pixels=65536 + 1024 * number)
            name = pb.ImageName(digest=content_digest(picture), variant=variant)
            assert (await answered(client, name)).state == pb.STATE_QUEUED, "the server still has its file"
            asked_s = time.monotonic()
            rows = await encoded(client, photo(64, 96, 70 + number))
            for began_s in rows.stage_began_s.values():
                assert asked_s - OFF_S < began_s < time.monotonic() + OFF_S


async def test_a_replica_whose_clock_jumped_drains_normally(replicas: Pair) -> None:
    jumper, steady = replicas
    jumper.process.process.send_signal(FORWARD)
    assert await asyncio.to_thread(jumper.process.terminate, PATIENCE_S) == 0

    async def has_left() -> bool:
        found = await asyncio.to_thread(steady.metrics)
        return found.total("index_peers") == 0

    await soon(has_left)
