"""A server gets other weights while it runs: new calls get them, old ones keep theirs, a failure changes nothing."""

import asyncio
import gc
import json
import os
import shutil
import signal
import struct
import urllib.request
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, ModelMismatchError, OverloadedError
from encoder_contract.v1 import admin_pb2
from encoder_contract.v1.admin_pb2_grpc import AdminServiceStub
from encoder_service.app import Server
from encoder_service.cluster.cluster import IndexState
from encoder_service.config import Config
from encoder_service.devices.model import Model, load_model
from prefill_client import EncoderClient, RowRequest
from testing.device_thread import DeviceThread
from testing.photos import photo
from tests.calls import collect, connection
from tests.cluster_replica import PATIENCE
from tests.operator_view import numbers
from tests.processes import run, running
from tests.servers import server_and_client, server_of
from tests.waiting import PATIENCE_S, soon

PHOTOS = [photo(96 + 32 * number, 64, number) for number in range(4)]
CHATS = 8


@dataclass(frozen=True)
class Version:
    """A checkpoint of the tests' architecture, and the rows of `PHOTOS` that a server started on it makes."""

    folder: Path
    fingerprint: bytes
    rows: list[bytes]


Versions = tuple[Version, Version]


@pytest.fixture(scope="module")
def second(kept_checkpoint: Callable[..., Path]) -> Path:
    return kept_checkpoint(seed=1)


@pytest.fixture(scope="module")
def versions(config: Config, model: Model, second: Path) -> Versions:
    other = replace(config, model=second)
    loaded = load_model(other)
    try:
        return asyncio.run(version_of(config, model)), asyncio.run(version_of(other, loaded))
    finally:
        loaded.decoder.close()


async def version_of(config: Config, model: Model) -> Version:
    async with server_and_client(config, model) as (_, client):
        return Version(config.model, model.recipe.model, await rows_of(client, PHOTOS))


async def encodes(server: Server) -> float:
    """Return how many images a server has encoded."""
    return (await numbers(server)).total("encoded_images_total", outcome="kept")


async def rows_of(client: EncoderClient, files: list[bytes]) -> list[bytes]:
    """Submit, keep and fetch; raise the first error."""
    async with await client.keep(files, timeout_s=PATIENCE_S, again_s=1.0) as kept:
        for answer in kept.answers:
            if answer.error is not None:
                raise answer.error
        outcomes = await collect(client, [RowRequest(each.digest) for each in kept.answers], kept=True)
    for rows in outcomes.values():
        if rows.error is not None:
            raise rows.error
    return [outcomes[index].array.tobytes() for index in range(len(files))]


async def reload(server: Server, folder: Path | str) -> list[str]:
    return [step.text async for step in server.reload(str(folder))]


async def refusal_of(server: Server, folder: Path | str) -> str:
    with pytest.raises(EncoderError) as refused:
        await reload(server, folder)
    assert "\n" not in refused.value.message
    return refused.value.message


def children(parent: int = 0) -> set[int]:
    """Return the processes that a process has started, by default this one."""
    found: set[int] = set()
    for each in Path(f"/proc/{parent or 'self'}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found.update(map(int, each.read_text().split()))
    return found


@pytest.fixture
async def server(config: Config, model: Model) -> AsyncIterator[Server]:
    async with server_of(config, model, drain_s=60) as server:
        yield server


@asynccontextmanager
async def connected(*servers: Server, model: bytes = b"") -> AsyncIterator[EncoderClient]:
    endpoints = [server.endpoint for server in servers]
    async with await EncoderClient.connect(endpoints, model_fingerprint=model) as client:
        yield client


async def test_new_calls_get_the_new_weights_and_old_rows_answer_only_for_the_old_ones(
    server: Server, versions: Versions
) -> None:
    first, second = versions
    served, before = [weakref.ref(server.serving)], children()
    async with connected(server) as old:
        assert await rows_of(old, PHOTOS) == first.rows
        steps = await reload(server, second.folder)
        assert "loading" in steps[0]
        assert second.fingerprint.hex() in steps[-1]
        with pytest.raises(
            ModelMismatchError, match=f"{first.fingerprint.hex()}.*{second.fingerprint.hex()}"
        ):
            await rows_of(old, PHOTOS)
    async with connected(server, model=second.fingerprint) as new:
        assert new.description.model_name == second.folder.name
        assert await rows_of(new, PHOTOS) == second.rows
    assert first.fingerprint.hex() not in server.banner()
    encoded = await encodes(server)
    served.append(weakref.ref(server.serving))
    await reload(server, first.folder)
    async with connected(server) as again:
        assert again.description.model_fingerprint == first.fingerprint
        assert await rows_of(again, PHOTOS) == first.rows
    assert await encodes(server) == encoded, "the old rows were still in the store"
    await soon(lambda: len(children() - before) == 1)  # the process of the device
    await soon(lambda: gc.collect() >= 0 and not any(each() for each in served))


async def test_traffic_during_a_reload_never_fails_and_never_gets_a_row_of_other_weights(
    config: Config, model: Model, versions: Versions
) -> None:
    """Two devices, so that old and new towers encode side by side. A chat that is refused connects again."""
    expected = {version.fingerprint: version.rows for version in versions}
    answered = dict.fromkeys(expected, 0)
    two = replace(config, devices="cpu,cpu", drain_s=60)
    devices = [DeviceThread(two, model, number, 2) for number in range(2)]
    done = asyncio.Event()

    async def chat(server: Server) -> None:
        while not done.is_set():
            async with connected(server) as client:
                fingerprint = client.description.model_fingerprint
                try:
                    while not done.is_set():
                        await asyncio.to_thread(server.store.flush)  # else the tower has nothing to do
                        assert await rows_of(client, PHOTOS) == expected[fingerprint]
                        answered[fingerprint] += 1
                except ModelMismatchError:
                    is_gone = server.model.facts.recipe.model != fingerprint
                    assert is_gone, "only weights that are gone are refused"

    async with server_of(two, model, devices) as server, asyncio.TaskGroup() as group:
        for _ in range(CHATS):
            group.create_task(chat(server))
        for version in reversed(versions):
            before = answered[version.fingerprint]
            await reload(server, version.folder)
            await soon(lambda: answered[version.fingerprint] >= before + 2 * CHATS)  # noqa: B023
        done.set()


async def test_a_request_submitted_before_is_fetched_after(server: Server, versions: Versions) -> None:
    """Rows are made and fetched under the old name while its request is open, by the old weights."""
    first, second = versions
    async with connected(server) as client, await client.keep(PHOTOS) as kept:
        await reload(server, second.folder)
        await asyncio.to_thread(server.store.flush)
        outcomes = await collect(client, [RowRequest(each.digest) for each in kept.answers], kept=True)
        assert [outcomes[index].array.tobytes() for index in range(len(PHOTOS))] == first.rows
        with pytest.raises(ModelMismatchError):
            await rows_of(client, PHOTOS)


async def test_rows_that_a_client_reads_in_place_stay_as_they_are(server: Server, versions: Versions) -> None:
    first, second = versions
    async with connected(server) as client:
        [submitted] = await client.submit(PHOTOS[:1])
        async with client.fetch([RowRequest(submitted.digest)], transports=["shm"]) as stream:
            held = [rows async for rows in stream]
            await reload(server, second.folder)
            await asyncio.to_thread(server.store.flush)
            async with connected(server) as new:
                assert await rows_of(new, PHOTOS) == second.rows
            assert [rows.transport for rows in held] == ["shm"]
            assert held[0].array.tobytes() == first.rows[0]
            assert not held[0].lost


async def test_clients_go_to_the_replica_with_their_weights_while_a_fleet_reloads(
    config: Config, model: Model, server: Server, versions: Versions
) -> None:
    first, second = versions
    async with server_of(config, model) as other, connected(server, other) as old:
        await reload(server, second.folder)
        for _ in range(3):
            assert await rows_of(old, PHOTOS) == first.rows
        async with connected(server, other, model=second.fingerprint) as new:
            assert await rows_of(new, PHOTOS) == second.rows
            await reload(other, second.folder)
            assert await rows_of(new, PHOTOS) == second.rows
            await soon(lambda: not new.why_down)
        with pytest.raises(ModelMismatchError):
            await rows_of(old, PHOTOS)


async def test_replicas_find_each_other_by_the_weights_that_they_have_now(
    config: Config, model: Model, versions: Versions, redis_url: str
) -> None:
    first, second = versions
    # A stall of a busy machine is not an outage: without their index, replicas would hand over nothing.
    indexed = replace(
        config, index=redis_url, index_prefix="reload", index_timeout_ms=2000, hand_over_s=PATIENCE_S
    )
    async with (
        server_of(indexed, model, patience=PATIENCE) as one,
        server_of(indexed, model, patience=PATIENCE) as other,
    ):
        await soon(lambda: one.cluster.status.peers == other.cluster.status.peers == 1)
        async with connected(one) as client:
            assert await rows_of(client, PHOTOS) == first.rows
        await reload(one, second.folder)
        await soon(lambda: other.cluster.status.peers == 0)  # rows that only `one` had are there now
        async with connected(other) as client:
            assert await rows_of(client, PHOTOS) == first.rows
        assert await encodes(other) == 0
        await reload(other, second.folder)
        await soon(lambda: one.cluster.status.peers == other.cluster.status.peers == 1)
        async with connected(other) as client:
            assert await rows_of(client, PHOTOS) == second.rows
        assert one.cluster.status.state is IndexState.JOINED


async def test_a_process_that_starts_later_loads_the_new_weights(
    server: Server, versions: Versions, tmp_path: Path
) -> None:
    """A link in the path does not count any more, and changed files are refused: their rows would get these names."""
    first, second = versions
    folder, link = tmp_path / "checkpoint", tmp_path / "latest"
    shutil.copytree(second.folder, folder)
    link.symlink_to(folder)
    await reload(server, link)
    link.unlink()
    link.symlink_to(first.folder)
    [device] = server.serving.devices
    device.kill()
    async with connected(server) as client:
        await soon(lambda: sum(device.restarts.values()) == 1 and device.is_up)
        await asyncio.to_thread(server.store.flush)
        assert await rows_of(client, PHOTOS) == second.rows
        shutil.copy(first.folder / "model.safetensors", folder)
        device.kill()
        await soon(lambda: sum(device.restarts.values()) == 2 and device.failures >= 2)
        assert not device.is_up
        shutil.copy(second.folder / "model.safetensors", folder)
        await soon(lambda: device.is_up)
        await asyncio.to_thread(server.store.flush)
        assert await rows_of(client, PHOTOS) == second.rows


async def test_equal_weights_in_another_folder_change_nothing_but_the_folder(
    server: Server, versions: Versions, tmp_path: Path
) -> None:
    first, _ = versions
    folder = tmp_path / "copy"
    shutil.copytree(first.folder, folder)
    before = server.serving
    async with connected(server) as client:
        assert "served already" in (await reload(server, folder))[-1]
        assert server.serving is before
        assert server.serving.config.model == folder
        assert await rows_of(client, PHOTOS) == first.rows


# Failures: the server goes on


def damaged(folder: Path, weights: Path) -> Iterator[tuple[str, str]]:
    """Yield folders that are refused before a process starts, and what the refusal says."""
    yield "relative", "absolute path"
    yield "", "absolute path"
    yield f"{folder}/absent", "No such file"
    yield f"{folder}/nul\0", "null byte"
    yield f"{folder}/{'a' * 5000}", "File name too long"
    (folder / "loop").symlink_to(folder / "loop")
    yield f"{folder}/loop", "loop"
    yield str(weights / "config.json"), "folder"
    (folder / "empty").mkdir()
    yield f"{folder}/empty", "config.json is missing"
    cut = shutil.copytree(weights, folder / "cut")
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 1000)
    yield str(cut), "is cut off"
    pipe = shutil.copytree(weights, folder / "pipe")
    (pipe / "model.safetensors").unlink()
    os.mkfifo(pipe / "model.safetensors")
    yield str(pipe), "no weights"


@pytest.mark.attack(
    "a reload of a path that is no checkpoint: relative, absent, looping, too long, a pipe, cut off"
)
async def test_a_folder_that_cannot_be_served_is_refused_in_one_line(
    server: Server, versions: Versions, tmp_path: Path
) -> None:
    first, second = versions
    before = children()
    for folder, says in damaged(tmp_path, second.folder):
        assert says in await refusal_of(server, folder), folder
    assert children() == before
    async with connected(server) as client:
        assert await rows_of(client, PHOTOS) == first.rows


def huge(folder: Path, like: Path) -> Path:
    """Write a checkpoint whose vision tensors take more memory than the machine has. Its file is sparse."""
    shutil.copytree(like, folder)
    size = 1 << 42
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"model.visual.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return folder


async def test_another_architecture_or_too_little_memory_is_refused_in_one_line(
    server: Server, versions: Versions, kept_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = versions
    before = children()
    assert "its depth is 2, not 4" in await refusal_of(server, kept_checkpoint(depth=2))
    assert "weights take 4096.00 GiB" in await refusal_of(server, huge(tmp_path / "huge", second.folder))
    other = shutil.copytree(second.folder, tmp_path / "processor")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    assert "its processor is" in await refusal_of(server, other)
    assert children() == before
    async with connected(server) as client:
        assert await rows_of(client, PHOTOS) == first.rows


async def test_a_process_that_ends_or_hangs_loading_changes_nothing(
    server: Server, versions: Versions
) -> None:
    """One that hangs can be abandoned: the caller leaves. Until then no other reload starts."""
    first, second = versions
    before = children()
    reloading = asyncio.create_task(refusal_of(server, second.folder))
    await soon(lambda: bool(children() - before))
    os.kill((children() - before).pop(), signal.SIGKILL)
    assert "ended with status -9 while it loaded" in await reloading
    assert children() == before

    hanging = asyncio.create_task(reload(server, second.folder))
    await soon(lambda: bool(children() - before))
    os.kill((children() - before).pop(), signal.SIGSTOP)
    with pytest.raises(OverloadedError, match="another reload is running"):
        await reload(server, second.folder)
    async with connected(server) as client:
        assert await rows_of(client, PHOTOS) == first.rows
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert children() == before
    await reload(server, second.folder)
    async with connected(server) as client:
        assert await rows_of(client, PHOTOS) == second.rows


async def test_a_drain_ends_a_reload(config: Config, model: Model, second: Path) -> None:
    before = children()
    async with server_of(config, model) as server:
        reloading = asyncio.create_task(refusal_of(server, second))
        await soon(lambda: bool(children() - before))
        await server.drain()
        assert "draining" in await reloading
        assert children() == before


async def test_the_command_prints_the_steps_and_fails_in_one_line(
    config: Config, versions: Versions, tmp_path: Path
) -> None:
    """Also while the server is killed: the command ends, and no process of the reload is left."""
    first, second = versions
    with running(first.folder, devices="cpu", drain_s=1) as server:
        at = ("--server", server.endpoint)
        link = tmp_path / "latest"
        link.symlink_to(second.folder)
        done = await asyncio.to_thread(run, "encoder-service", "reload", link, *at, timeout_s=PATIENCE_S)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["loading", "serving"]
        assert second.fingerprint.hex() in done.stdout
        assert server.metrics().text("model_info", "fingerprint") == second.fingerprint.hex()[:12]
        page = urllib.request.urlopen(server.metrics_url, timeout=PATIENCE_S).read().decode()
        assert str(second.folder) in page
        assert str(first.folder) not in page
        async with await EncoderClient.connect(
            server.endpoint, model_fingerprint=second.fingerprint
        ) as client:
            assert await rows_of(client, PHOTOS) == second.rows
        absent = await asyncio.to_thread(run, "encoder-service", "reload", tmp_path / "absent", *at)
        assert (absent.returncode, absent.stdout) == (1, "")
        assert absent.stderr.count("\n") == 1
        assert "not reloaded, the server goes on as before" in absent.stderr
        killed = asyncio.create_task(
            asyncio.to_thread(run, "encoder-service", "reload", first.folder, *at, timeout_s=PATIENCE_S)
        )
        before = children(server.process.pid)
        await soon(lambda: bool(children(server.process.pid) - before))
        started = children(server.process.pid)
        server.kill()
        ended = await killed
        assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
        await soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


@pytest.mark.attack("a reload without the proof of the server's user, or by a caller that leaves at once")
async def test_a_reload_needs_the_proof_of_the_servers_user(server: Server, versions: Versions) -> None:
    before = children()
    async with connected(server) as client:
        operator: Any = AdminServiceStub((await connection(client)).channel)
        for proof in (b"", bytes(16), content_digest(b"guess")[:16]):
            request = admin_pb2.ReloadRequest(proof=proof, folder=str(versions[1].folder))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await operator.Reload(request).read()
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    async with aclosing(server.reload(str(versions[1].folder))) as steps:
        await anext(steps)
    assert children() == before
    assert server.model.facts.recipe.model == versions[0].fingerprint
