"""Rows enter vLLM's workers on a simulated GPU: from host memory and from a server's GPU, without a race."""

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from encoder_contract import registration
from encoder_contract.device_memory import CudaBytes, DeviceMemory, allocate
from encoder_contract.handle import GENERATION_BYTES, SEGMENT_ID_BYTES, Handle
from encoder_contract.segment_file import MAGIC
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport import device as transport
from prefill_client.vllm.host_memory import HostMemory, RowLoad
from prefill_client.vllm.staging import Staging, StagingWorker
from prefill_client.vllm.worker_side import RowLoader
from tests.waiting import PATIENCE_S, soon

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from tests.simulated_gpu import simulated_gpu
from tests.simulated_gpu.device import Clock, SimulatedGpu, Stream, join
from tests.simulated_gpu.tensors import DeviceTensor

pytestmark = pytest.mark.slow

SECOND = torch.device("cuda:1")
WIDTH, ROWS = 8, 6
CONTENT = np.random.default_rng(7).integers(0, 255, ROWS * WIDTH * 2, np.uint8)
ROWS_AS_NUMBERS = torch.from_numpy(CONTENT.copy()).view(torch.bfloat16).view(ROWS, WIDTH)


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu() as gpu, torch.inference_mode():
        torch.cuda.set_device(SECOND)
        yield gpu


def kinds(gpu: SimulatedGpu) -> set[str]:
    return {finding.partition(":")[0] for finding in gpu.findings}


def same(rows: torch.Tensor) -> bool:
    return rows.contiguous().view(torch.int16).equal(ROWS_AS_NUMBERS.view(torch.int16))


# From host memory


def load() -> torch.Tensor:
    """Load an image as a worker does, use its rows in a step, and drop them before the step has ended."""
    memory = HostMemory(1 << 16)
    extents = (*(memory.allocate(64) or ()), *(memory.allocate(len(CONTENT) - 64) or ()))
    memory.write(extents, CONTENT)
    cache: dict[str, torch.Tensor] = {}
    RowLoader(WIDTH, "bfloat16", SECOND).load(memory.path, [RowLoad("an image", extents)], cache)
    memory.close()
    used = cache["an image"] + 0
    cache.clear()
    torch.cuda.current_stream().synchronize()
    return used.cpu()


def test_rows_from_host_memory_reach_the_step_without_a_race(gpu: SimulatedGpu) -> None:
    assert same(load())
    assert not gpu.findings


def test_a_step_that_does_not_wait_for_the_copy_is_found(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    load()
    assert "race" in kinds(gpu)


def test_rows_that_are_freed_during_the_step_are_found(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceTensor, "record_stream", lambda *_: None)
    load()
    assert kinds(gpu) == {"freed"}


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(1 << 16)
    yield memory
    memory.close()


@pytest.mark.cuda
async def test_no_step_waits_for_a_slow_registration(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, memory: HostMemory
) -> None:
    """Two GiB take half a second. The memory of this test is registered in pieces, between which copies are cut."""
    pieces, image = 16, RowLoad("an image", memory.allocate(len(CONTENT)) or ())
    memory.write(image.extents, CONTENT)
    across = RowLoad("an image over two pieces", memory.allocate(memory.free_bytes) or ())
    monkeypatch.setattr(registration, "REGISTERED_BYTES", memory.size_bytes // pieces)
    register, stepped, used = gpu.register, threading.Event(), set[int]()

    def slow(address: int, size_bytes: int, flags: int) -> int:
        used.add(gpu.host.device)
        if len(gpu.registered) == pieces // 2:
            assert stepped.wait(PATIENCE_S), "a step waits for the registration"
        return register(address, size_bytes, flags)

    monkeypatch.setattr(gpu, "register", slow)
    loader = RowLoader(WIDTH, "bfloat16", torch.device("cuda"))  # vLLM names no number
    for _ in range(2):
        cache: dict[str, torch.Tensor] = {}
        loader.load(memory.path, [image, across], cache)
        assert same(cache["an image"].cpu())
        await soon(lambda: len(gpu.registered) == pieces // 2)
    stepped.set()
    await soon(lambda: sum(end - at for at, end in gpu.registered.items()) == memory.size_bytes)
    gpu.never_waits.add(threading.current_thread().name)
    loader.load(memory.path, [image, across], cache)
    assert used == {SECOND.index}
    assert not gpu.findings


# From a server's GPU


def in_memory_of(gpu_name: str, segment: Path) -> tuple[DeviceMemory, Handle]:
    """Return memory of a GPU that holds the rows in two extents, and the handle of a server that has them there."""
    memory = allocate(gpu_name, 4096)
    assert isinstance(memory.content, CudaBytes)
    extents = ((1024, 64), (256, len(CONTENT) - 64))
    begin = 0
    for offset, length in extents:
        piece = CONTENT[begin : begin + length].tobytes()
        ctypes.memmove(memory.content.address + offset, piece, length)
        begin += length
    generation, generation_at = 3, 64
    head = (b"i" * SEGMENT_ID_BYTES + MAGIC).ljust(generation_at)
    segment.write_bytes((head + generation.to_bytes(GENERATION_BYTES, "little")).ljust(4096))
    where = str(segment), 4096, b"i" * SEGMENT_ID_BYTES
    return memory, Handle(*where, extents, generation, generation_at, memory.name, 4096)


class Worker(StagingWorker):
    """A worker whose replies tell the scheduler's thread what the worker's thread has waited for."""

    gpu: ClassVar[SimulatedGpu]
    known: Clock

    def _copy(self, number: int, handle: pb.Handle) -> str:
        error = super()._copy(number, handle)
        self.known = dict(self.gpu.host.clock)
        return error


@asynccontextmanager
async def staged(gpu: SimulatedGpu, tmp_path: Path) -> AsyncIterator[tuple[Staging, Worker, Handle]]:
    Worker.gpu = gpu
    memory, handle = in_memory_of("cuda:0", tmp_path / "segment")
    staging = Staging(1, 1 << 20)
    await staging.open()
    try:
        worker = Worker(staging.address, WIDTH, "bfloat16", SECOND)
        await soon(lambda: staging.is_complete)
        yield staging, worker, handle
    finally:
        await staging.close()
        # The last copy is freed on the worker's thread, which tells what is wrong with that afterwards.
        await soon(lambda: all(thread.name != "gpu-rows" for thread in threading.enumerate()))
        del memory


async def copied(staging: Staging, worker: Worker, handle: Handle) -> torch.Tensor:
    """Copy rows from the server's GPU, use them in a step, and have the worker free them before the step has ended."""
    number = await staging.copy(handle)
    assert number, "the worker has refused"
    join(worker.gpu.host.clock, worker.known)
    rows = worker.rows(number)
    used = rows + 0
    del rows
    staging.release(number)
    await soon(lambda: number not in worker._rows)
    torch.cuda.current_stream().synchronize()
    return used.cpu()


async def test_rows_from_the_servers_gpu_reach_the_step_without_a_race(
    gpu: SimulatedGpu, tmp_path: Path
) -> None:
    async with staged(gpu, tmp_path) as (staging, worker, handle):
        assert same(await copied(staging, worker, handle))
        assert await staging.probe(handle.memory, handle.memory_bytes) == ""
        assert await staging.probe(b"0" * len(handle.memory), 1) == "CUDA: cudaErrorInvalidValue"
    assert not gpu.findings


@pytest.mark.parametrize("missing", ["the wait after the copy", "record_stream", "the worker's device"])
async def test_what_a_worker_leaves_out_is_found(
    gpu: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "the wait after the copy":
        monkeypatch.setattr(Stream, "synchronize", lambda *_: None)
    elif missing == "record_stream":
        monkeypatch.setattr(DeviceTensor, "record_stream", lambda *_: None)
    else:
        monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)
    async with staged(gpu, tmp_path) as (staging, worker, handle):
        if missing == "the worker's device":
            await asyncio.gather(staging.copy(handle), return_exceptions=True)
        else:
            await copied(staging, worker, handle)
    expected = {"the wait after the copy": "race", "record_stream": "freed", "the worker's device": "context"}
    assert expected[missing] in kinds(gpu), gpu.findings


def test_memory_that_the_server_has_freed_cannot_be_opened(gpu: SimulatedGpu, tmp_path: Path) -> None:
    memory, handle = in_memory_of("cuda:0", tmp_path / "segment")
    del memory
    rows = transport.DeviceRows(handle, WIDTH, "bfloat16")
    with pytest.raises(Exception, match="cudaErrorInvalidValue"):
        rows.tensor("bfloat16")
