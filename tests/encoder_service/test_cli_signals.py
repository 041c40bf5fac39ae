"""What a signal does to a command, whatever it is at: it ends, soon and without a traceback."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from prefill_client.client import EncoderClient
from prefill_client.images import RowRequest
from testing.photos import photo
from tests.processes import SCRIPTS, running


def heed_ctrl_c() -> None:
    """In a child: what a shell does for a command in the foreground, wherever these tests run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def last_words(process: "subprocess.Popen[str]") -> str:
    """What it said until its end; kill what does not end."""
    try:
        return process.communicate(timeout=20)[0]
    finally:
        process.kill()


# Moments on the way to serving: while torch is imported, and while the model is read.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.4, 2.0])
def test_a_signal_while_loading_ends_it_at_once_and_without_a_word(
    checkpoint: Path, number: signal.Signals, after_s: float
) -> None:
    command = [SCRIPTS / "encoder-service", "serve", "--model", checkpoint, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--store-host-gib", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    time.sleep(after_s)
    process.send_signal(number)
    began = time.monotonic()
    said = last_words(process)
    assert "Traceback" not in said
    assert process.returncode in (-number, 0)  # 0: it was faster than we, and drained
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_1_of_a_container_ends_at_a_signal_while_loading(
    checkpoint: Path, number: signal.Signals
) -> None:
    inside = ["unshare", "--map-root-user", "--user", "--pid", "--fork"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for processes here")
    command = [SCRIPTS / "encoder-service", "serve", "--model", checkpoint, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*inside, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(3):  # a machine that is slow has not come to our first line at the first of them
        time.sleep(0.7)
        if process.poll() is None:
            os.kill(int(children.read_text()), number)
    said = last_words(process)
    assert process.returncode == 128 + number
    assert said == ""


def test_ctrl_c_ends_a_client_that_waits(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photo(32, 32, 1))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        command = [SCRIPTS / "prefill-client", "encode", tmp_path / "photo.jpg", "--server"]
        process = subprocess.Popen(
            [*command, f"127.0.0.1:{silent.getsockname()[1]}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=heed_ctrl_c,
        )
        silent.accept()
        process.send_signal(signal.SIGINT)
        said = last_words(process)
    assert process.returncode == -signal.SIGINT
    assert said == ""


async def test_ctrl_c_pressed_again_ends_a_drain(checkpoint: Path) -> None:
    with running(checkpoint, drain_s=60) as server:
        async with (
            await EncoderClient.connect(server.endpoint) as client,
            # A call that has nothing to do but wait for an image that nobody submits.
            client.fetch([RowRequest(bytes(32))], grace_ms=30_000, timeout_s=30) as stream,
        ):
            waiting = asyncio.ensure_future(anext(aiter(stream)))
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.5)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(server.process.wait, 30) == 0  # half of what it had
            waiting.cancel()
    assert "Traceback" not in "\n".join(server.lines)
