"""A server and a client on two hosts: network namespaces, joined by a virtual cable (Linux, root, iproute2)."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from encoder_contract.errors import EncoderError
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client import EncoderClient, FetchedRows, RowRequest
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.another_host import Host, another_host
from tests.calls import collect, stub, submitted
from tests.waiting import PATIENCE_S, soon

pytestmark = pytest.mark.fleet

PHOTOS = [photo(1024, 768, seed) for seed in range(8)]
INSTALLED = Path(sys.executable).with_name("encoder-service")
# Fetches an image by TCP, stops in the middle of its rows as a suspended process does, and prints how the image ended.
STOPPED_READER = """
import asyncio, hashlib, os, signal, sys
from encoder_contract import rows_connection
from prefill_client import EncoderClient, RowRequest

received, pieces = rows_connection.move_all, 0

def receive(piece, move):
    global pieces
    pieces += 1
    if pieces == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return received(piece, move)

rows_connection.move_all = receive

async def main():
    async with await EncoderClient.connect(sys.argv[1]) as client:
        request = RowRequest(bytes.fromhex(sys.argv[2]))
        async with client.fetch([request], transports=["tcp"], timeout_s=600) as stream:
            async for rows in stream:
                print(rows.error or hashlib.sha256(rows.array.tobytes()).hexdigest())

asyncio.run(main())
"""


@pytest.fixture
def host() -> Iterator[Host]:
    with another_host() as host:
        yield host


@pytest.fixture
def server(host: Host, checkpoint: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server on the other host, with a rows port."""
    with host.serving(checkpoint, tmp_path / "encoder-service", INSTALLED) as server:
        yield server


async def test_rows_come_by_tcp_or_inline_if_a_firewall_drops_them(host: Host, server: ServerProcess) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        requests = await submitted(client, PHOTOS)
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


async def test_a_server_killed_as_it_sends_ends_each_image_in_rows_or_one_error(
    server: ServerProcess,
) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        requests = await submitted(client, PHOTOS)
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


async def test_a_reader_that_stops_gets_no_rows_of_reused_pages(host: Host, tmp_path: Path) -> None:
    """The server gives the reader up after 30 s, and encodes other images into the pages that it was reading."""
    wide = {"out_hidden_size": 4096}
    model = write_checkpoint(tmp_path / "model", dtype=torch.bfloat16, text_layers=1, depth=3, vision=wide)
    photos = [photo(1024, 768, seed) for seed in range(5)]
    with host.serving(model, tmp_path / "encoder-service", INSTALLED, store_host_gib=0.06) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            (answer,) = await client.submit(photos[:1], timeout_s=PATIENCE_S)
            first = RowRequest(answer.digest)
            (rows,) = (await collect(client, [first], transports=["inline"])).values()
            right = sha256(rows.array.tobytes()).hexdigest()
            command = [sys.executable, "-c", STOPPED_READER, server.endpoint, first.digest.hex()]
            reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            try:
                await soon(lambda: _state(reader.pid) == "T")
                await soon(lambda: server.metrics().total("store_pins") == 1)
                await soon(lambda: server.metrics().total("store_pins") == 0)
                for file in photos[1:]:
                    (answer,) = await client.submit([file], timeout_s=PATIENCE_S)
                    await collect(client, [RowRequest(answer.digest)])
                assert server.metrics().total("store_evictions_total", tier="host") >= 3
                reader.send_signal(signal.SIGCONT)
                printed, _ = reader.communicate(timeout=PATIENCE_S)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(reader.pid, signal.SIGKILL)
                reader.wait()
    assert printed.strip() == right or "was not submitted" in printed, printed


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
