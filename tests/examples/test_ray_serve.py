"""Runs examples/ray_serve.py on a Ray of this machine; `TEST_RAY_PYTHON` names an interpreter with `ray[serve]`."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, RowRequest
from testing.certificates import Authority
from testing.photos import photo, with_comment
from tests.servers import server_of
from tests.waiting import soon

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_serve.py"
PYTHON = os.environ.get("TEST_RAY_PYTHON", "")
IMAGES = 60
START_S, GROW_S = 300.0, 300.0

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not PYTHON, reason="needs ray[serve]: TEST_RAY_PYTHON names its interpreter"),
]


class Example:
    """The running example, and the endpoints that it has printed last."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        self._log = log
        command = Path(sys.executable).with_name("encoder-service")
        arguments = ["--gpus", "0", "--most", "2", "--command", command, "--", "--model", checkpoint]
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [PYTHON, EXAMPLE, *arguments, "--store-host-gib", "0.1", "--listen-unprotected", "yes"],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            )

    @property
    def endpoints(self) -> list[str]:
        """What it printed last."""
        lines = [line for line in self.output.splitlines() if line.startswith("endpoints:")]
        return lines[-1].split()[1:] if lines else []

    @property
    def output(self) -> str:
        return self._log.read_text()

    def has(self, replicas: int, instead_of: str = "") -> bool:
        """Whether so many replicas run, none of them at `instead_of`."""
        assert self.process.poll() is None, self.output
        return len(self.endpoints) == replicas and instead_of not in self.endpoints


@pytest.fixture
def example(checkpoint: Path, tmp_path: Path) -> Iterator[Example]:
    example = Example(checkpoint, tmp_path / "log")
    yield example
    if example.process.poll() is None:
        example.process.terminate()
        example.process.wait()


def servers_of(example: Example) -> list[psutil.Process]:
    """Return the servers that the actors have started."""
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in example.endpoints}
    return [
        psutil.Process(each.pid)
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port in ports and each.pid
    ]


async def fetch_all(client: EncoderClient) -> None:
    """Submit many images and read all their rows, so that they are demanded until the last one."""
    base = photo(1200, 900, 1)
    answers = await client.submit([with_comment(base, number) for number in range(IMAGES)], timeout_s=GROW_S)
    async with client.fetch([RowRequest(each.digest) for each in answers], timeout_s=GROW_S) as outcomes:
        async for outcome in outcomes:
            assert outcome.error is None


# Prints the backlog of the replica whose metrics are at the URL of the first argument.
READ = """
import sys
from types import SimpleNamespace
from ray_serve import Encoder
print(Encoder.record_autoscaling_stats(SimpleNamespace(_settings={"metrics": sys.argv[1]})))
"""


async def test_the_backlog_of_a_replica_with_tls_is_read(
    config: Config, model: Model, tmp_path: Path
) -> None:
    issued = Authority().issue(tmp_path, "server", ["encoder.example"])
    async with server_of(config, model, tls_cert=issued.cert, tls_key=issued.key) as server:
        assert server.watch.url.startswith("https://")
        command = [PYTHON, "-c", READ, server.watch.url]
        read = await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=EXAMPLE.parent,
            env={**os.environ, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
        )
    assert read.stdout == "{'backlog_s': 0.0}\n", read.stderr


async def test_ray_starts_replaces_scales_and_drains_replicas(example: Example) -> None:
    await soon(lambda: example.has(1), within_s=START_S)
    [first] = example.endpoints
    [server] = servers_of(example)
    server.kill()
    await soon(lambda: example.has(1, instead_of=first), within_s=START_S)

    async with await EncoderClient.connect(example.endpoints) as client:
        backlog = asyncio.create_task(fetch_all(client))
        await soon(lambda: example.has(2), within_s=GROW_S)
        await backlog
    async with await EncoderClient.connect(example.endpoints) as client:
        [image] = await client.submit([photo(320, 240, 2)])
        assert image.error is None

    servers = servers_of(example)
    assert len(servers) == 2
    example.process.terminate()
    assert example.process.wait(START_S) == 0, example.output
    await soon(lambda: not any(server.is_running() for server in servers))
