"""A server and a client on two hosts: network namespaces, joined by a virtual cable (Linux, root, iproute2)."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from encoder_contract.errors import EncoderError
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client import EncoderClient, FetchedRows, RowRequest
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.calls import collect, stub
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]

numbers = itertools.count(os.getpid() % 90_000)  # names and networks of their own, also beside another run
PHOTOS = [photo(1024, 768, seed) for seed in range(8)]


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace; `address` is its end of the cable."""

    name: str
    address: str

    def run(self, *command: str) -> None:
        """Run a command there."""
        _run("ip", "netns", "exec", self.name, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def another_host() -> Iterator[Host]:
    """Make a namespace and a cable to it, for the length of a `with` block."""
    number = next(numbers)
    name, here, there = f"host-{number}", f"here{number}", f"there{number}"
    network = f"10.{100 + number % 100}.{number // 100 % 250}"
    _run("ip", "netns", "add", name)
    host = Host(name, f"{network}.2")
    try:
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _run("ip", "address", "add", f"{network}.1/24", "dev", here)
        _run("ip", "link", "set", here, "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", there)
        for device in (there, "lo"):
            host.run("ip", "link", "set", device, "up")
        yield host
    finally:
        _run("ip", "netns", "delete", name)


@pytest.fixture
def host() -> Iterator[Host]:
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        with another_host() as host:
            yield host
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")


@pytest.fixture
def server(host: Host, checkpoint: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server on the other host, with a rows port."""
    program = tmp_path / "encoder-service"
    installed = Path(sys.executable).with_name("encoder-service")
    program.write_text(f'#!/bin/sh\nexec ip netns exec {host.name} {installed} "$@"\n')
    program.chmod(0o700)
    port = f"{host.address}:0"
    ports = {"listen": port, "metrics_listen": port, "rows_listen": port, "listen_unprotected": "yes"}
    server = ServerProcess(checkpoint, executable=program, threads=1, **ports)
    try:
        server.wait_until_it_listens()
        yield server
    finally:
        server.kill()


async def submitted(client: EncoderClient) -> list[RowRequest]:
    answers = await client.submit(PHOTOS, timeout_s=PATIENCE_S)
    assert [each.error for each in answers] == [None] * len(PHOTOS)
    return [RowRequest(each.digest) for each in answers]


async def test_rows_come_by_tcp_and_inline_once_a_firewall_drops_the_port(
    host: Host, server: ServerProcess
) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        requests = await submitted(client)
        by_tcp = await collect(client, requests)
        assert {rows.transport for rows in by_tcp.values()} == {"tcp"}
        inline = await collect(client, requests, transports=["inline"])
    assert [rows.array.tobytes() for rows in inline.values()] == [
        by_tcp[index].array.tobytes() for index in inline
    ]
    if shutil.which("iptables") is None:
        pytest.skip("the firewall needs iptables")
    async with await EncoderClient.connect(server.endpoint) as client:
        port = str((await (await stub(client)).Describe(pb.DescribeRequest())).rows_port)
        host.run("iptables", "--append", "INPUT", "--protocol", "tcp", "--dport", port, "--jump", "DROP")
        for _ in range(2):
            behind = await collect(client, requests)
            assert {rows.transport for rows in behind.values()} == {"inline"}
            assert {index: rows.array.tobytes() for index, rows in behind.items()} == {
                index: rows.array.tobytes() for index, rows in inline.items()
            }


async def test_a_server_killed_while_it_sends_rows_ends_each_image_in_rows_or_one_error(
    server: ServerProcess,
) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        requests = await submitted(client)
        expected = {
            index: rows.array.tobytes()
            for index, rows in (await collect(client, requests, transports=["inline"])).items()
        }
        outcomes: dict[int, list[FetchedRows | EncoderError]] = {index: [] for index in expected}
        async with client.fetch(requests, transports=["tcp"], timeout_s=PATIENCE_S) as stream:
            async for outcome in stream:
                outcomes[outcome.index].append(outcome.error or outcome)
                if server.process.poll() is None:
                    server.kill()
        for index, (end,) in outcomes.items():
            if isinstance(end, FetchedRows):
                assert end.array.tobytes() == expected[index]
        assert {type(each) for (each,) in outcomes.values()} > {FetchedRows}, "some arrived, and some did not"
