"""Signals other than SIGTERM and SIGINT: none ends a server without a drain, or leaves its segment behind."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from prefill_client import EncoderClient
from testing.photos import photo
from tests.calls import encoded
from tests.processes import running
from tests.waiting import START_S, soon

HARMLESS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO")


async def test_no_harmless_signal_ends_a_server_and_sigquit_drains_it(checkpoint: Path) -> None:
    with running(checkpoint) as server:
        devices = psutil.Process(server.process.pid).children(recursive=True)
        for name in HARMLESS:
            for pid in (server.process.pid, *(each.pid for each in devices)):
                os.kill(pid, signal.Signals[name])
        async with await EncoderClient.connect(server.endpoint) as client:
            await client.submit([image := photo(64, 48, 1)])
            await encoded(client, image)
        assert server.process.poll() is None
        assert all(each.is_running() for each in devices)
        await soon(lambda: any("certificates and tenants are checked" in line for line in server.lines))
        assert any("most recent call first" in line for line in server.lines), "SIGUSR2 shows the stacks"
        segment = f"encoder-service-{server.process.pid}-*"
        assert [*Path("/dev/shm").glob(segment)]
        server.process.send_signal(signal.SIGQUIT)
        assert await asyncio.to_thread(server.process.wait, START_S) == 0
        await soon(lambda: any("drained" in line for line in server.lines))
    assert not [*Path("/dev/shm").glob(segment)]


async def test_sighup_reads_a_changed_file_of_tenants(checkpoint: Path, tmp_path: Path) -> None:
    key, tenants = tmp_path / "fleet.key", tmp_path / "tenants.toml"
    key.write_text("of a fleet that exists only in this test\n")
    tenants.write_text(f'[chat]\ntokens = ["{"a" * 64}"]\nrights = ["submit"]\n')
    with running(checkpoint, tenants_file=tenants, fleet_key_file=key) as server:

        def says(what: str) -> bool:
            return any(what in line for line in server.lines)

        assert not says("tenants.toml reloaded")
        tenants.write_text(f'[chat]\ntokens = ["{"b" * 64}"]\nrights = ["submit"]\n')
        server.process.send_signal(signal.SIGHUP)
        await soon(lambda: says("certificates and tenants are checked"))
        assert says("tenants.toml reloaded"), "without a call, which would read the file too"


def test_a_device_process_gets_neither_the_password_of_redis_nor_other_secrets(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("ENCSVC_INDEX", "redis://:hunter2@127.0.0.1:1")
    with running(checkpoint) as server:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        environments = {each.name(): Path(f"/proc/{each.pid}/environ").read_bytes() for each in processes}
        assert environments.keys() >= {"device", "decoder"}
        assert b"PATH=" in environments["device"]
        assert not [name for name, has in environments.items() if b"hunter2" in has]
