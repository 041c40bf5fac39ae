"""Two thousand damaged files of every format against a server process: rows or one typed error each, and no trace."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import Status
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from testing.photos import damaged, photo
from tests.calls import finish
from tests.processes import running
from tests.waiting import PATIENCE_S

# A call that has files refused is answered late: several go on at a time.
FILES, CALL, CALLS = 2000, 50, 4
# What is wrong with a file is its sender's fault, and nothing else is: no INTERNAL, no RESOURCE_EXHAUSTED.
EXPECTED = {"rows", Status.INVALID_ARGUMENT.value}
# After the first quarter pools and caches are full. What is left is the list of refused addresses (4096 at most, a
# few hundred bytes each) and the allocator's slack.
MAX_GROWTH_BYTES = 16 << 20


@pytest.fixture(scope="module")
def small_images(kept_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint that resizes every image to 16 patches, so that the tower costs little."""
    size = {"shortest_edge": 1024, "longest_edge": 4096}
    return kept_checkpoint(preprocessor={"size": size})


async def submit(stub: Any, files: list[bytes]) -> dict[int, int | str]:
    """Send every file, unread, and return the code of each that failed; `EncoderClient` would stop most of them."""
    call = stub.Submit(timeout=PATIENCE_S)
    await call.write(pb.SubmitRequest(open=pb.Caller()))
    names = [pb.ImageName(index=index, digest=content_digest(file)) for index, file in enumerate(files)]
    await call.write(pb.SubmitRequest(names=pb.ImageNames(names=names)))
    outcomes: dict[int, int | str] = {}
    answered: set[int] = set()
    while len(answered) < len(files):
        for state in (await call.read()).states:
            if state.state == pb.STATE_NEEDS_BYTES:
                piece = pb.ImageBytes(index=state.index, data=files[state.index], last=True)
                await call.write(pb.SubmitRequest(bytes=[piece]))
                continue
            assert state.index not in answered, "an image is answered once"
            answered.add(state.index)
            if state.state == pb.STATE_FAILED:
                outcomes[state.index] = state.error.code
    await finish(call)
    return outcomes


async def fetch(stub: Any, files: dict[int, bytes]) -> dict[int, int | str]:
    """Fetch every file's rows inline and return the one outcome of each."""
    images = [pb.FetchImage(index=index, digest=content_digest(file)) for index, file in files.items()]
    outcomes: dict[int, int | str] = {}
    async for message in stub.Fetch(pb.FetchRequest(images=images), timeout=PATIENCE_S):
        for found in (*message.ready, *message.errors):
            assert found.index not in outcomes, "an image has one outcome"
            outcomes[found.index] = "rows" if found in message.ready else found.code
    return outcomes


async def outcomes_of(stub: Any, seeds: range) -> list[int | str]:
    files = dict(enumerate(damaged(seed) for seed in seeds))
    files[len(files)] = photo(300, 200, seeds.start)  # among the damaged ones, a sound one
    outcomes = await submit(stub, list(files.values()))
    outcomes |= await fetch(stub, {index: file for index, file in files.items() if index not in outcomes})
    assert outcomes.keys() == files.keys()
    assert outcomes[len(files) - 1] == "rows"
    return list(outcomes.values())


@pytest.mark.attack("an image file that is damaged or truncated, or has a false header")
async def test_2000_damaged_files_end_in_rows_or_one_error_each(small_images: Path) -> None:
    counts: Counter[int | str] = Counter()
    resident: list[int] = []
    with running(small_images, source_gib=0.004) as server:  # full after a few calls
        process = psutil.Process(server.process.pid)
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            stub = EncoderServiceStub(channel)
            for first in range(0, FILES, CALLS * CALL):
                begins = range(first, first + CALLS * CALL, CALL)
                asked = [outcomes_of(stub, range(begin, begin + CALL)) for begin in begins]
                for outcomes in await asyncio.gather(*asked):
                    counts.update(outcomes)
                resident.append(process.memory_info().rss - process.memory_info().shared)
        assert server.terminate() == 0
    assert set(counts) == EXPECTED, counts
    assert min(counts.values()) > FILES // 10, f"a test of both outcomes: {counts}"
    assert resident[-1] - resident[len(resident) // 4] < MAX_GROWTH_BYTES, resident
