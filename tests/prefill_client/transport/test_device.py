"""Rows on a server's device: which callers read them there, until when, and the fallbacks."""

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from encoder_contract.device_memory import DeviceMemory, allocate, open_memory
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.store import store as storing
from encoder_service.store.moves import PROMOTE_READERS
from prefill_client import EncoderClient, RowRequest
from prefill_client.transport import device as receiving
from testing.photos import photo
from tests.calls import collect, connection, stub
from tests.servers import server_of
from tests.waiting import soon

ROOM = 12  # images of 256x256 for which the device tier has room


@pytest.fixture
async def device(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server with a device tier; a memory file stands in for a GPU's memory."""
    rows_bytes = (256 // 32) ** 2 * model.tower.width * model.tower.dtype.itemsize
    async with server_of(config, model, store_device_gib=ROOM * rows_bytes / (1 << 30)) as server:
        yield server


@pytest.fixture
async def reader(device: Server) -> AsyncIterator[EncoderClient]:
    """A client of that server."""
    async with await EncoderClient.connect(device.endpoint) as client:
        yield client


async def test_rows_on_the_device_are_the_same_rows_and_held_until_the_call_ends(
    reader: EncoderClient, device: Server
) -> None:
    (image,) = await reader.submit([photo(160, 128, 1)])
    async with reader.fetch([RowRequest(image.digest, 2, 17)], transports=["device"]) as stream:
        outcome = await anext(aiter(stream))
        assert (outcome.transport, outcome.shape[0]) == ("device", 15)
        assert device.store.stats().pins == 1
        with outcome.in_place() as lent:
            tensor = lent.tensor()
        kept = outcome.copy()
    await soon(lambda: device.store.stats().pins == 0)
    expected = (await collect(reader, [RowRequest(image.digest, 2, 17)], transports=["inline"]))[0]
    assert torch.equal(tensor, expected.tensor())
    assert torch.equal(kept.tensor(), expected.tensor())
    assert np.array_equal(kept.array, expected.array)


async def test_host_rows_come_by_shared_memory_until_enough_device_readers_ask(
    reader: EncoderClient, device: Server
) -> None:
    images = await reader.submit([photo(256, 256, seed) for seed in range(2 * ROOM)])
    inline = await collect(reader, [RowRequest(image.digest) for image in images], transports=["inline"])
    on_device = device.store.device.entries
    index = next(at for at, image in enumerate(images) if image.address not in on_device)
    request = RowRequest(images[index].digest)
    for number in range(PROMOTE_READERS):
        assert device.store.stats().promotions == 0
        outcome = (await collect(reader, [request], transports=["device"]))[0]
        assert outcome.transport == "shm", number
    await soon(lambda: device.store.stats().promotions == 1)
    outcome = (await collect(reader, [request], transports=["device"]))[0]
    assert outcome.transport == "device"
    assert np.array_equal(outcome.array, inline[index].array)


async def test_a_server_without_a_device_tier_offers_none(client: EncoderClient) -> None:
    assert "device" not in (await connection(client)).receivers
    (image,) = await client.submit([photo(128, 128, 5)])
    outcome = (await collect(client, [RowRequest(image.digest)], transports=["device"]))[0]
    assert outcome.transport == "shm"


@pytest.mark.cuda
async def test_a_tier_without_an_ipc_handle_is_not_offered_and_rows_go_to_the_host(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unnamed(device: str, size_bytes: int) -> DeviceMemory:
        return replace(allocate(device, size_bytes), name=b"", private_because="CUDA: cudaErrorNotSupported")

    monkeypatch.setattr(storing, "allocate", unnamed)
    async with (
        server_of(config, model, store_device_gib=1 / 1024) as server,
        await EncoderClient.connect(server.endpoint) as reader,
    ):
        assert "cannot read the device tier" in caplog.text
        assert "cudaErrorNotSupported" in caplog.text
        assert "device" not in (await connection(reader)).receivers
        (image,) = await reader.submit([photo(128, 128, 5)])
        await soon(lambda: server.store.contains(image.address))
        assert not server.store.device.entries, "a device's process cannot write there"
        by_shm = (await collect(reader, [RowRequest(image.digest)], transports=["device"]))[0]
        inline = (await collect(reader, [RowRequest(image.digest)], transports=["inline"]))[0]
        assert (by_shm.transport, inline.transport) == ("shm", "inline")
        assert np.array_equal(by_shm.array, inline.array)


UNREACHABLE = b"file:4194305:3:1"  # of a process that does not exist, as of one in another namespace


@pytest.mark.cuda
async def test_the_probe_is_opened_on_demand_and_has_no_rows(
    device: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def noted(name: bytes, *arguments: int) -> DeviceMemory:
        opened.append(name)
        return open_memory(name, *arguments)

    monkeypatch.setattr(receiving, "open_memory", noted)
    probe, tier = device.store.device_probe.name, device.store.device.shared_as
    assert probe != tier
    async with await EncoderClient.connect(device.endpoint) as reader:
        (image,) = await reader.submit([photo(128, 128, 4)])
        assert (await collect(reader, [RowRequest(image.digest)]))[0].transport == "shm"
        assert opened == []
        for _ in range(2):
            outcome = (await collect(reader, [RowRequest(image.digest)], transports=["device"]))[0]
            assert outcome.transport == "device"
        assert opened == [probe]


@pytest.mark.cuda
async def test_a_client_that_cannot_open_the_probe_uses_shared_memory(
    device: Server, caplog: pytest.LogCaptureFixture
) -> None:
    assert device.store.device_probe is not None
    device.store.device_probe = replace(device.store.device_probe, name=UNREACHABLE)
    async with await EncoderClient.connect(device.endpoint) as reader:
        images = await reader.submit([photo(128, 128, seed) for seed in range(3)])
        for _ in range(2):
            outcomes = await collect(
                reader, [RowRequest(image.digest) for image in images], transports=["device"]
            )
            assert [outcome.transport for outcome in outcomes.values()] == ["shm"] * 3
    (warning,) = (each.getMessage() for each in caplog.records if "cannot be opened" in each.getMessage())
    assert device.endpoint in warning
    assert "PID and IPC namespaces" in warning


@pytest.mark.cuda
async def test_an_image_falls_back_to_shared_memory(
    reader: EncoderClient, device: Server, caplog: pytest.LogCaptureFixture
) -> None:
    images = await reader.submit([photo(128, 128, seed) for seed in range(3)])
    requests = [RowRequest(image.digest) for image in images]
    inline = await collect(reader, requests, transports=["inline"])
    device.store.device.shared_as = UNREACHABLE
    first, second = [await collect(reader, requests, transports=["device"]) for _ in range(2)]
    for outcomes in (first, second):
        assert [outcome.transport for outcome in outcomes.values()] == ["shm"] * 3
        assert all(np.array_equal(fetched.array, inline[index].array) for index, fetched in outcomes.items())
    assert caplog.text.count("rows arrive by shared memory") == 1
    assert not (await connection(reader)).receivers["device"].usable


async def test_the_device_is_for_callers_who_can_read_the_segment(
    reader: EncoderClient, device: Server
) -> None:
    (image,) = await reader.submit([photo(128, 128, 6)])
    proof = device.store.segment.segment_id
    for shown, has_handle in ((proof, True), (bytes(16), False), (b"", False)):
        request = pb.FetchRequest(
            images=[pb.FetchImage(digest=image.digest)],
            transports=[pb.TRANSPORT_DEVICE],
            grace_ms=30_000,
            shm_proof=shown,
        )
        call = (await stub(reader)).Fetch(request, timeout=60)
        assert bool((await call.read()).ready[0].handle.memory) == has_handle, shown
        call.cancel()
