"""Rows over the rows port: the same bytes as inline, tickets that work once, and faults of either side."""

import asyncio
import fcntl
import select
import socket
import struct
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from encoder_contract.errors import StaleHandleError
from encoder_contract.rows_connection import CONNECT_S, SIZE, TICKET_BYTES, UNKNOWN_TICKETS, RowsConnections
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.fetch import SENT_BESIDE
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.limits import NAMES_AT_A_TIME, Budget
from encoder_service.rows_port import ACCEPTED_AT_ONCE, BACKLOG, HOST_SHARE, UNSENT_BYTES, RowsPort
from prefill_client import EncoderClient, RowRequest
from prefill_client.transport import Receiver, receivers
from prefill_client.transport.channels import Channels
from testing.photos import photo
from testing.tcp_proxy import ANOTHER_HOST, TcpProxy
from tests.calls import bytes_of, collect, stub, submitted
from tests.closed_port import closed_port
from tests.servers import server_and_client, server_of
from tests.waiting import PATIENCE_S, soon

ROWS: dict[str, Any] = {"rows_listen": "127.0.0.1:0"}
PHOTOS = [photo(256 + 32 * n, 256, n) for n in range(8)]
LARGE = photo(1024, 768, 99)


@pytest.fixture
async def server(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server with a rows port."""
    async with server_of(config, model, **ROWS) as server:
        yield server


def port_of(server: Server) -> RowsPort:
    assert server._rows_port is not None
    return server._rows_port


@asynccontextmanager
async def raw_fetch(
    client: EncoderClient, requests: list[RowRequest], *, rows_inside: bool = False
) -> AsyncIterator[Any]:
    """Make a Fetch whose tickets nobody presents yet."""
    call = (await stub(client)).Fetch(
        pb.FetchRequest(
            images=[request.to_message(index) for index, request in enumerate(requests)],
            transports=[pb.TRANSPORT_TCP],
            grace_ms=10_000,
            rows_inside=rows_inside,
        ),
        timeout=PATIENCE_S,
    )
    try:
        yield call
    finally:
        call.cancel()


async def first_ready(call: Any) -> pb.ImageReady:
    (ready,) = (await call.read()).ready
    return ready


def connect(server: Server, ticket: bytes) -> socket.socket:
    """Present a ticket on a connection of its own."""
    connection = socket.create_connection(("127.0.0.1", port_of(server).port), PATIENCE_S)
    connection.sendall(ticket)
    return connection


def received(connection: socket.socket, size: int = 1 << 62) -> bytes:
    """Receive `size` bytes, or what comes until the server closes the connection."""
    parts = []
    with suppress(ConnectionResetError):  # the server does not read what follows an invalid ticket
        while size and (data := connection.recv(min(size, 1 << 20))):
            parts.append(data)
            size -= len(data)
    return b"".join(parts)


async def answer(server: Server, ticket: bytes) -> bytes:
    """Present a ticket; return all that the server sends."""

    def present() -> bytes:
        with closing(connect(server, ticket)) as connection:
            connection.settimeout(PATIENCE_S)
            with suppress(OSError):  # the server has closed it already
                connection.shutdown(socket.SHUT_WR)  # it closes it once it has sent the rows
            return received(connection)

    return await asyncio.to_thread(present)


async def unpinned(server: Server) -> None:
    await soon(lambda: server.store.stats().pins == 0)
    assert server.budgets.pinned_bytes.held == 0


REFUSED = SIZE.pack(0)


async def test_rows_by_tcp_are_those_of_inline(server: Server, client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS)
    requests += [RowRequest(requests[0].digest, row_begin=3, row_end=9), requests[1]]
    by_tcp = await collect(client, requests, transports=["tcp"])
    inline = await collect(client, requests, transports=["inline"])
    assert {rows.transport for rows in by_tcp.values()} == {"tcp"}
    assert bytes_of(by_tcp) == bytes_of(inline)
    await unpinned(server)
    # The client keeps its connections for the next call.
    opened = port_of(server).connections
    await collect(client, requests, transports=["tcp"])
    assert port_of(server).connections <= max(opened, SENT_BESIDE)


async def test_shared_memory_comes_first_on_one_host(client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS[:1])
    (rows,) = (await collect(client, requests)).values()
    assert rows.transport == "shm"


async def test_a_call_offers_a_few_images_at_a_time(server: Server, client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS)
    await collect(client, requests, transports=["inline"])
    await unpinned(server)
    async with raw_fetch(client, requests) as call:
        ready: list[pb.ImageReady] = []
        while len(ready) < SENT_BESIDE:  # in any number of messages
            ready += (await call.read()).ready
        assert len(ready) == SENT_BESIDE
        assert server.store.stats().pins == SENT_BESIDE
        read = 0
        while ready:
            each = ready.pop(0)
            assert len(await answer(server, each.ticket.secret)) == SIZE.size + each.row_bytes
            read += 1
            if read + len(ready) < len(PHOTOS):
                ready += (await call.read()).ready
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    await unpinned(server)


async def test_tickets_share_no_message_that_many_windows_make_too_large(client: EncoderClient) -> None:
    small, large = await submitted(client, [PHOTOS[0], LARGE])
    await collect(client, [small, large], transports=["inline"])
    requests = [replace(small, row_end=1)] * (NAMES_AT_A_TIME - 1) + [large] * SENT_BESIDE
    async with raw_fetch(client, requests, rows_inside=True) as call:
        first, second = await call.read(), await call.read()
    assert len(first.ready) == NAMES_AT_A_TIME - 1
    assert all(ready.rows and not ready.HasField("ticket") for ready in first.ready)
    assert len(second.ready) == SENT_BESIDE
    assert all(ready.HasField("ticket") and not ready.rows for ready in second.ready)


async def test_a_ticket_keeps_nothing_of_its_announcement(server: Server, client: EncoderClient) -> None:
    """The message may have a mebibyte of the rows of other windows."""
    async with raw_fetch(client, await submitted(client, [LARGE])) as call:
        await first_ready(call)
        (transfer,) = port_of(server)._offered.values()
        callbacks: list[Any] = [transfer._on_last, *(call for call, _ in transfer.ended._callbacks)]  # type: ignore[attr-defined]
        kept = [cell.cell_contents for callback in callbacks for cell in callback.__closure__]
        assert kept
        assert not any(isinstance(each, Message) for each in kept)


@pytest.mark.attack("a ticket that was used, is of an ended call, or is garbage")
async def test_a_ticket_works_once(server: Server, client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS[:1])
    async with raw_fetch(client, requests) as call:
        ticket = (await first_ready(call)).ticket.secret
        assert len(await answer(server, ticket)) > SIZE.size
        assert await answer(server, ticket) == REFUSED


@pytest.mark.parametrize("sent", [b"\0" * TICKET_BYTES, b"GET / HTTP/1.1\r\n\r\n", b"short"])
async def test_garbage_gets_nothing(server: Server, sent: bytes) -> None:
    assert await answer(server, sent) in (REFUSED, b"")
    await soon(lambda: port_of(server).connections == 0)


async def test_the_ticket_of_an_ended_call_is_not_valid(server: Server, client: EncoderClient) -> None:
    requests = await submitted(client, PHOTOS[:1])
    async with raw_fetch(client, requests) as call:
        ticket = (await first_ready(call)).ticket.secret
    await unpinned(server)
    assert await answer(server, ticket) == REFUSED


async def test_a_ticket_that_nobody_presents_ends_in_an_error(config: Config, model: Model) -> None:
    async with server_and_client(config, model, **ROWS) as (server, client):
        # Of the port alone: this process may stall for longer in its calls.
        port_of(server)._reader_idle_s = 0.2
        requests = await submitted(client, PHOTOS[:1])
        async with raw_fetch(client, requests) as call:
            ticket = (await first_ready(call)).ticket.secret
            (error,) = (await call.read()).errors
            assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            assert "no connection presented the ticket within 0.2 s" in error.message
            assert await call.read() is grpc.aio.EOF
            await unpinned(server)
            assert await answer(server, ticket) == REFUSED


async def test_a_reader_that_stops_ends_in_an_error_and_delays_nobody(config: Config, model: Model) -> None:
    async with (
        server_and_client(config, model, **ROWS, limits={"reader_idle_s": 5.0}) as (server, stalls),
        await EncoderClient.connect(server.endpoint, client_id="reads") as reads,
    ):
        requests = await submitted(stalls, [LARGE])
        async with raw_fetch(stalls, requests) as call:
            ready = await first_ready(call)
            with stalled(server, ready):
                for _ in range(8):
                    others = await collect(reads, await submitted(reads, PHOTOS[3:6]), transports=["tcp"])
                    assert {each.transport for each in others.values()} == {"tcp"}
                (error,) = (await call.read()).errors
                assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
                assert "the caller stopped reading its rows for 5 s" in error.message
                assert await call.read() is grpc.aio.EOF
        await unpinned(server)


def stalled(server: Server, ready: pb.ImageReady) -> "closing[socket.socket]":
    """Begin to read the rows of a large image, and stop. Both ends have small buffers."""
    port_of(server)._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port_of(server).port))
    connection.sendall(ready.ticket.secret)
    assert SIZE.unpack(received(connection, SIZE.size)) == (ready.row_bytes,)
    return closing(connection)


@pytest.mark.attack("a reader of the rows port that stops, and whose rows are evicted meanwhile")
async def test_rows_of_an_ended_call_are_not_read_any_more(config: Config, model: Model) -> None:
    """A reader stalls, its call ends, and the pages get rows of other images: the reader gets none of those."""
    async with server_and_client(config, model, **ROWS, store_host_gib=4 / 1024) as (server, client):
        requests = await submitted(client, [LARGE])
        whole = (await collect(client, requests, transports=["inline"]))[0].array.tobytes()
        async with raw_fetch(client, requests) as call:
            ready = await first_ready(call)
            with stalled(server, ready) as connection:
                call.cancel()
                await unpinned(server)
                others = await submitted(client, [photo(512, 768, seed) for seed in range(6)])
                await collect(client, others, transports=["inline"])
                assert not server.store.contains(ready.address), "its pages have other rows"
                connection.settimeout(PATIENCE_S)
                got = await asyncio.to_thread(received, connection)
    assert len(got) < len(whole)
    assert got == whole[: len(got)]


def by_port(port: int) -> Callable[[str, pb.DescribeResponse, Channels], dict[str, Receiver]]:
    """Return receivers that find the rows port at another port of this host."""

    def found(endpoint: str, description: pb.DescribeResponse, channels: Channels) -> dict[str, Receiver]:
        changed = pb.DescribeResponse()
        changed.CopyFrom(description)
        changed.rows_port = port
        return receivers(endpoint, changed, channels)

    return found


async def test_rows_of_a_lost_connection_come_inline(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await TcpProxy(port_of(server).port).start()
    async with await EncoderClient.connect(server.endpoint, receivers=by_port(proxy.port)) as client:
        requests = await submitted(client, [LARGE, *PHOTOS])
        expected = await collect(client, requests, transports=["inline"])
        proxy.hold_answers()

        async def cut() -> None:
            await soon(lambda: proxy.held_bytes > 0)
            proxy.cut()

        cutting = asyncio.create_task(cut())
        outcomes = await collect(client, requests, transports=["tcp"])
        await cutting
        assert outcomes[0].transport == "inline"
        assert bytes_of(outcomes) == bytes_of(expected)
        proxy.mend()
        again = await collect(client, requests, transports=["tcp"])
        assert {each.transport for each in again.values()} == {"inline"}
    assert caplog.text.count("arrive inline for 60 s") == 1
    await unpinned(server)
    await proxy.stop()


async def test_a_port_that_drops_connections_costs_a_second_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with full_port() as port:
        async with await EncoderClient.connect(server.endpoint, receivers=by_port(port)) as client:
            requests = await submitted(client, PHOTOS)
            began = asyncio.get_running_loop().time()
            outcomes = await collect(client, requests, transports=["tcp"])
            assert asyncio.get_running_loop().time() - began >= CONNECT_S
            assert {each.transport for each in outcomes.values()} == {"inline"}
            again = await collect(client, requests, transports=["tcp"])
            assert {each.transport for each in again.values()} == {"inline"}
    assert caplog.text.count(f"the connection to its rows port {port} failed (timed out)") == 1
    await unpinned(server)


@contextmanager
def full_port() -> Iterator[int]:
    """Yield a port that answers no SYN, as behind a firewall that drops: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


async def test_a_refusing_port_costs_nothing(server: Server) -> None:
    with closed_port() as address:
        port = int(address.rpartition(":")[2])
        async with await EncoderClient.connect(server.endpoint, receivers=by_port(port)) as client:
            requests = await submitted(client, PHOTOS)
            outcomes = await collect(client, requests, transports=["tcp"])
            assert {each.transport for each in outcomes.values()} == {"inline"}
    await unpinned(server)


async def test_many_windows_of_an_image_come_in_the_call(server: Server, client: EncoderClient) -> None:
    """Each ticket may take a connection."""
    (whole,) = await submitted(client, PHOTOS[:1])
    few = [replace(whole, row_begin=n, row_end=n + 1) for n in range(SENT_BESIDE)]
    many = [replace(whole, row_begin=n, row_end=n + 1) for n in range(SENT_BESIDE + 1)]
    for requests, transport in ((few, "tcp"), (many, "inline")):
        outcomes = await collect(client, requests, transports=["tcp"])
        assert {rows.transport for rows in outcomes.values()} == {transport}
        assert bytes_of(outcomes) == bytes_of(await collect(client, requests, transports=["inline"]))
    await unpinned(server)


@pytest.mark.attack("a caller that takes all tickets of the rows port")
async def test_rows_come_in_the_call_if_no_ticket_is_left(config: Config, model: Model) -> None:
    one_ticket = {"tickets": Budget(1, "tickets")}
    async with server_and_client(config, model, **ROWS, limits=one_ticket) as (server, client):
        requests = await submitted(client, PHOTOS)
        await collect(client, requests, transports=["inline"])
        async with raw_fetch(client, requests[:1]) as call:
            ticket = (await first_ready(call)).ticket.secret
            outcomes = await collect(client, requests, transports=["tcp"])
            assert {(rows.transport, rows.error) for rows in outcomes.values()} == {("inline", None)}
            assert len(await answer(server, ticket)) > SIZE.size
            await soon(lambda: server.budgets.tickets.held == 0)
        (rows,) = (await collect(client, requests[:1], transports=["tcp"])).values()
        assert rows.transport == "tcp"
        await soon(lambda: server.budgets.tickets.held == 0)


@pytest.mark.attack("readers of the rows port that do not read, so that the kernel's buffers fill")
async def test_the_kernel_keeps_little_for_a_reader_that_does_not_read(
    server: Server, client: EncoderClient
) -> None:
    requests = await submitted(client, [LARGE])
    async with raw_fetch(client, requests) as call:
        ready = await first_ready(call)
        assert ready.row_bytes > 3 * UNSENT_BYTES
        with closing(socket.socket()) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", port_of(server).port))
            reader.sendall(ready.ticket.secret)
            reader.settimeout(PATIENCE_S)
            assert SIZE.unpack(await asyncio.to_thread(received, reader, SIZE.size)) == (ready.row_bytes,)
            (connection,) = port_of(server)._connections.values()
            await soon(lambda: connection.armed)  # it waits for the reader
            assert 0 < unsent(connection.socket) <= 2 * UNSENT_BYTES
            call.cancel()
            await unpinned(server)
            await soon(lambda: port_of(server).connections == 0)
            # The kernel discards what it has, and tells the reader.
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(read_to_the_end, reader)


def unsent(connection: socket.socket) -> int:
    """Return how many bytes the kernel keeps for the reader of a connection."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])


def read_to_the_end(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


async def test_new_connections_take_turns_with_those_that_are_ready() -> None:
    port = RowsPort("127.0.0.1:0", None, PATIENCE_S)
    port.start()
    port.stop()  # its threads
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
        listener.setblocking(False)
        port._socket, port._epoll = listener, stack.enter_context(select.epoll())
        port._epoll.register(listener)
        for _ in range(3 * ACCEPTED_AT_ONCE):
            stack.enter_context(socket.create_connection(listener.getsockname(), PATIENCE_S))
        port._accept()
        assert port.connections == ACCEPTED_AT_ONCE
        for connection in port._all():
            port._close(connection)


@pytest.mark.attack("a stranger who holds connections to the rows port and opens more")
async def test_a_stranger_has_a_share_of_the_connections_and_stops_no_transfer(
    server: Server, client: EncoderClient
) -> None:
    port = port_of(server)
    port._max_connections = 64
    requests = await submitted(client, PHOTOS)
    with ExitStack() as stack:
        for _ in range(200):
            stranger = stack.enter_context(closing(socket.socket()))
            stranger.bind((ANOTHER_HOST, 0))
            stranger.settimeout(PATIENCE_S)
            stranger.connect(("127.0.0.1", port.port))
        await soon(lambda: port.connections == 64 // HOST_SHARE)
        outcomes = await collect(client, requests, transports=["tcp"])
        assert {each.transport for each in outcomes.values()} == {"tcp"}


async def test_one_unknown_ticket_is_not_the_ports_fault(server: Server, client: EncoderClient) -> None:
    connections = RowsConnections("127.0.0.1", port_of(server).port)
    requests = await submitted(client, PHOTOS[:1])

    async def present_unknown() -> None:
        with pytest.raises(StaleHandleError, match=r"does not know the ticket|knows none of"):
            await connections.receive(bytes(TICKET_BYTES), [memoryview(bytearray(8))])

    for _ in range(2):
        for _ in range(UNKNOWN_TICKETS - 1):
            await present_unknown()
            assert connections.usable
        async with raw_fetch(client, requests) as call:
            ready = await first_ready(call)
            rows = memoryview(bytearray(ready.row_bytes))
            assert await connections.receive(ready.ticket.secret, [rows]) == ready.checksum
    # But a port that knows none is another server's.
    for _ in range(UNKNOWN_TICKETS):
        await present_unknown()
    assert not connections.usable
    connections.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.attack("many connections to the rows port that present nothing")
async def test_many_connections_of_one_host_leave_room_for_a_new_one(
    server: Server, client: EncoderClient
) -> None:
    port = port_of(server)
    port._max_connections = 16 * HOST_SHARE
    requests = await submitted(client, PHOTOS[:2])
    await collect(client, requests, transports=["tcp"])
    with ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port.port), PATIENCE_S))
            for _ in range(200)
        ]
        for connection in held:
            with suppress(ConnectionError):  # closed already
                connection.sendall(b"half")
        # The port has seen them all, on a busy machine too.
        await soon(lambda: sum(map(_is_closed, held)) >= len(held) - 16)
        outcomes = await collect(client, requests, transports=["tcp"])
        assert {each.transport for each in outcomes.values()} == {"tcp"}
        assert port.connections <= 16


async def test_closing_the_client_ends_its_transfers(server: Server) -> None:
    client = await EncoderClient.connect(server.endpoint)
    proxy = await TcpProxy(port_of(server).port).start()
    proxy.hold_answers()
    async with await EncoderClient.connect(server.endpoint, receivers=by_port(proxy.port)) as slow:
        requests = await submitted(slow, [LARGE])
        fetching = asyncio.create_task(collect(slow, requests, transports=["tcp"]))
        await soon(lambda: proxy.held_bytes > 0)
    await asyncio.wait([fetching], timeout=PATIENCE_S)
    assert fetching.done()
    assert fetching.exception() is not None or all(rows.error for rows in fetching.result().values())
    await unpinned(server)
    await proxy.stop()
    await client.close()
