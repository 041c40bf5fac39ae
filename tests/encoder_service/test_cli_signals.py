"""Signals end a command soon and without a traceback, whatever it is doing."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from encoder_contract.digest import content_digest
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.processes import SCRIPTS, running
from tests.waiting import START_S, soon

# What a shell does for a command in the foreground, wherever these tests run. By a process of its own: code of ours
# between fork and exec would have gRPC's threads, which this process has, heard of in the child.
HEED_CTRL_C = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)


def started(*command: object) -> "subprocess.Popen[str]":
    """Start a command, whose output of both kinds is read as one."""
    arguments = [str(word) for word in command]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def last_words(process: "subprocess.Popen[str]") -> str:
    """Return the output of a process until its end; kill it if it does not end."""
    try:
        return process.communicate(timeout=START_S)[0]
    finally:
        process.kill()


def wait_until_its_device_loads(pid: int) -> None:
    """Return in the middle of a server's start: the process of its device has begun to import torch."""
    until = time.monotonic() + START_S
    while not any(
        "libtorch" in Path(f"/proc/{child.pid}/maps").read_text() for child in psutil.Process(pid).children()
    ):
        assert time.monotonic() < until
        time.sleep(0.005)


# Moments on the way to serving: while a device imports torch, and about when it reads the model.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("later_s", [0.0, 1.5])
def test_a_signal_during_loading_ends_the_server_silently(
    checkpoint: Path, number: signal.Signals, later_s: float
) -> None:
    command = [SCRIPTS / "encoder-service", "serve", "--model", checkpoint, "--listen", "127.0.0.1:0"]
    process = started(*HEED_CTRL_C, *command, "--store-host-gib", 0.04)
    wait_until_its_device_loads(process.pid)
    time.sleep(later_s)
    process.send_signal(number)
    said = last_words(process)
    assert "Traceback" not in said
    served = later_s > 0 or "listening" in said  # it started before the signal, and drained
    assert process.returncode in ((-number, 0) if served else (-number,))


@pytest.fixture
def inside() -> list[str]:
    """The beginning of a command line whose command becomes process 1, as in a container."""
    inside = ["unshare", "--map-root-user", "--user", "--pid", "--fork"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for processes here")
    return inside


# Runs the entry point of a command, and sends the process a signal once it imports what takes its time.
SIGNALLED = """
import os, pkgutil, sys

class Signalling:
    def find_spec(self, name, path=None, target=None):
        if name == "asyncio":
            os.kill(os.getpid(), int(sys.argv.pop(2)))

entry = sys.argv.pop(1)
sys.meta_path.insert(0, Signalling())
sys.exit(pkgutil.resolve_name(entry)())
"""
COMMANDS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", COMMANDS)
def test_process_1_of_a_container_ends_at_a_signal_while_it_imports(
    inside: list[str], name: str, number: signal.Signals
) -> None:
    command = [*inside, sys.executable, "-c", SIGNALLED, COMMANDS[name], "--version", str(number.value)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_1_of_a_container_ends_at_a_signal_while_loading(
    checkpoint: Path, inside: list[str], number: signal.Signals
) -> None:
    command = [SCRIPTS / "encoder-service", "serve", "--model", checkpoint, "--listen", "127.0.0.1:0"]
    process = started(*inside, *command)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (child := children.read_text()):
        time.sleep(0.005)
    wait_until_its_device_loads(int(child))
    os.kill(int(child), number)
    said = last_words(process)
    if "listening" in said:  # a busy machine delayed the signal until it served
        assert process.returncode == 0
        return
    assert process.returncode == 128 + number
    assert re.match(r"encoder-service \S+: loading .+ \.\.\.\n", said)
    assert "Traceback" not in said


def test_ctrl_c_ends_a_client_that_waits(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(32, 32, 1))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        command = [SCRIPTS / "prefill-client", "encode", tmp_path / "photo.jpg", "--server"]
        process = started(*HEED_CTRL_C, *command, f"127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        with connection:  # closed, it would be an answer
            process.send_signal(signal.SIGINT)
            said = last_words(process)
    assert process.returncode == -signal.SIGINT
    assert said == ""


async def test_ctrl_c_pressed_again_ends_a_drain(checkpoint: Path) -> None:
    with running(checkpoint, drain_s=120) as server:
        async with (
            await EncoderClient.connect(server.endpoint) as client,
            # A call that has nothing to do but wait for an image that nobody submits.
            client.fetch([RowRequest(bytes(32))], grace_ms=120_000, timeout_s=120) as stream,
        ):
            waiting = asyncio.ensure_future(anext(aiter(stream)))
            await soon(lambda: server.metrics().total("calls_in_progress") > 0)
            server.process.send_signal(signal.SIGINT)
            await soon(lambda: any("draining" in line for line in server.lines))
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(server.process.wait, 60) == 0  # half of what it had
            waiting.cancel()
    assert "Traceback" not in "\n".join(server.lines)


# Is stopped as soon as it has some of the rows. Without our client's pings, which would end a call that stands still.
READER = """
import os, signal, sys
import grpc
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
endpoint, *digests = sys.argv[1:]
images = [pb.FetchImage(index=index, digest=bytes.fromhex(each)) for index, each in enumerate(digests)]
with grpc.insecure_channel(endpoint) as channel:
    for number, answer in enumerate(EncoderServiceStub(channel).Fetch(pb.FetchRequest(images=images))):
        if number == 0:
            print("stopping", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        for _ in answer.ready:
            print("ready", flush=True)
"""


async def test_a_drain_waits_until_a_slow_reader_has_its_last_rows(checkpoint: Path) -> None:
    images = [photo(900 + n, 700, n) for n in range(2)]
    digests = [content_digest(image).hex() for image in images]
    with running(checkpoint, drain_s=60) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            await client.submit(images)
        await soon(lambda: server.encodes() == len(images))
        reader = started(sys.executable, "-c", READER, server.endpoint, *digests)
        assert reader.stdout
        assert await asyncio.to_thread(reader.stdout.readline) == "stopping\n"
        await soon(lambda: psutil.Process(reader.pid).status() == psutil.STATUS_STOPPED)
        server.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(server.process.wait, 1.5)
        reader.send_signal(signal.SIGCONT)
        said = await asyncio.to_thread(last_words, reader)
        assert (said, reader.returncode) == ("ready\nready\n", 0)
        assert await asyncio.to_thread(server.process.wait, START_S) == 0
