"""A bare gRPC server that only moves bytes: the baseline for inline rows.

python -m bench.transport.bare BYTES [CERT KEY]    print the port, serve until terminated; with files, over TLS

It sends BYTES bytes, made in advance, to each caller of Stream.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from encoder_contract.framing import MESSAGE_BYTES

SERVICE = "bench.Bare"
MAX_MESSAGE_BYTES = 8 << 20


class Bare(NamedTuple):
    """A running server."""

    endpoint: str
    process_id: int
    size_bytes: int


@contextmanager
def bare_server(size_bytes: int = 0, issued: Sequence[str] = ()) -> Iterator[Bare]:
    """Run the server in another process, over TLS if there is a certificate."""
    command = [sys.executable, "-m", "bench.transport.bare", str(size_bytes), *issued]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Bare(f"127.0.0.1:{process.stdout.readline().strip()}", process.pid, size_bytes)
        finally:
            process.kill()


async def read_bare(channel: grpc.aio.Channel, size_bytes: int, into: memoryview | None = None) -> None:
    """Read the stream to its end, and copy it into one buffer if there is one."""
    received = 0
    stream: Any = channel.unary_stream(f"/{SERVICE}/Stream")  # messages are bytes
    async for message in stream(b""):
        if into is not None:
            into[received : received + len(message)] = message
        received += len(message)
    assert received == size_bytes


async def serve(size_bytes: int, credentials: grpc.ServerCredentials | None) -> None:
    """Serve on a free port, print the port, and wait until the process is terminated."""
    sizes = [MESSAGE_BYTES] * (size_bytes // MESSAGE_BYTES) + [size_bytes % MESSAGE_BYTES]
    messages = [os.urandom(size) for size in sizes if size]

    async def stream(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    methods: dict[str, Any] = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def credentials_of(cert: str, key: str) -> grpc.ServerCredentials:
    """Return a server's TLS credentials from the files of its certificate and key."""
    return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(cert).read_bytes())])


if __name__ == "__main__":
    size, *files = sys.argv[1:]
    asyncio.run(serve(int(size), credentials_of(*files) if files else None))
