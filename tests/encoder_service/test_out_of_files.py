"""A server at its limit of open files serves connected callers, and all callers once descriptors are free."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from encoder_service.devices.dispatcher import MOST_FAILURES
from prefill_client import EncoderClient
from testing.photos import photo
from tests.calls import encoded
from tests.processes import running
from tests.waiting import PATIENCE_S, soon

SPARE = 12  # additional files that the server may open


@contextmanager
def crowding(endpoint: str, connections: int) -> Iterator[None]:
    """Hold connections to a port. Connections beyond the server's backlog may be refused."""
    host, _, port = endpoint.rpartition(":")
    with ExitStack() as stack:
        for _ in range(connections):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
        yield


async def rows_of(client: EncoderClient, image: bytes) -> bytes:
    """Submit an image and return the bytes of its rows."""
    return (await encoded(client, image, transports=["inline"])).array.tobytes()


@pytest.mark.attack("all file descriptors in use")
async def test_a_server_out_of_descriptors_serves_open_connections_and_recovers(checkpoint: Path) -> None:
    with running(checkpoint) as server:
        process = psutil.Process(server.process.pid)
        async with await EncoderClient.connect(server.endpoint, timeout_s=PATIENCE_S) as client:
            before = await rows_of(client, photo(64, 64, 1))
            most = process.num_fds() + SPARE
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
            with crowding(server.endpoint, 4 * SPARE), crowding(server.http_endpoint, 4 * SPARE):
                await soon(lambda: bool(process.num_fds() >= most))
                assert await rows_of(client, photo(64, 64, 1)) == before
                assert len(await rows_of(client, photo(96, 64, 2))) > 0
        async with await EncoderClient.connect(server.endpoint, timeout_s=PATIENCE_S) as newcomer:
            assert await rows_of(newcomer, photo(64, 64, 1)) == before
        await soon(lambda: server.metrics().total("store_pins") == 0)
        assert server.terminate() == 0


async def test_a_device_that_dies_while_descriptors_are_short_is_replaced_later(checkpoint: Path) -> None:
    with running(checkpoint) as server:
        process = psutil.Process(server.process.pid)
        async with await EncoderClient.connect(server.endpoint, timeout_s=PATIENCE_S) as client:
            await rows_of(client, photo(64, 64, 1))
            before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds() // 2, before[1]))
            [device] = [each for each in process.children() if "device" in each.name()]
            device.kill()
            # More often than a device may fail that starts and ends.
            await soon(
                lambda: (
                    sum("does not start" in line for line in server.lines) > MOST_FAILURES
                    or server.process.poll() is not None
                )
            )
            assert server.process.poll() is None
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            assert len(await rows_of(client, photo(96, 64, 2))) > 0
