"""A server whose decoders are attacked from outside: images fail one by one or not at all, and the server goes on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prefill_client import EncoderClient, EncoderError, RowRequest
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.processes import running
from tests.waiting import PATIENCE_S, soon


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with running(checkpoint, decoder_process="auto", decode_threads=1) as server:
        yield server


def decoders(server: ServerProcess) -> list[psutil.Process]:
    """Return the decoder processes of the device's process. Those of the server itself only read headers."""
    engines = [each for each in psutil.Process(server.process.pid).children() if each.name() == "device"]
    return [each for engine in engines for each in engine.children() if each.name() == "decoder"]


async def outcomes(client: EncoderClient, images: list[bytes]) -> list[EncoderError | None]:
    """What became of each: None for rows."""
    found: dict[bytes, EncoderError | None] = {}
    submitted = await client.submit(images)
    async with client.fetch([RowRequest(each.digest) for each in submitted], timeout_s=PATIENCE_S) as stream:
        async for rows in stream:
            found[rows.digest] = rows.error
    return [found[each.digest] for each in submitted]


async def test_repeatedly_killed_decoders_cost_no_retried_image(server: ServerProcess) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        assert await outcomes(client, [photo(64, 48, 1), photo(64, 48, 2, "PNG")]) == [None, None]
        for seed in range(3, 6):
            for each in decoders(server):
                os.kill(each.pid, signal.SIGKILL)
            assert await outcomes(client, [photo(64, 48, seed), photo(64, 48, seed, "PNG")]) == [None, None]
    # The device reports it four times a second.
    await soon(lambda: server.metrics().total("decoder_restarts_total", reason="killed") >= 3)
    assert server.process.poll() is None
    assert not [each for each in decoders(server) if each.status() == psutil.STATUS_ZOMBIE]


async def test_decoding_stays_in_the_devices_process_on_request(checkpoint: Path) -> None:
    with running(checkpoint, decoder_process="no", decode_threads=1) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            assert await outcomes(client, [photo(64, 48, 1), photo(64, 48, 2, "PNG")]) == [None, None]
        below = psutil.Process(server.process.pid).children(recursive=True)
        assert [each.name() for each in below] == ["device"]
        assert server.metrics().total("decoder_restarts_total") == 0


async def test_a_server_reports_its_sandbox_and_its_decoders_end_with_it(server: ServerProcess) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        assert await outcomes(client, [photo(64, 48, 9, "PNG")]) == [None]
    assert any("in separate processes" in line for line in server.lines)
    below = psutil.Process(server.process.pid).children(recursive=True)
    assert decoders(server)
    server.process.kill()  # which nothing can clean up after
    gone, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], gone
