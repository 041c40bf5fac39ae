"""The cost of bare gRPC: a server in a process of its own that answers a call with one message."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

METHOD = "/floor/Call"
ANSWER = bytes(150)


async def _serve(ports: Any) -> None:
    async def call(_requests: object, context: Any) -> None:
        await context.read()
        await context.write(ANSWER)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 4 << 20)])
    methods: dict[str, Any] = {"Call": grpc.stream_stream_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", methods),))
    ports.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


def _run(ports: Any) -> None:
    asyncio.run(_serve(ports))


@asynccontextmanager
async def floor() -> AsyncIterator[tuple[int, grpc.aio.Channel]]:
    """Yield the process id of a bare server, and a channel to it."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(there,), daemon=True)
    process.start()
    try:
        port = await asyncio.to_thread(here.recv)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert process.pid is not None
            yield process.pid, channel
    finally:
        process.kill()
        process.join()


async def call(channel: grpc.aio.Channel, size: int) -> None:
    """Make a call with one message of `size` bytes, and read the one answer and the end."""
    exchange: Any = channel.stream_stream(METHOD)()
    await exchange.write(bytes(size))
    while await exchange.read() is not grpc.aio.EOF:
        pass
