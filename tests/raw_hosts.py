"""Hosts of images that send bytes of a test's choice: slowly, or without an end."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def dripping_host(pieces: Sequence[bytes]) -> Iterator[str]:
    """Run a host that sends a piece every 20 ms on each connection; yield its address."""
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)
            if stop.wait(0.02):
                return
        stop.wait()

    with _host(drip) as address:
        yield address
        stop.set()


@contextmanager
def flooding_host(head: bytes, piece: bytes) -> Iterator[str]:
    """Run a host that sends `head`, then `piece` again and again until the client hangs up; yield its address."""
    flood = piece * (65536 // len(piece))

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(flood)

    with _host(answer) as address:
        yield address


@contextmanager
def _host(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a host that answers each connection on a thread of its own; yield its address."""

    def answered(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client has hung up
            answer(connection)

    def accept() -> None:
        with suppress(OSError):  # the listener has been shut down
            while True:
                threading.Thread(target=answered, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
