"""Connections: idle ones are closed without clients noticing, and no host can use up all of them."""

import os
import socket
import subprocess
import sys
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api import server as listener
from encoder_service.api.connections import fair_share, shut_down_excess
from encoder_service.config import Config
from encoder_service.engine.model import Model
from testing.attacks import WATCH
from testing.raw_http2 import RawConnection
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

IDLE = "grpc.max_connection_idle_ms"
# Otherwise the channels of one process to one server share a connection.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def test_a_connection_without_a_call_is_closed_and_one_with_a_call_stays(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(listener.OPTIONS)
    assert options[IDLE] == 60_000
    # Shorter here: the test waits for the closing itself, not for a time.
    monkeypatch.setattr(listener, "OPTIONS", tuple({**options, IDLE: 1000}.items()))
    async with (
        server_of(config, model) as server,
        grpc.aio.insecure_channel(server.endpoint) as channel,
        await RawConnection.open(server.endpoint) as watching,
        await RawConnection.open(server.endpoint) as idle,
    ):
        describe = EncoderServiceStub(channel).Describe
        await describe(pb.DescribeRequest(), timeout=PATIENCE_S)
        await watching.call(WATCH, HealthCheckRequest().SerializeToString())
        await soon(idle.closed.is_set)
        assert not watching.closed.is_set()
        await soon(lambda: channel.get_state() is grpc.ChannelConnectivity.IDLE)  # the server closed it, too
        await describe(pb.DescribeRequest(), timeout=PATIENCE_S)


async def test_one_host_cannot_keep_new_clients_out(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 200  # more files than a test process has open
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", most)
    async with (
        server_of(config, model) as server,
        AsyncExitStack() as stack,
        grpc.aio.insecure_channel(server.endpoint) as early,
    ):
        await EncoderServiceStub(early).Describe(pb.DescribeRequest(), timeout=PATIENCE_S)
        for _ in range(2):
            flood = [
                await stack.enter_async_context(await RawConnection.open(server.endpoint, source="127.0.0.2"))
                for _ in range(most)
            ]
            async with grpc.aio.insecure_channel(server.endpoint, options=OWN_CONNECTION) as late:
                describe = EncoderServiceStub(late).Describe
                await describe(pb.DescribeRequest(), timeout=PATIENCE_S, wait_for_ready=True)
            assert any(connection.closed.is_set() for connection in flood)
        assert early.get_state() is grpc.ChannelConnectivity.READY


@pytest.mark.parametrize(
    ("counts", "room", "most"),
    [
        ([], 10, 0),
        ([3, 4], 10, 4),
        ([1, 20], 10, 9),
        ([20, 20, 1], 11, 5),
        ([7, 7, 7], 10, 3),
    ],
)
def test_connections_are_shared_fairly_between_hosts(counts: list[int], room: int, most: int) -> None:
    assert fair_share(counts, room) == most
    assert sum(min(count, most) for count in counts) <= room


def test_counting_connections_leaves_no_file_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
                assert shut_down_excess(port, 0) == {"ipv4:127.0.0.1": 1}
                assert accepted.recv(1) == b""
                assert client.recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_server_raises_its_limit_on_files() -> None:
    program = """
import resource
from encoder_service.cli import MAX_FILES, raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_file_limit()
soft, left = resource.getrlimit(resource.RLIMIT_NOFILE)
assert left == hard
print(soft == (MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
