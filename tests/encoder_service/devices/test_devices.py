"""Several devices, and device processes that are killed or do not start."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from encoder_contract.video import VideoSettings
from encoder_service.app import Server
from encoder_service.config import Config, ConfigError
from encoder_service.devices import model as loading
from encoder_service.devices.device_process import DeviceProcess, start_devices
from encoder_service.devices.environment import device_environment
from encoder_service.devices.model import Model, load_model
from encoder_service.devices.served_model import load_devices
from encoder_service.devices.torch_device import Device
from prefill_client import EncoderClient, RowRequest
from prefill_client.video import Video, read_videos
from testing.clips import clip
from testing.device_thread import DeviceThread
from testing.photos import photo
from tests.calls import all_encoded, collect
from tests.servers import server_and_client
from tests.waiting import START_S, soon


@asynccontextmanager
async def serving(
    config: Config, devices: str, **settings: float
) -> AsyncIterator[tuple[Server, EncoderClient, Sequence[DeviceProcess]]]:
    """Run a server with a process for each device."""
    config = replace(config, devices=devices, **settings)
    started = start_devices(config)
    files = await asyncio.to_thread(load_devices, config, started)
    server = Server(config, started, files)
    await server.start()
    try:
        async with await EncoderClient.connect(server.endpoint) as client:
            yield server, client, started
    finally:
        await server.drain()
        files.close()


async def fetched(client: EncoderClient, images: Sequence[bytes]) -> list[bytes]:
    """Submit images and return the rows of each."""
    return [rows.array.tobytes() for rows in await all_encoded(client, images, transports=["inline"])]


async def test_processes_share_a_queue_and_a_store_and_give_equal_rows(config: Config, model: Model) -> None:
    images = [photo(256, 256 + 32 * (n % 4), n) for n in range(24)]
    async with server_and_client(config, model) as (server, client):
        expected = await fetched(client, images)
    async with serving(config, "cpu,cpu") as (server, client, devices):
        assert await fetched(client, images) == expected
        assert server.store.stats().tiers[-1].entries == len(images)
        await soon(lambda: all(device.counts["eager_batches"] for device in devices))
        assert len({device.process.pid for device in devices}) == 2


async def test_a_killed_process_costs_no_image_and_no_row(config: Config) -> None:
    known = [photo(128, 128, n) for n in range(8)]
    async with serving(config, "cpu") as (server, client, [device]):
        before = await fetched(client, known)
        loads = [[photo(320, 320, 100 + 4 * n + k) for k in range(4)] for n in range(8)]
        loading = [asyncio.create_task(fetched(client, load)) for load in loads]
        held = len(known)
        await soon(lambda: server.store.stats().tiers[-1].entries > held)
        os.kill(device.process.pid, signal.SIGKILL)
        await soon(lambda: not device.is_up)
        assert await fetched(client, known) == before, "rows that are held need no device"
        await asyncio.gather(*loading)
        await soon(lambda: device.restarts["killed"] == 1)
        assert server.store.stats().tiers[-1].entries == len(known) + 32
        await soon(lambda: server.store.stats().pins == 0)
        assert server.store.flush() == len(known) + 32
        assert server.store.stats().tiers[-1].used_bytes == 0, "no pages are lost"


async def test_one_of_two_processes_continues_when_the_other_is_killed(config: Config, model: Model) -> None:
    images = [photo(192, 192, n) for n in range(4)]
    async with server_and_client(config, model) as (_, client):
        expected = await fetched(client, images)
    async with serving(config, "cpu,cpu") as (_, client, [first, second]):
        continues = second.process.pid
        os.kill(first.process.pid, signal.SIGKILL)
        await soon(lambda: not first.is_up)
        assert await fetched(client, images) == expected
        await soon(lambda: second.counts["eager_batches"] > 0)
        await soon(lambda: first.is_up, START_S)
        assert second.process.pid == continues
        assert (first.restarts["killed"], sum(second.restarts.values())) == (1, 0)


async def test_a_process_restarted_during_shutdown_is_ended_before_it_loads(config: Config) -> None:
    async with serving(config, "cpu") as (_, _, [device]):
        before = device.process
        os.kill(before.pid, signal.SIGKILL)
        await soon(lambda: device.process is not before)
    assert device.process is not before
    assert device.process.returncode == -signal.SIGKILL, "it loaded, and ended in order"


async def test_processes_write_rows_into_the_device_tier(config: Config) -> None:
    async with serving(config, "cpu", store_device_gib=0.01) as (server, client, _):
        await fetched(client, [photo(128, 128, n) for n in range(4)])
        assert server.store.stats().tiers[0].writes == 4


async def test_a_process_encodes_frames_of_a_video(config: Config, model: Model) -> None:
    data, settings = clip("mp4", frames=20, fps=10.0), VideoSettings.from_folder(config.model)

    async def rows_by(client: EncoderClient) -> list[bytes]:
        (video,) = await read_videos(client, [data], settings)
        assert isinstance(video, Video), video
        await client.submit(video.images)
        outcomes = await collect(client, [RowRequest.of(image) for image in video.images])
        assert not any(rows.error for rows in outcomes.values())
        return [outcomes[index].array.tobytes() for index in sorted(outcomes)]

    async with server_and_client(config, model) as (_, client):
        expected = await rows_by(client)
    async with serving(config, "cpu") as (_, client, _):
        assert await rows_by(client) == expected


def test_an_error_at_load_in_a_process_is_one_line_of_the_server(config: Config, tmp_path: Path) -> None:
    for file in config.model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    broken = replace(config, model=tmp_path)
    with pytest.raises(ConfigError, match=f"--model {tmp_path}: ") as refused:
        load_devices(broken, start_devices(broken))
    assert "\n" not in str(refused.value)


def test_too_little_memory_is_reported_before_weights_load(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "unused_memory_bytes", lambda: 1000)
    monkeypatch.setattr(loading, "load_family", None)
    with pytest.raises(ConfigError, match=r"--devices cpu: the tower's weights take .* 0.00 GiB are free"):
        load_model(config)
    monkeypatch.setattr(loading, "unused_memory_bytes", lambda: 1 << 30)  # enough for the weights
    with pytest.raises(
        ConfigError, match=r"weights take 2.0. GiB with what it needs for images, and 1.00 GiB"
    ):
        load_model(config, beside_bytes=2 << 30)


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ("gpu", "must be auto, or a comma-separated list of cpu, cuda or cuda:N, got gpu"),
        ("cuda:0,cuda:0", "must name each GPU once, got cuda:0,cuda:0"),
        ("cuda,cuda:0", "must name each GPU once"),
        ("cpu,cuda:0", "must not mix the CPU with GPUs"),
        ("auto,cpu", "must be auto, or a comma-separated list of cpu"),
        ("", "must be auto, or a comma-separated list of cpu"),
        (",".join(["cpu"] * (len(os.sched_getaffinity(0)) + 1)), "times, once for each core"),
    ],
)
def test_invalid_device_lists_are_refused(config: Config, devices: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--devices .*{says}"):
        replace(config, devices=devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_each_missing_gpu_is_reported(config: Config) -> None:
    two = replace(config, devices="cuda:0,cuda:1")
    with pytest.raises(ConfigError, match=r"--devices cuda:0: torch .* sees 0 CUDA devices"):
        load_devices(two, start_devices(two))


def test_the_cpu_beside_a_gpu_is_said_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` found no CUDA device: a driver too old, or a torch without CUDA, would cost a user a hundredfold."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loading, "_DEVICE_FILES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert (loading._device("auto"), caplog.text) == ("cpu", "")
    (tmp_path / "nvidia0").touch()
    for version, reason in ((None, "is a build without CUDA"), ("13.0", "torch's CUDA 13.0 finds no device")):
        caplog.clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        assert loading._device("auto") == "cpu"
        assert "nvidia0 is there" in caplog.text
        assert reason in caplog.text


async def test_a_device_tier_that_another_device_cannot_write_is_refused_at_start(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes would end as soon as they map the tier, and be started again for ever."""
    peers = {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in peers)
    assert Device("cuda:1").can_access("cuda:0")
    assert Device("cuda:2").can_access("cuda:2")
    device = DeviceThread(config, model)
    device.name = "cuda:2"
    with pytest.raises(ConfigError, match="cuda:2 cannot write to the device tier on cpu"):
        Server(replace(config, store_device_gib=0.01), [device], model.decoder.files)


def test_a_device_process_gets_the_compiler_that_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/opt/cc")
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    environment = device_environment()
    assert environment["CC"] == "/opt/cc"
    assert "REDIS_PASSWORD" not in environment
