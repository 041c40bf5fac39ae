"""A bare gRPC stream: a server that sends ready-made bytes and does nothing else. What inline rows are measured by.

python -m bench.transport.bare_stream BYTES MESSAGE_BYTES    prints its port and serves until it is terminated
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

METHOD = "/bench.Bare/Stream"


async def serve(size_bytes: int, message_bytes: int) -> None:
    """Stream `size_bytes` in messages of `message_bytes` to everyone who asks."""
    sizes = [message_bytes] * (size_bytes // message_bytes) + [size_bytes % message_bytes]
    messages = [os.urandom(size) for size in sizes if size]

    async def stream(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    server = grpc.aio.server()
    service, method = METHOD.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
