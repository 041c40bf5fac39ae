"""How the rows of a Fetch share messages: as few as may be, none too large, and in the form that either side knows."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from encoder_contract.framing import MESSAGE_BYTES, checksum
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.fetch import INSIDE_BYTES
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.limits import NAMES_AT_A_TIME
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from testing.raw_http2 import RawConnection
from tests.calls import all_encoded, bytes_of, collect, connection, stub
from tests.operator_view import numbers, settled
from tests.servers import server_and_client
from tests.waiting import PATIENCE_S

SMALL = [photo(256, 256, 800 + n) for n in range(4)]  # their rows fit into announcements
LARGE = photo(1024, 768, 810)  # its rows do not
SERVICE = "encoder_contract.v1.EncoderService"


async def held(client: EncoderClient, files: Iterable[bytes]) -> list[bytes]:
    """Have images encoded; return their digests."""
    return [rows.digest for rows in await all_encoded(client, [*files])]


def windows(*digests: bytes, rows: int = 0) -> list[pb.FetchImage]:
    return [pb.FetchImage(index=n, digest=digest, row_end=rows) for n, digest in enumerate(digests)]


async def messages_of(
    client: EncoderClient, images: list[pb.FetchImage], *, rows_inside: bool
) -> list[pb.FetchResponse]:
    request = pb.FetchRequest(images=images, rows_inside=rows_inside)
    return [message async for message in (await stub(client)).Fetch(request, timeout=PATIENCE_S)]


def rows_in(messages: list[pb.FetchResponse]) -> dict[int, bytes]:
    """Return the bytes of each window, checked against its announcement, which must come first."""
    announced: dict[int, pb.ImageReady] = {}
    rows: dict[int, bytes] = {}
    for message in messages:
        assert not message.errors, message.errors
        announced |= {ready.index: ready for ready in message.ready}
        rows |= {ready.index: ready.rows for ready in message.ready}
        if message.HasField("rows"):
            rows[message.rows.index] += message.rows.data
    for index, ready in announced.items():
        assert len(rows[index]) == ready.row_bytes
        assert checksum([memoryview(rows[index])]) == ready.checksum
    return rows


async def test_small_rows_that_are_held_come_in_one_message(client: EncoderClient) -> None:
    digests = await held(client, SMALL)
    inside = await messages_of(client, windows(*digests), rows_inside=True)
    assert len(inside) == 1
    beside = await messages_of(client, windows(*digests), rows_inside=False)
    assert rows_in(inside) == rows_in(beside)


async def test_an_older_caller_gets_all_rows_in_messages_of_their_own(client: EncoderClient) -> None:
    """It does not know rows inside announcements. The windows of one image are announced together, as ever allowed."""
    digests = await held(client, [SMALL[0], LARGE])
    images = windows(*digests * 3)
    messages = await messages_of(client, images, rows_inside=False)
    assert not any(ready.rows for message in messages for ready in message.ready)
    assert not any(message.HasField("rows") for message in messages if message.ready)
    assert len(rows_in(messages)) == len(images)
    assert next(len(message.ready) for message in messages if message.ready) == 3


@asynccontextmanager
async def older_server(server: Server, client: EncoderClient) -> AsyncIterator[str]:
    """Yield the endpoint of `server` as it was before rows came inside announcements: it ignores the field."""
    newer = (await connection(client)).channel

    async def describe(request: bytes, _context: object) -> bytes:
        return await newer.unary_unary(f"/{SERVICE}/Describe")(request)

    async def fetch(request: bytes, _context: object) -> AsyncIterator[bytes]:
        message = pb.FetchRequest.FromString(request)
        assert message.rows_inside, "the client is a newer one"
        message.ClearField("rows_inside")
        call: Any = newer.unary_stream(f"/{SERVICE}/Fetch")(message.SerializeToString())
        async for answer in call:
            yield answer

    older = grpc.aio.server()
    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
    }
    older.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = older.add_insecure_port("127.0.0.1:0")
    await older.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await older.stop(None)


async def test_a_newer_client_reads_rows_of_an_older_server(server: Server, client: EncoderClient) -> None:
    digests = await held(client, [*SMALL, LARGE])
    requests = [RowRequest(digest) for digest in digests] + [RowRequest(digests[0], row_begin=3, row_end=9)]
    async with older_server(server, client) as endpoint, await EncoderClient.connect(endpoint) as newer:
        found = await collect(newer, requests, transports=["inline"])
    expected = await collect(client, requests, transports=["inline"])
    assert bytes_of(found) == bytes_of(expected)


async def test_no_message_has_more_than_its_share_of_windows_and_bytes(client: EncoderClient) -> None:
    digests = await held(client, [*SMALL, LARGE])
    for images, announcing in (
        (windows(*[digests[0]] * 200, rows=1), 4),
        (windows(*digests[:4] * 25), 13),  # eight in each: a mebibyte
        (windows(*digests * 5), 3 + 5),  # each large window has one of its own
    ):
        messages = await messages_of(client, images, rows_inside=True)
        assert len(rows_in(messages)) == len(images)
        for message in messages:
            assert len(message.ready) <= NAMES_AT_A_TIME
            assert sum(len(ready.rows) for ready in message.ready) <= MESSAGE_BYTES
            assert all(bool(ready.rows) == (ready.row_bytes <= INSIDE_BYTES) for ready in message.ready)
        assert sum(not message.HasField("rows") for message in messages) <= announcing


async def test_errors_of_windows_come_with_the_rows_of_others(client: EncoderClient) -> None:
    (digest,) = await held(client, SMALL[:1])
    images = windows(digest, digest, digest, rows=2)
    images[1].row_end = 10_000
    (message,) = await messages_of(client, images, rows_inside=True)
    assert [ready.index for ready in message.ready] == [0, 2]
    assert [error.index for error in message.errors] == [1]


async def test_an_unread_fetch_of_small_rows_keeps_two_messages(config: Config, model: Model) -> None:
    async with (
        server_and_client(config, model, drain_s=1) as (server, client),
        await RawConnection.open(server.endpoint, window=0) as reader,
    ):
        digests = await held(client, SMALL[:1])
        server._listener._gate._reader_idle_s = 2.0  # not before: the other calls read, however slowly
        before = (await numbers(server)).total("transfer_bytes_total", transport="inline")
        request = pb.FetchRequest(images=windows(*digests * 512), rows_inside=True)  # 64 MiB
        await reader.call(f"/{SERVICE}/Fetch", request.SerializeToString())
        await settled(server, "calls_total", 1, call="fetch", status="DEADLINE_EXCEEDED")
        assert server.store.stats().pins == 0
        written = (await numbers(server)).total("transfer_bytes_total", transport="inline") - before
        assert 0 < written <= 2 * MESSAGE_BYTES
