"""A bare gRPC server of one method: what a transport costs when nothing else is done."""

from pathlib import Path
from typing import Any

import grpc

from testing.certificates import Issued

MAX_MESSAGE_BYTES = 8 << 20


async def serve_bare(
    path: str, handler: "grpc.RpcMethodHandler[Any, Any]", issued: Issued | None = None
) -> None:
    """Serve the method at `path` on a free port, which is printed, until the process is terminated.

    With a certificate, by TLS.
    """
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),))
    service, method = path.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = _bound(server, issued)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def _bound(server: grpc.aio.Server, issued: Issued | None) -> int:
    if issued is None:
        return server.add_insecure_port("127.0.0.1:0")
    pair = Path(issued.key).read_bytes(), Path(issued.cert).read_bytes()
    return server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
