"""A device's process that hangs as a whole is noticed and replaced, and does not keep the server from ending."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder_service.config import Config, ConfigError
from encoder_service.devices import EXIT_STUCK, device_link, device_main, device_process, dispatcher, messages
from encoder_service.devices.device_link import Link
from encoder_service.devices.device_process import DeviceProcess
from testing.photos import photo
from tests.encoder_service.devices.test_devices import fetched, serving
from tests.encoder_service.devices.test_lost_device import listening, started
from tests.lost_device import LOAD_HANGS, LOSING
from tests.processes import running
from tests.waiting import PATIENCE_S, START_S, soon


def stop(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the process of a device. Until it is replaced, a tick of the watchdog counts as ten for this device only."""
    stopped, tick = link.device.process, link.tick

    def hurried_tick() -> str:
        ticks = 10 if link.device.process is stopped else 1
        return next(filter(None, (tick() for _ in range(ticks))), "")

    monkeypatch.setattr(link, "tick", hurried_tick)
    os.kill(stopped.pid, signal.SIGSTOP)


async def test_a_stopped_process_is_replaced_and_its_images_are_encoded(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config, "cpu") as (server, client, [device]):
        known = [photo(96, 96, 1)]
        before = await fetched(client, known)
        stopped = device.process
        stop(server.dispatcher.links[0], monkeypatch)
        new = asyncio.create_task(fetched(client, [photo(96, 96, n) for n in range(2, 6)]))
        await soon(lambda: server._not_ready() == "no device answers")
        assert await fetched(client, known) == before, "rows that are held need no device"
        await new
        assert device.restarts["stuck"] == 1
        assert stopped.returncode == -signal.SIGKILL
        await soon(lambda: server._not_ready() == "")


async def test_health_follows_the_devices(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(config, "cpu") as (server, _, [device]),
        grpc.aio.insecure_channel(server.endpoint) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stop(server.dispatcher.links[0], monkeypatch)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server._not_ready() == "no device answers"
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING, "it was restarted"
        assert device.restarts["stuck"] == 1
        watch.cancel()


def test_a_process_that_hangs_as_it_loads_is_ended(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_process, "START_SILENCE_S", 1.0)
    device = DeviceProcess(config, 0, 1)
    os.kill(device.process.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="said nothing for 1 s while it loaded"):
        device.load()
    assert device.process.returncode == -signal.SIGKILL


def test_a_process_that_stops_after_its_first_report_is_ended_sooner(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_process, "LOAD_SILENCE_S", 2.0)
    monkeypatch.setattr(device_process, "_MODULE", "tests.lost_device")
    monkeypatch.setenv(LOSING, f"{LOAD_HANGS}:")
    device = DeviceProcess(config, 0, 1)
    try:
        assert wait([device.connection], START_S), "its first report"
        os.kill(device.process.pid, signal.SIGSTOP)
        with pytest.raises(ConfigError, match="said nothing for 2 s while it loaded"):
            device.load()
        assert device.process.returncode == -signal.SIGKILL
    finally:
        device.kill()


def test_a_process_that_loads_for_long_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "REPORT_S", 0.0)
    ours, theirs = socket.socketpair()
    loaded = threading.Event()
    with ours, theirs:
        reporting = device_main._report(partial(messages.send, theirs), lambda: None, loaded)
        assert [messages.receive(ours) for _ in range(3)] == [messages.Report(None)] * 3
        loaded.set()
        ours.close()  # it may wait for room to send
        reporting.join(PATIENCE_S)
        assert not reporting.is_alive()


async def test_a_successor_that_hangs_while_it_loads_is_replaced(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(config, "cpu") as (server, client, [device]):
        with monkeypatch.context() as patched:
            patched.setattr(device_process, "START_SILENCE_S", 0.01)  # it hangs as soon as it starts
            device.process.kill()
            await soon(lambda: "said nothing" in caplog.text)
        await fetched(client, [photo(96, 96, 1)])
        assert server._not_ready() == ""


async def test_images_of_stopped_processes_continue(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(config, "cpu,cpu") as (server, client, [first, second]):
        stop(server.dispatcher.links[0], monkeypatch)
        await fetched(client, [photo(96, 96, n) for n in range(8)])
        assert server._not_ready() == "", "one device answers"
        await soon(lambda: first.restarts["stuck"] == 1, START_S)
        assert not second.restarts["stuck"]


def test_a_server_with_a_stopped_device_ends_when_it_is_told_to(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with running(checkpoint, devices="cpu", drain_s=1, log=log) as server:
        [device] = [
            child
            for child in psutil.Process(server.process.pid).children()
            if any("device_main" in argument for argument in child.cmdline())
        ]
        device.send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        try:
            # The drain, then the time in which devices may finish their batches; on a busy machine ten times that.
            assert server.process.wait(10 * (1 + dispatcher.STOP_S)) == 0
        except subprocess.TimeoutExpired:
            pytest.fail(log.read_text())
        finally:
            with suppress(psutil.NoSuchProcess):
                device.kill()
    assert not list(Path("/dev/shm").glob(f"*{server.process.pid}*"))


async def test_whatever_hangs_while_draining_the_process_ends(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with started("drain hangs", checkpoint, tmp_path, "--drain-s", "1") as process:
        await listening(log)
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.to_thread(process.join, PATIENCE_S)
        assert process.exitcode == EXIT_STUCK, log.read_text()
    assert "the server has not ended within" in log.read_text()


def test_a_device_is_not_ready_before_it_is_killed() -> None:
    assert 1 < device_link.QUIET_TICKS < device_link.SILENT_TICKS
