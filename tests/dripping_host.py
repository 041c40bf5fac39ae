"""A host that sends an image slowly."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def dripping_host(pieces: Sequence[bytes]) -> Iterator[str]:
    """Run a host that sends a piece every 20 ms on each connection; yield its address."""
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                if stop.wait(0.02):
                    return
            stop.wait()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
