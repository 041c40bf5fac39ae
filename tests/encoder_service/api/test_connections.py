"""Connections: idle ones are closed without clients noticing, and the server may open enough files for them."""

import subprocess
import sys

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest

from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api import server as listener
from encoder_service.config import Config
from encoder_service.devices.model import Model
from testing.attacks import WATCH
from testing.raw_http2 import RawConnection
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

IDLE = "grpc.max_connection_idle_ms"


@pytest.mark.attack("connections that make no call")
async def test_a_connection_without_a_call_is_closed_and_one_with_a_call_stays(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(listener.OPTIONS)
    assert options[IDLE] == 60_000
    # Shorter here: the test waits for the closing itself, not for a time.
    monkeypatch.setattr(listener, "OPTIONS", tuple({**options, IDLE: 2000}.items()))
    async with (
        server_of(config, model) as server,
        grpc.aio.insecure_channel(server.endpoint) as channel,
        await RawConnection.open(server.endpoint) as watching,
    ):
        # At once, before the connection counts as idle.
        await watching.call(WATCH, HealthCheckRequest().SerializeToString())
        describe = EncoderServiceStub(channel).Describe
        await describe(pb.DescribeRequest(), timeout=PATIENCE_S)
        async with await RawConnection.open(server.endpoint) as idle:
            await soon(idle.closed.is_set)
        assert not watching.closed.is_set()
        await soon(lambda: channel.get_state() is grpc.ChannelConnectivity.IDLE)  # the server closed it, too
        await describe(pb.DescribeRequest(), timeout=PATIENCE_S)


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
