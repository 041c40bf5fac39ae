"""A bare gRPC stream upwards: a server that takes messages and throws them away. What rows put inline are measured by.

python -m bench.transport.bare_sink    prints its port and serves until it is terminated
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench.transport.bare_server import serve_bare

METHOD = "/bench.Bare/Sink"


async def serve() -> None:
    """Answer each stream with nothing, once all of it is here."""

    async def sink(messages: AsyncIterator[bytes], _context: Any) -> bytes:
        async for _ in messages:
            pass
        return b""

    await serve_bare(METHOD, grpc.stream_unary_rpc_method_handler(sink))


if __name__ == "__main__":
    asyncio.run(serve())
