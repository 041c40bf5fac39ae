"""A port at which nobody listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closed_port() -> Iterator[str]:
    """Give an address at which nobody listens, and keep everybody else from it: connecting to it is refused."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{kept.getsockname()[1]}"
