"""The client of a rows port: who may write to the memory of a transfer, and until when."""

import asyncio
import gc
import select
import socket
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing

import pytest

from encoder_contract import rows_connection
from encoder_contract.errors import StaleHandleError
from encoder_contract.framing import Checksum, checksum
from encoder_contract.rows_connection import SIZE, TICKET_BYTES, RowsConnections
from tests.waiting import PATIENCE_S, soon

SIZE_BYTES = 16 << 20
TICKET = bytes(TICKET_BYTES)


class Flood(AbstractContextManager["Flood"]):
    """A rows port that answers each ticket with `size` announced bytes, and sends ones until the client is gone."""

    def __init__(self, size: int, sent: int = 1 << 40) -> None:
        self.size, self.sent = size, sent
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
                    connection.sendall(ones[: self.sent - begin])
            except OSError:
                self.gone.release()


def has_begun(memory: memoryview) -> Awaitable[None]:
    """Wait until a transfer has written here; the loop leaves the processor to its thread meanwhile."""
    return soon(lambda: bool(memory[0]))


@pytest.mark.attack("a peer whose rows arrive after their transfer has failed")
@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_transfer_has_ended_when_it_raises(
    monkeypatch: pytest.MonkeyPatch, cancels: int
) -> None:
    go_on = threading.Event()

    class HeldChecksum(Checksum):
        """Holds the thread of a transfer after a piece: more of them have arrived."""

        def add(self, data: memoryview) -> None:
            super().add(data)
            assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(rows_connection, "Checksum", HeldChecksum)
    with Flood(SIZE_BYTES) as flood, closing(RowsConnections("127.0.0.1", flood.port)) as connections:
        for _ in range(4):
            go_on.clear()
            memory = memoryview(bytearray(SIZE_BYTES))
            receiving = asyncio.create_task(connections.receive(TICKET, [memory]))
            await has_begun(memory)
            for _ in range(cancels):
                receiving.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            assert not receiving.done(), "its thread may still write"
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            found = checksum([memory])
            assert await asyncio.to_thread(flood.gone.acquire, timeout=PATIENCE_S)
            assert checksum([memory]) == found, "it was written to afterwards"


async def test_a_cancelled_transfer_resets_its_connection() -> None:
    """A server that waits for room hears of nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        memory = memoryview(bytearray(SIZE_BYTES))
        with closing(RowsConnections("127.0.0.1", listening.getsockname()[1])) as connections:
            receiving = asyncio.create_task(connections.receive(TICKET, [memory]))
            server, _ = await asyncio.to_thread(listening.accept)
            with server:
                server.sendall(SIZE.pack(SIZE_BYTES) + b"\1")
                await has_begun(memory)
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
                reset = select.poll()
                reset.register(server, 0)  # the end of what the client sends is no event
                assert await asyncio.to_thread(reset.poll, 1000 * PATIENCE_S)


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
