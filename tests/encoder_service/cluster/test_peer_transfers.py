"""Transfers from slow or faulty peers: each ends in time, and one peer does not block the others."""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from encoder_contract.errors import EncoderError, OverloadedError, UnavailableError
from encoder_contract.framing import checksum, frame
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.cluster.cluster import Location
from encoder_service.cluster.leases import Leases
from encoder_service.cluster.peers import FETCH, MIN_BYTES_PER_S, SILENCE_S, Peers
from encoder_service.cluster.redis_cluster import MAX_TRANSFERS, MAX_TRANSFERS_PER_PEER, Transfers
from encoder_service.keys import ImageKey, Recipe
from encoder_service.store import Pin, Store
from testing.holding import cluster_of
from testing.stored import write
from tests.index_replicas import redis_settings
from tests.small_store import PAGE_BYTES, WIDTH, make_store, read
from tests.waiting import PATIENCE_S, soon

GRID = Grid(1, 16, 16)
OURS = Recipe(b"m" * 32, b"p" * 32, "float32"), WIDTH, 4 * WIDTH, Geometry(16, 2, 65536, 1 << 24)
IMAGE = ImageKey(b"a" * 32, b"d" * 32)
BYTES = 64 * 4 * WIDTH
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


def rows_of(*parts: bytes) -> list[bytes]:
    """Return messages with these parts of the rows."""
    return [frame(0, [memoryview(part)]) for part in parts]


def sending(*messages: bytes, endless: bytes = b"") -> Answer:
    """Return an answer of these messages. The last one comes again and again, if there is one."""

    async def answer() -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        while endless:
            yield endless
            await asyncio.sleep(SILENCE_S / 8)

    return answer


ROWS = rows_of(bytes(BYTES))
SOUND = sending(ready(), *ROWS)


@asynccontextmanager
async def peer(
    answer: Answer, endpoint: str = "127.0.0.1:0", asked: list[pb.FetchRequest] | None = None
) -> AsyncIterator[str]:
    """Run a peer that gives every Fetch the same answer; yield its endpoint. Requests are added to `asked`."""

    async def fetch(request: bytes, _context: object) -> AsyncIterator[bytes]:
        if asked is not None:
            asked.append(pb.FetchRequest.FromString(request))
        async for message in answer():
            yield message

    service, _, method = FETCH.strip("/").partition("/")
    server = grpc.aio.server()
    handlers = {method: grpc.unary_stream_rpc_method_handler(fetch)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port(endpoint)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def fetched(answer: Answer, silence_s: float = SILENCE_S) -> bytes:
    """Return the rows that a peer with this answer sends, into memory in two pieces."""
    peers, rows = Peers(*OURS, silence_s=silence_s), memoryview(bytearray(b"\1" * BYTES))
    try:
        async with peer(answer) as endpoint:
            found = await peers.fetch(Location("peer", endpoint, GRID), IMAGE, [rows[:999], rows[999:]])
            assert found == checksum([rows])
            return bytes(rows)
    finally:
        await peers.close()


@contextmanager
def reserved_endpoint() -> Iterator[str]:
    """Yield an endpoint at which nothing listens; a gRPC server may, no other process can."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # gRPC sets it too
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_a_replica_that_starts_where_another_was_is_asked_at_once() -> None:
    rows = [memoryview(bytearray(BYTES))]
    # A channel that was refused connects again only after this time.
    peers = Peers(*OURS, silence_s=PATIENCE_S)
    try:
        with reserved_endpoint() as endpoint:
            with pytest.raises(UnavailableError, match="refused"):
                await peers.fetch(Location("stopped", endpoint, GRID), IMAGE, rows)
            async with peer(SOUND, endpoint):
                with pytest.raises(UnavailableError, match="refused"):
                    await peers.fetch(Location("stopped", endpoint, GRID), IMAGE, rows)
                assert await peers.fetch(Location("started", endpoint, GRID), IMAGE, rows) == checksum(rows)
    finally:
        await peers.close()


async def test_a_port_that_could_not_be_reached_is_tried_again_after_a_restart() -> None:
    rows = [memoryview(bytearray(BYTES))]
    asked: list[pb.FetchRequest] = []

    async def unreachable_or_inline() -> AsyncIterator[bytes]:
        if asked[-1].transports:
            yield ready(ticket=pb.Ticket(port=int(nobody.rpartition(":")[2]), secret=b"s" * 16))
        else:
            async for message in SOUND():
                yield message

    peers = Peers(*OURS, silence_s=PATIENCE_S)
    try:
        with reserved_endpoint() as nobody:
            async with peer(unreachable_or_inline, asked=asked) as endpoint:
                for replica_id in ("first", "first", "second"):
                    await peers.fetch(Location(replica_id, endpoint, GRID), IMAGE, rows)
    finally:
        await peers.close()
    # The first fetch of each start tries its port, and reads the rows inline when that fails.
    assert [bool(request.transports) for request in asked] == [True, False, False, True, False]


@pytest.mark.parametrize("answer", [SOUND, sending(ready(rows=bytes(BYTES)))], ids=["beside", "inside"])
async def test_rows_of_a_correct_peer_are_accepted(answer: Answer) -> None:
    assert await fetched(answer, PATIENCE_S) == bytes(BYTES)


async def test_damaged_rows_of_a_peer_are_refused() -> None:
    with pytest.raises(EncoderError, match="arrived damaged"):
        await fetched(sending(ready(rows=b"\1" + bytes(BYTES - 1))), PATIENCE_S)


STALLS: dict[str, Answer] = {
    "trickles": sending(ready(), endless=rows_of(b"\0")[0]),
    "sends empty frames": sending(ready(), endless=rows_of(b"")[0]),
    "announces again and again": sending(endless=ready()),
    "announces nothing": sending(endless=rows_of(b"")[0]),
}


@pytest.mark.parametrize("stall", STALLS)
async def test_a_transfer_without_progress_fails_in_time(stall: str) -> None:
    async with asyncio.timeout(5 * MOST_S):
        began = time.monotonic()
        with pytest.raises(EncoderError) as refusal:
            await fetched(STALLS[stall])
    if stall == "trickles":
        assert isinstance(refusal.value, UnavailableError)
        assert time.monotonic() - began >= BYTES / MIN_BYTES_PER_S


def transfers_from(store: Store, fetch: Callable[..., Awaitable[int]] | None = None) -> Transfers:
    """Return transfers from peers, whose rows `fetch` writes if it is given; their index was never joined."""
    peers = Peers(*OURS, silence_s=PATIENCE_S)
    if fetch is not None:
        peers.fetch = fetch  # type: ignore[method-assign, assignment]
    index = cluster_of(redis_settings("redis://127.0.0.1:1", "none")).index
    return Transfers(index, Leases(index, renew_s=1.0), peers, store)


def named(number: int) -> ImageKey:
    return replace(IMAGE, address=number.to_bytes(32, "big"))


async def test_transfers_into_a_full_store_ask_no_peer_before_there_is_room(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=1, wait_s=4 * PATIENCE_S)
    pin = write(store, b"pinned", torch.zeros(64, WIDTH), GRID)
    asked: list[bytes] = []

    async def fetch(_location: Location, key: ImageKey, into: Sequence[memoryview]) -> int:
        asked.append(key.address)
        return checksum(into)

    transfers = transfers_from(store, fetch)

    async def fetch_into_store(number: int) -> None:
        places = (Location(f"peer-{number}", "peer", GRID),)
        fetched_pin = await transfers.fetch(named(number), places, "a tenant")
        assert fetched_pin is not None
        assert fetched_pin.entry.holder == "a tenant"
        fetched_pin.release()

    fetches = [asyncio.ensure_future(fetch_into_store(number)) for number in range(MAX_TRANSFERS)]
    try:
        await soon(lambda: store.stats().waits >= MAX_TRANSFERS)
        assert not asked
        assert not any(task.done() for task in fetches)
        assert not any("cluster" in thread.name for thread in threading.enumerate()), "no thread waits"
    finally:
        pin.release()
        await asyncio.gather(*fetches)
        await transfers.close()
        store.close()
    assert len(asked) == MAX_TRANSFERS


async def test_a_store_that_stays_full_refuses_a_transfer_in_time(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=1, wait_s=0.2)
    with write(store, b"pinned", torch.zeros(64, WIDTH), GRID), pytest.raises(OverloadedError):
        await transfers_from(store).fetch(named(0), (Location("peer", "127.0.0.1:1", GRID),), "")
    assert store.stats().refusals == 1
    store.close()


async def test_a_slow_peer_leaves_turns_for_others(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=8 * MAX_TRANSFERS)
    running: set[bytes] = set()

    async def fetch(location: Location, key: ImageKey, into: Sequence[memoryview]) -> int:
        if location.endpoint == "slow":
            running.add(key.address)
            await asyncio.Event().wait()
        return checksum(into)

    transfers = transfers_from(store, fetch)
    names = itertools.count()

    def fetch_from_peer(endpoint: str) -> Awaitable[object]:
        return transfers.fetch(named(next(names)), (Location(endpoint, endpoint, GRID),), "")

    slow = [asyncio.ensure_future(fetch_from_peer("slow")) for _ in range(4 * MAX_TRANSFERS)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(running) < MAX_TRANSFERS_PER_PEER:
                await asyncio.sleep(0.01)
            assert all(await asyncio.gather(*(fetch_from_peer("quick") for _ in range(4 * MAX_TRANSFERS))))
        assert len(running) == MAX_TRANSFERS_PER_PEER < MAX_TRANSFERS
        used = store.stats().tiers[0].used_bytes
        await transfers.close()
        assert store.stats().tiers[0].used_bytes == used - MAX_TRANSFERS_PER_PEER * PAGE_BYTES
    finally:
        await asyncio.gather(*slow, return_exceptions=True)
        store.close()


async def cut_off() -> AsyncIterator[bytes]:
    for message in (ready(), *rows_of(bytes(BYTES // 2))):
        yield message
    raise RuntimeError("the peer died")


def announcing(**changes: Any) -> Answer:
    """Return an answer with a changed announcement, then the rows of the image."""
    return sending(ready(**changes), *ROWS)


OTHERS = pb.FetchResponse(ready=[pb.ImageReady(index=1 + n) for n in range(1000)]).SerializeToString()
LIES: dict[str, Answer] = {
    "another address": announcing(address=b"b" * 32),
    "another grid": announcing(grid=pb.Grid(t=1, h=2, w=2)),
    "more rows": announcing(row_end=65, row_bytes=BYTES + 64),
    "fewer rows": announcing(row_end=63, row_bytes=BYTES - 64),
    "a window": announcing(row_begin=1),
    "a huge size": announcing(row_bytes=1 << 40),
    "no size": announcing(row_bytes=0),
    "another width": announcing(width=2 * WIDTH),
    "another element type": announcing(dtype="bfloat16"),
    "another checksum": announcing(checksum=7),
    "a ticket of no port": announcing(ticket=pb.Ticket(port=1, secret=bytes(16))),
    "a byte too many": sending(ready(), *rows_of(bytes(BYTES - 1), bytes(2))),
    "a message too many in one": sending(ready(), *rows_of(bytes(2 * BYTES))),
    "a byte too few": sending(ready(), *rows_of(bytes(BYTES - 1))),
    "a wrong byte": sending(ready(), *rows_of(bytes(BYTES - 1), b"\1")),
    "malformed": sending(b"\xff"),
    "malformed rows": sending(ready(), b"\xff"),
    "no rows": sending(ready()),
    "other images before its rows": sending(ready(), OTHERS, *ROWS),
    "its death": cut_off,
}


@pytest.mark.attack("rows of another size, type or image from a peer, or a part of them")
@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
async def test_what_a_lying_peer_sends_is_never_held_and_costs_no_page(lie: Answer, tmp_path: Path) -> None:
    store, honest = make_store(tmp_path, host_pages=1), b"\0" * BYTES
    transfers = transfers_from(store)
    try:
        async with peer(lie) as liar, peer(SOUND) as other:
            assert await transfers.fetch(IMAGE, (Location("liar", liar, GRID),), "") is None
            stats = store.stats()
            assert (stats.tiers[0].used_bytes, stats.tiers[0].writes, stats.pins) == (0, 0, 0)
            assert not store.contains(IMAGE.address)
            places = (Location("liar", liar, GRID), Location("honest", other, GRID))
            pin = await transfers.fetch(IMAGE, places, "")
            assert pin is not None, "another location has them"
            assert read(pin) == honest
            assert pin.handle().generation
            pin.release()
    finally:
        await transfers._peers.close()
        store.close()


@pytest.mark.parametrize("grid", [Grid(1, 0, 0), Grid(1, 3, 16), Grid(2, 16, 16), Grid(1, 1 << 20, 1 << 20)])
async def test_a_grid_that_no_image_has_reserves_nothing(grid: Grid, tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=1)
    transfers = transfers_from(store)
    async with peer(SOUND) as endpoint:
        assert await transfers.fetch(IMAGE, (Location("peer", endpoint, grid),), "") is None
    assert transfers.quarantined == {"peer"}
    assert store.stats().tiers[0].used_bytes == 0
    store.close()


async def test_rows_of_another_writer_win_and_the_transfers_pages_are_freed(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=4)
    other: list[Pin] = []

    async def fetch(_location: Location, key: ImageKey, into: Sequence[memoryview]) -> int:
        other.append(write(store, key.address, torch.ones(64, WIDTH), GRID))
        return checksum(into)

    pin = await transfers_from(store, fetch).fetch(IMAGE, (Location("peer", "peer", GRID),), "")
    assert pin is not None
    assert pin.entry is other[0].entry
    assert store.stats().tiers[0].used_bytes == PAGE_BYTES
    store.close()
