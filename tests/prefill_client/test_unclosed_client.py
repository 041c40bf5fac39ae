"""A program that never closes its client ends by itself and prints nothing."""

import asyncio
import sys
import textwrap
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from encoder_service.app import Server
from testing.tcp_proxy import TcpProxy
from tests.waiting import PATIENCE_S

# Functions of atexit run when the interpreter has ended all executors, while daemon threads run on.
WATCHES_WHILE_IT_EXITS = """
    import atexit, sys, time
    from prefill_client import BlockingClient
    from prefill_client.fleet import pool

    pool.WATCH_AGAIN_S = pool.RESOLVE_EVERY_S = 0.02
    client = BlockingClient.connect(sys.argv[1])

    def exits():
        for line in sys.stdin:
            while client._client.any_serves != (line.strip() == "up"):
                time.sleep(0.01)
            print(line, end="", flush=True)

    atexit.register(exits)
"""
LOOKS_UP_WHILE_IT_EXITS = """
    import socket, sys, threading
    from prefill_client import BlockingClient
    from prefill_client.fleet import pool

    pool.RESOLVE_EVERY_S = 0.02
    client = BlockingClient.connect(sys.argv[1])
    hangs = threading.Event()

    def hang(*asked, **how):
        hangs.set()
        threading.Event().wait()

    socket.getaddrinfo = hang
    hangs.wait()
"""


@asynccontextmanager
async def started(program: str, endpoint: str) -> AsyncIterator[Any]:
    """Start a program that connects to `endpoint`; kill it if it runs at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), endpoint, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_an_unclosed_client_watches_silently_while_the_interpreter_exits(server: Server) -> None:
    proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2])).start()
    try:
        async with started(WATCHES_WHILE_IT_EXITS, f"dns:127.0.0.1:{proxy.port}") as program:
            for state, then in (("up", proxy.cut), ("down", proxy.mend), ("up", proxy.cut)):
                program.stdin.write(f"{state}\n".encode())
                assert await program.stdout.readline() == f"{state}\n".encode(), await program.stderr.read()
                then()
            assert await program.communicate(b"") == (b"", b"")  # which ends its input
        assert program.returncode == 0
    finally:
        await proxy.stop()


async def test_the_exit_waits_for_no_lookup_of_an_unclosed_client(server: Server) -> None:
    async with started(LOOKS_UP_WHILE_IT_EXITS, f"dns:{server.endpoint}") as program:
        assert await program.communicate() == (b"", b"")
    assert program.returncode == 0
