"""Put through a caller's file: which files the server opens, and which extents it reads."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from encoder_contract.framing import Checksum
from encoder_contract.segment_file import segment_proof
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.put_stream import OutgoingSegment
from tests.calls import stub
from tests.put_calls import PRODUCER, RawPut, fetch_put, new_image, nothing_is_left, rows_for
from tests.waiting import soon

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, CANCELLED = 3, 4, 8, 13, 1
HELD, YOURS, WAIT, FAILED = pb.HOLDING_HELD, pb.HOLDING_YOURS, pb.HOLDING_WAIT, pb.HOLDING_FAILED


@pytest.mark.parametrize("kind", ["fifo", "link", "elsewhere", "unproven", "other"])
async def test_a_server_opens_only_the_files_that_its_callers_could_open(
    start: Any, kind: str, tmp_path: Any
) -> None:
    server, client = await start()
    folder = server.store.segment.path.parent
    path = (tmp_path if kind == "elsewhere" else folder) / f"encoder-client-test-{os.getpid()}-{kind}"
    proof = segment_proof(server.endpoint, str(server.store.segment.path))
    assert proof
    try:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(server.store.segment.path)
        elif kind != "other":
            path.write_bytes(b"rows")
        call = (await stub(client)).Put(timeout=60)
        opening = pb.PutOpen(
            producer=PRODUCER.to_message(),
            segment=str(path),
            shm_proof=b"0" * 16 if kind == "unproven" else proof,
        )
        await call.write(pb.PutRequest(open=opening))
        assert not (await call.read()).opened.shm
        call.cancel()
    finally:
        path.unlink(missing_ok=True)


async def test_a_truncated_segment_fails_only_the_image(start: Any) -> None:
    server, client = await start()
    image, rows = new_image(), rows_for(client, 10).tobytes()
    segment = OutgoingSegment.beside(str(server.store.segment.path))
    assert segment is not None
    proof = segment_proof(server.endpoint, str(server.store.segment.path))
    call = await RawPut.open(client, segment=segment.path, shm_proof=proof)
    segment.unlink()
    sums = Checksum()
    assert segment.reserve(len(rows))
    extent = segment.write(memoryview(rows), 0, len(rows), sums)
    whole = pb.PutRequest(shared=pb.PutShared(index=0, extent=extent))
    ended = pb.PutRequest(end=pb.PutEnd(index=0, checksum=sums.value))
    os.truncate(segment._file, len(rows) // 2)
    assert (await call.name(client, image)).holding == YOURS
    await call.call.write(whole)
    state = await call.state()
    assert (state.holding, state.error.code) == (FAILED, INVALID_ARGUMENT)
    os.truncate(segment._file, len(rows))
    assert (await call.name(client, image)).holding == YOURS
    for message in (whole, ended):
        await call.call.write(message)
    assert (await call.state()).error.code == INTERNAL, "the truncated part reads as zeros"
    segment.close()
    call.call.cancel()
    await soon(lambda: nothing_is_left(server))


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Limit the size of files of this process: growing a file fails in the same call as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_rows_go_inline_while_shared_memory_is_full(
    start: Any,
) -> None:
    server, client = await start()
    images, rows = [new_image() for _ in range(3)], [rows_for(client, seed) for seed in range(3)]
    async with client.put(PRODUCER, transports=["shm"]) as session:
        answers = await session.name(images)
        (opened,) = session._streams.values()
        segment = opened.result()._segment
        with largest_file(4096):
            assert (await session.put(answers[0], rows[0])).state == "held"
            assert segment._map is None, "the rows were not sent inline"
        assert (await session.put(answers[1], rows[1])).state == "held"
        assert segment._map is not None
        with largest_file(4096):  # the existing segment is reused
            assert (await session.put(answers[2], rows[2])).state == "held"
    for image, sent in zip(images, rows, strict=True):
        assert np.array_equal((await fetch_put(client, image)).array, sent)
    await soon(lambda: nothing_is_left(server))


EXTENTS = {
    "more than the rows": pb.Extent(offset=0, length=1 << 40),
    "beyond any file": pb.Extent(offset=1 << 63, length=1),
    "beyond this file": pb.Extent(offset=1 << 40, length=8),
}


@pytest.mark.parametrize("extent", EXTENTS.values(), ids=list(EXTENTS))
@pytest.mark.parametrize("opened", [True, False])
async def test_an_extent_outside_the_segment_fails_its_image(
    start: Any, extent: pb.Extent, opened: bool
) -> None:
    server, client = await start()
    segment = OutgoingSegment.beside(str(server.store.segment.path))
    assert segment is not None
    proof = segment_proof(server.endpoint, str(server.store.segment.path))
    fields = {"segment": segment.path, "shm_proof": proof} if opened else {}
    call = await RawPut.open(client, **fields)
    segment.unlink()
    assert (await call.name(client, new_image())).holding == YOURS
    await call.call.write(pb.PutRequest(shared=pb.PutShared(index=0, extent=extent)))
    assert (await call.state()).error.code == INVALID_ARGUMENT
    segment.close()
    call.call.cancel()
    await soon(lambda: nothing_is_left(server))
