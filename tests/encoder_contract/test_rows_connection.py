"""The client of a rows port: who may write to the memory of a transfer, and until when."""

import asyncio
import gc
import socket
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from encoder_contract.errors import StaleHandleError
from encoder_contract.framing import checksum
from encoder_contract.rows_connection import PIECE_BYTES, SIZE, TICKET_BYTES, RowsConnections
from tests.waiting import PATIENCE_S, soon

SIZE_BYTES = 16 << 20
TICKET = bytes(TICKET_BYTES)


class Flood(AbstractContextManager["Flood"]):
    """A rows port that answers each ticket with `size` announced bytes, and sends ones until the client is gone.

    With `before`, it sends so many of them, and more once `go_on` is set.
    """

    def __init__(self, size: int, sent: int = 1 << 40, before: int = 0) -> None:
        self.size, self.sent, self.before = size, sent, before
        self.go_on = threading.Event()
        if not before:
            self.go_on.set()
        self.gone = threading.Semaphore(0)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._threads = ThreadPoolExecutor(2)
        self._threads.submit(self._accept)

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._threads.shutdown()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._threads.submit(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(TICKET_BYTES, socket.MSG_WAITALL)
                connection.sendall(SIZE.pack(self.size))
                ones = b"\1" * (1 << 16)
                for begin in range(0, self.sent, len(ones)):
                    assert begin < self.before or self.go_on.wait(PATIENCE_S)
                    connection.sendall(ones[: self.sent - begin])
            except OSError:
                self.gone.release()


@pytest.fixture
def flood() -> Iterator[Flood]:
    # No transfer is complete before it is cancelled, even if a busy machine delays that.
    with Flood(SIZE_BYTES, before=SIZE_BYTES - PIECE_BYTES) as flood:
        yield flood


def has_begun(memory: memoryview, at: int = 0) -> Awaitable[None]:
    """Wait until a transfer has written here; the loop leaves the processor to its thread meanwhile."""
    return soon(lambda: bool(memory[at]))


@pytest.mark.attack("a peer whose rows arrive after their transfer has failed")
@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_transfer_has_ended_when_it_raises(flood: Flood, cancels: int) -> None:
    connections = RowsConnections("127.0.0.1", flood.port)
    for number in range(4):
        flood.go_on.clear()
        memory = memoryview(bytearray(SIZE_BYTES))
        receiving = asyncio.create_task(connections.receive(TICKET, [memory]))
        await has_begun(memory, number << 20)  # in its middle
        receiving.cancel()
        flood.go_on.set()
        for _ in range(cancels - 1):
            await asyncio.sleep(0)
            receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        found = checksum([memory])
        assert await asyncio.to_thread(flood.gone.acquire, timeout=PATIENCE_S)
        assert checksum([memory]) == found, "it was written to afterwards"
    connections.close()


async def test_a_cancelled_transfer_leaves_no_error_for_asyncio_to_log() -> None:
    logged: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(TICKET_BYTES)
        writer.write(SIZE.pack(SIZE_BYTES) + b"\1")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(stall, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connections, memory = RowsConnections("127.0.0.1", port), memoryview(bytearray(SIZE_BYTES))
        receiving = asyncio.create_task(connections.receive(TICKET, [memory]))
        await has_begun(memory)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        connections.close()
        for thread in threading.enumerate():
            if thread.name.startswith(f"rows-{port}"):
                await asyncio.to_thread(thread.join, PATIENCE_S)
        del receiving
        gc.collect()
        assert logged == []


@pytest.mark.parametrize(("announced", "sent"), [(99, 99), (101, 101), (1 << 63, 1 << 20), (100, 60), (0, 0)])
async def test_another_size_than_expected_is_refused_and_memory_around_it_is_untouched(
    announced: int, sent: int
) -> None:
    memory = bytearray(300)
    views = [memoryview(memory)[50:90], memoryview(memory)[200:260]]
    with Flood(announced, sent) as flood:
        connections = RowsConnections("127.0.0.1", flood.port)
        with pytest.raises(StaleHandleError):
            await connections.receive(TICKET, views)
        connections.close()
    assert not any(memory[:50])
    assert not any(memory[90:200])
    assert not any(memory[260:])


async def test_rows_fill_views_in_order() -> None:
    memory = bytearray(300)
    with Flood(100, 100) as flood:
        connections = RowsConnections("127.0.0.1", flood.port)
        found = await connections.receive(TICKET, [memoryview(memory)[200:260], memoryview(memory)[50:90]])
        connections.close()
    assert found == checksum([memoryview(b"\1" * 100)])
    assert memory == bytes(50) + b"\1" * 40 + bytes(110) + b"\1" * 60 + bytes(40)
