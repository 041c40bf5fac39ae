"""Rows that workers copy from a server's GPU; a memory file replaces the GPU's memory."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient, Submitted
from prefill_client.transport import device as transport
from prefill_client.vllm.host_memory import HostMemory
from prefill_client.vllm.image_name import ImageName, RequestInfo
from prefill_client.vllm.row_fetcher import FetchQuery, Outcome, RowFetcher
from prefill_client.vllm.staging import FRAME, Staging, StagingWorker
from prefill_client.vllm.vllm_settings import VllmSettings
from testing.photos import photo
from testing.tcp_proxy import TcpProxy
from tests.calls import fetched
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

TOKENS = 64  # of a photo of 256x256
IMAGES = 12  # that fit into the device tier
LIMIT = 3  # images that fit into the workers' limit
UNREACHABLE = b"file:4194305:3:1"  # of a process that does not exist, like one in another namespace


@pytest.fixture
async def server(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server with a device tier."""
    size = TOKENS * model.tower.width * model.tower.dtype.itemsize
    async with server_of(config, model, store_device_gib=IMAGES * size / (1 << 30)) as server:
        yield server


class Engine:
    """The parts of an engine: the scheduler's side with host memory, and workers with their own copies."""

    def __init__(
        self, client: EncoderClient, fetcher: RowFetcher, staging: Staging, memory: HostMemory
    ) -> None:
        self.client = client
        self.fetcher = fetcher
        self.staging = staging
        self.memory = memory
        self.stages: list[StagingWorker] = []

    def join(self, **changes: Any) -> StagingWorker:
        """Start a worker."""
        kind = {"width": self.client.description.width, "dtype": self.client.description.dtype, **changes}
        self.stages.append(StagingWorker(self.staging.address, device=torch.device("cpu"), **kind))
        return self.stages[-1]

    async def submit(self, *seeds: int) -> list[Submitted]:
        """Submit photos, and wait until they are encoded, the last one last."""
        images = [(await self.client.submit([photo(256, 256, seed)]))[0] for seed in seeds]
        for image in images:
            await fetched(self.client, image.digest)
        return images

    async def fetch(self, image: Submitted) -> tuple[FetchQuery, Outcome]:
        """Fetch the rows of an image as a scheduler does, and compare them with inline rows."""
        assert image.grid is not None
        size = image.tokens * self.client.description.row_bytes
        name = ImageName(image.digest, image.grid, b"")
        query = FetchQuery(name, image.tokens, RequestInfo(), extents=self.memory.allocate(size) or ())
        self.fetcher.start([query])
        outcome = await self.outcome()
        assert (outcome.query, outcome.error) == (query, None)
        right = (await fetched(self.client, image.digest)).array.tobytes()
        if query.staged:
            copies = [stage.rows(query.staged).view(torch.uint8).numpy().tobytes() for stage in self.stages]
            assert copies == [right] * len(self.stages)
        else:
            assert self.memory.read(query.extents).tobytes() == right
        return query, outcome

    async def outcome(self) -> Outcome:
        await asyncio.to_thread(self.fetcher.wait, PATIENCE_S)
        (outcome,) = self.fetcher.outcomes()
        return outcome

    async def transport(self, image: Submitted) -> str:
        """Fetch rows and release them; return their transport."""
        query, outcome = await self.fetch(image)
        self.fetcher.release(query)
        self.memory.release(query.extents)
        return outcome.transport

    async def ready(self, image: Submitted) -> None:
        """Fetch until the workers are connected and have opened the probe."""

        async def comes_from_device() -> bool:
            return await self.transport(image) == "device"

        await soon(comes_from_device)

    def copies(self) -> list[int]:
        """Return the number of copies of each worker."""
        return [len(stage._rows) for stage in self.stages]


@asynccontextmanager
async def engine_of(server: Server, workers: int = 1, endpoint: str = "") -> AsyncIterator[Engine]:
    async with await EncoderClient.connect(server.endpoint) as client:
        description = client.description
        memory = HostMemory(1 << 24)
        staging = Staging(workers, LIMIT * TOKENS * description.row_bytes)
        fetcher = await asyncio.to_thread(
            RowFetcher,
            VllmSettings((endpoint or server.endpoint,), grace_s=20.0),
            memory,
            width=description.width,
            dtype=description.dtype,
            staging=staging,
        )
        try:
            yield Engine(client, fetcher, staging, memory)
        finally:
            await asyncio.to_thread(fetcher.close)
            memory.close()


@pytest.mark.parametrize("workers", [1, 3])
async def test_rows_are_copied_once_all_workers_are_connected(server: Server, workers: int) -> None:
    async with engine_of(server, workers) as engine:
        (image,) = await engine.submit(1)
        for _ in range(workers):
            assert await engine.transport(image) == "shm"
            engine.join()
        await engine.ready(image)
        query, outcome = await engine.fetch(image)
        assert outcome.transport == "device"
        assert engine.copies() == [1] * workers
        await soon(lambda: server.store.stats().pins == 0)  # the call has ended
        engine.fetcher.release(query)
        await soon(lambda: engine.copies() == [0] * workers)
        assert engine.staging.free_bytes == LIMIT * TOKENS * engine.client.description.row_bytes


async def test_rows_that_one_worker_cannot_copy_come_through_host_memory(server: Server) -> None:
    async with engine_of(server, workers=2) as engine:
        (image,) = await engine.submit(1)
        engine.join()
        engine.join(width=engine.client.description.width + 1)  # it opens the probe
        for _ in range(20):
            assert await engine.transport(image) == "shm"
        await soon(lambda: engine.copies() == [0, 0])
        assert engine.staging.free_bytes == LIMIT * TOKENS * engine.client.description.row_bytes


@pytest.mark.cuda
async def test_staged_copies_are_bounded(server: Server) -> None:
    async with engine_of(server) as engine:
        images = await engine.submit(*range(LIMIT + 1))
        engine.join()
        await engine.ready(images[-1])
        kept = []
        for image in images[::-1]:
            query, _ = await engine.fetch(image)
            kept.append(query)
            assert engine.copies()[0] <= LIMIT
        assert [bool(query.staged) for query in kept] == [True] * LIMIT + [False]
        engine.fetcher.release(kept[0])
        assert await engine.transport(images[0]) == "device"


async def test_a_worker_that_cannot_open_the_probe_is_never_sent_a_handle(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.store.device_probe is not None
    server.store.device_probe = replace(server.store.device_probe, name=UNREACHABLE)
    async with engine_of(server) as engine:
        engine.join()
        (image,) = await engine.submit(1)
        await soon(lambda: engine.staging.is_complete)
        assert await engine.transport(image) == "shm"
        await soon(lambda: "rows arrive by shared memory" in caplog.text)  # the worker has tried the probe
        assert [await engine.transport(image) for _ in range(5)] == ["shm"] * 5
        assert caplog.text.count("rows arrive by shared memory") == 1
        assert not server.store.stats().promotions


async def test_an_image_in_memory_that_cannot_be_opened_comes_through_host_memory(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.encoder_service")
    async with engine_of(server) as engine:
        (image,) = await engine.submit(1)
        assert server.store.device is not None
        right, server.store.device.shared_as = server.store.device.shared_as, UNREACHABLE
        engine.join()

        async def is_tried() -> bool:
            assert await engine.transport(image) == "shm"
            return "could not copy" in caplog.text

        await soon(is_tried)
        server.store.device.shared_as = right
        assert await engine.transport(image) == "device"


@pytest.mark.cuda
async def test_overwritten_rows_come_through_host_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that holds the rows ends unnoticed before they are copied, and the server overwrites them."""
    proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2])).start()
    async with engine_of(server, endpoint=f"127.0.0.1:{proxy.port}") as engine:
        (image,) = await engine.submit(1)
        engine.join()
        await engine.ready(image)
        right = (await fetched(engine.client, image.digest)).array.tobytes()
        loop, copy, copied = asyncio.get_running_loop(), transport.device_copy, []

        async def lose() -> None:
            proxy.cut()
            await soon(lambda: server.store.stats().pins == 0)
            await engine.submit(*range(100, 100 + 2 * IMAGES))
            proxy.mend()

        def late(*arguments: Any) -> torch.Tensor:
            if not copied:
                asyncio.run_coroutine_threadsafe(lose(), loop).result(PATIENCE_S)
            copied.append(copy(*arguments))
            return copied[-1]

        monkeypatch.setattr(transport, "device_copy", late)
        query, outcome = await engine.fetch(image)  # this compares the rows
        assert copied[0].view(torch.uint8).numpy().tobytes() != right
        assert (query.staged, outcome.transport) == (0, "shm")
        assert engine.copies() == [0]
    await proxy.stop()


async def test_an_image_whose_worker_ends_comes_through_host_memory(server: Server) -> None:
    async with engine_of(server, workers=2) as engine:
        (image,) = await engine.submit(1)
        engine.join()
        reader, writer = await asyncio.open_unix_connection(engine.staging.address)

        async def end_at_the_first_copy() -> None:
            number, size = FRAME.unpack(await reader.readexactly(FRAME.size))
            await reader.readexactly(size)
            writer.write(FRAME.pack(number, 0))  # it has opened the probe
            await reader.readexactly(FRAME.size)
            writer.close()

        ending = asyncio.create_task(end_at_the_first_copy())

        async def has_ended() -> bool:
            assert await engine.transport(image) == "shm"
            return ending.done()

        await soon(has_ended)
        await ending
        await soon(lambda: not engine.staging.is_complete and engine.copies() == [0])
        assert await engine.transport(image) == "shm"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_processes_of_other_users_cannot_connect(server: Server) -> None:
    async with engine_of(server) as engine:
        code = (
            "import os, socket, sys; os.setuid(65534); it = socket.socket(socket.AF_UNIX); "
            "it.connect(bytes.fromhex(sys.argv[1])); assert it.recv(1) == b''"
        )
        address = engine.staging.address.hex()
        stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", code, address)
        assert await stranger.wait() == 0
        assert not engine.staging.is_complete
