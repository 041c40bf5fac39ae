"""A bare gRPC stream: a server that sends ready-made bytes and does nothing else. What inline rows are measured by.

python -m bench.transport.bare_stream BYTES MESSAGE_BYTES    prints its port and serves until it is terminated
python -m bench.transport.bare_stream BYTES MESSAGE_BYTES CERT KEY    the same by TLS
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench.transport.bare_server import serve_bare
from testing.certificates import Issued

METHOD = "/bench.Bare/Stream"


async def serve(size_bytes: int, message_bytes: int, issued: Issued | None) -> None:
    """Stream `size_bytes` in messages of `message_bytes` to everyone who asks."""
    sizes = [message_bytes] * (size_bytes // message_bytes) + [size_bytes % message_bytes]
    messages = [os.urandom(size) for size in sizes if size]

    async def stream(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    await serve_bare(METHOD, grpc.unary_stream_rpc_method_handler(stream), issued)


if __name__ == "__main__":
    size, message, *files = sys.argv[1:]
    asyncio.run(serve(int(size), int(message), Issued(*files) if files else None))
