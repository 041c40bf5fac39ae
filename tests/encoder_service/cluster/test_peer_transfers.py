"""Transfers from slow or faulty peers: each ends in time, and one peer does not block the others."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, UnavailableError
from encoder_contract.framing import checksum, frame
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.cluster.cluster import Location, Locations
from encoder_service.cluster.leases import Leases
from encoder_service.cluster.peers import FETCH, MIN_BYTES_PER_S, SILENCE_S, Peers
from encoder_service.cluster.redis_cluster import MAX_TRANSFERS, MAX_TRANSFERS_PER_PEER, Transfers
from encoder_service.keys import ImageKey, Recipe
from encoder_service.store import Store
from testing.holding import cluster_of
from tests.index_replicas import redis_settings
from tests.small_store import WIDTH, make_store
from tests.waiting import PATIENCE_S

GRID = Grid(1, 16, 16)
OURS = Recipe(b"m" * 32, b"p" * 32, "float32"), WIDTH, torch.float32, Geometry(16, 2, 65536, 1 << 24)
IMAGE = ImageKey(b"a" * 32, b"d" * 32)
BYTES = 64 * WIDTH * torch.float32.itemsize
Answer = Callable[[], AsyncIterator[bytes]]
# The longest time of a correct answer.
MOST_S = 2 * SILENCE_S + BYTES / MIN_BYTES_PER_S


def ready(**changes: Any) -> bytes:
    fields = {
        "address": b"a" * 32,
        "grid": pb.Grid(t=GRID.t, h=GRID.h, w=GRID.w),
        "row_end": 64,
        "width": WIDTH,
        "dtype": "float32",
        "row_bytes": BYTES,
        "checksum": checksum([memoryview(bytes(BYTES))]),
    }
    return pb.FetchResponse(ready=[pb.ImageReady(**fields | changes)]).SerializeToString()  # type: ignore[arg-type]


async def sound() -> AsyncIterator[bytes]:
    yield ready()
    yield frame(0, [memoryview(bytes(BYTES))])


async def trickling() -> AsyncIterator[bytes]:
    yield ready()
    while True:
        yield frame(0, [memoryview(b"\0")])
        await asyncio.sleep(SILENCE_S / 8)


async def empty_frames() -> AsyncIterator[bytes]:
    yield ready()
    while True:
        yield frame(0, [memoryview(b"")])
        await asyncio.sleep(SILENCE_S / 8)


async def repeated_announcements() -> AsyncIterator[bytes]:
    while True:
        yield ready()
        await asyncio.sleep(SILENCE_S / 8)


async def rows_before_the_announcement() -> AsyncIterator[bytes]:
    while True:
        yield frame(0, [memoryview(b"")])
        await asyncio.sleep(SILENCE_S / 8)


async def another_grid() -> AsyncIterator[bytes]:
    yield ready(grid=pb.Grid(t=1, h=2, w=2))
    yield frame(0, [memoryview(bytes(BYTES))])


async def malformed_message() -> AsyncIterator[bytes]:
    yield b"\xff"


async def malformed_message_among_rows() -> AsyncIterator[bytes]:
    yield ready()
    yield b"\xff"


@asynccontextmanager
async def peer(answer: Answer) -> AsyncIterator[str]:
    """Run a peer that gives every Fetch the same answer; yield its endpoint."""

    async def fetch(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        async for message in answer():
            yield message

    service, _, method = FETCH.strip("/").partition("/")
    server = grpc.aio.server()
    handlers = {method: grpc.unary_stream_rpc_method_handler(fetch)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def fetched(answer: Answer, silence_s: float = SILENCE_S) -> tuple[Grid, Tensor]:
    peers = Peers(*OURS, silence_s=silence_s)
    try:
        async with peer(answer) as endpoint:
            return await peers.fetch(endpoint, IMAGE)
    finally:
        await peers.close()


async def test_rows_of_a_correct_peer_are_accepted() -> None:
    grid, rows = await fetched(sound, PATIENCE_S)
    assert (grid, rows.shape) == (GRID, (64, WIDTH))


@pytest.mark.parametrize(
    "answer",
    [trickling, empty_frames, repeated_announcements, rows_before_the_announcement, another_grid],
)
async def test_a_transfer_without_progress_fails_in_time(answer: Answer) -> None:
    async with asyncio.timeout(5 * MOST_S):
        began = time.monotonic()
        with pytest.raises(EncoderError) as refusal:
            await fetched(answer)
    if answer is trickling:
        assert isinstance(refusal.value, UnavailableError)
        assert time.monotonic() - began >= BYTES / MIN_BYTES_PER_S


def transfers_from(fetch: Callable[..., Awaitable[tuple[Grid, Tensor]]], store: Store) -> Transfers:
    """Return transfers whose peers answer with `fetch`, and with an index that was never joined."""
    peers = Peers(*OURS)
    peers.fetch = fetch  # type: ignore[method-assign, assignment]
    index = cluster_of(redis_settings("redis://127.0.0.1:1", "none")).index
    return Transfers(index, Leases(index, renew_s=1.0), peers, store)


async def test_transfers_into_a_full_store_do_not_block_other_threads(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=1, wait_s=4 * PATIENCE_S)
    pin = store.put(b"pinned", torch.zeros(64, WIDTH), GRID)

    async def fetch(_endpoint: str, _key: ImageKey) -> tuple[Grid, Tensor]:
        return GRID, torch.zeros(64, WIDTH)

    transfers = transfers_from(fetch, store)
    # Like a small machine: fewer threads to hash and copy than transfers.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    keys = [replace(IMAGE, address=n.to_bytes(32, "big")) for n in range(MAX_TRANSFERS)]
    places = [(Location(f"peer-{n}", "peer", GRID),) for n in range(MAX_TRANSFERS)]

    async def fetch_into_store(key: ImageKey, places: Locations) -> None:
        fetched_pin = await transfers.fetch(key, places, "a tenant")
        assert fetched_pin is not None
        assert fetched_pin.entry.holder == "a tenant"
        fetched_pin.release()

    fetches = [asyncio.ensure_future(fetch_into_store(*each)) for each in zip(keys, places, strict=True)]
    try:
        await asyncio.sleep(0.5)
        await asyncio.wait_for(asyncio.to_thread(bytes), PATIENCE_S)
        assert not any(task.done() for task in fetches)
    finally:
        pin.release()
        await asyncio.gather(*fetches)
        transfers.close()
        store.close()


async def test_a_slow_peer_leaves_turns_for_others(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=8 * MAX_TRANSFERS)
    running: set[bytes] = set()

    async def fetch(endpoint: str, key: ImageKey) -> tuple[Grid, Tensor]:
        if endpoint == "slow":
            running.add(key.address)
            await asyncio.Event().wait()
        return GRID, torch.zeros(64, WIDTH)

    transfers = transfers_from(fetch, store)
    names = itertools.count()

    def fetch_from_peer(endpoint: str) -> Awaitable[object]:
        return transfers.fetch(
            replace(IMAGE, address=next(names).to_bytes(32, "big")), (Location(endpoint, endpoint, GRID),), ""
        )

    slow = [asyncio.ensure_future(fetch_from_peer("slow")) for _ in range(4 * MAX_TRANSFERS)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(running) < MAX_TRANSFERS_PER_PEER:
                await asyncio.sleep(0.01)
            assert all(await asyncio.gather(*(fetch_from_peer("quick") for _ in range(4 * MAX_TRANSFERS))))
        assert len(running) == MAX_TRANSFERS_PER_PEER < MAX_TRANSFERS
    finally:
        for task in (*slow, *transfers._running.values()):
            task.cancel()
        store.close()


@pytest.mark.parametrize("answer", [malformed_message, malformed_message_among_rows])
async def test_a_malformed_message_of_a_peer_fails_the_transfer(answer: Answer) -> None:
    with pytest.raises(EncoderError):
        await fetched(answer, PATIENCE_S)
