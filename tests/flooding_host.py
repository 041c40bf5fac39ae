"""A host that sends an endless response."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def flooding_host(head: bytes, piece: bytes) -> Iterator[str]:
    """Run a host that sends `head`, then `piece` again and again until the client hangs up; yield its address."""
    flood = piece * (65536 // len(piece))

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(head)
            while True:
                connection.sendall(flood)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
