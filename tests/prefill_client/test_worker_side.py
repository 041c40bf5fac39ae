"""A worker's copies of rows from the host memory that the scheduler's process fills."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefill_client.vllm.host_memory import HostMemory, MappedMemory, RowLoad
from prefill_client.vllm.worker_side import RowLoader, register

WIDTH = 8
ROW_BYTES = 2 * WIDTH


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(64 * ROW_BYTES)
    yield memory
    memory.close()


def filled(memory: HostMemory, rows: int, seed: int) -> tuple[RowLoad, torch.Tensor]:
    """Write rows into the memory, in two extents; return their load and the same rows."""
    extents = [memory.allocate(part * ROW_BYTES) for part in (rows - 1, 1)]
    joined = tuple(extent for part in extents for extent in part)
    content = np.random.default_rng(seed).integers(0, 255, rows * ROW_BYTES, np.uint8)
    memory.write(joined, content)
    return RowLoad(str(seed), joined), torch.from_numpy(content).view(torch.bfloat16).view(rows, WIDTH)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_image_of_a_plan_is_copied_completely(memory: HostMemory, device: str) -> None:
    loader, cache = RowLoader(WIDTH, "bfloat16", torch.device(device)), {}
    images = [filled(memory, 5, 1), filled(memory, 9, 2)]
    loader.load(memory.path, [load for load, _ in images], cache)
    if device == "cuda":
        assert loader._registered
        torch.cuda.synchronize()
    memory.write([(0, memory.size_bytes)], np.zeros(memory.size_bytes, np.uint8))  # the cache has copies
    for load, rows in images:
        assert cache[load.identifier].cpu().view(torch.int16).equal(rows.view(torch.int16))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake of CUDA's runtime that records calls; `copies` has `non_blocking` of each copy.

    As CUDA does, it keeps the error of a refused call until the thread's next kernel, which then fails.
    """
    found = SimpleNamespace(error=0, kept=0, registered=[], copies=[])

    @contextmanager
    def device(_device: object) -> Iterator[None]:
        yield

    def host_register(address: int, size_bytes: int, flags: int) -> int:
        found.registered.append((address, size_bytes, flags))
        found.kept = found.error
        return found.error

    def kernel(*_: object, device: object) -> None:
        kept, found.kept = found.kept, 0
        if kept:
            raise RuntimeError(f"CUDA error: {kept}")

    copy: Callable[..., torch.Tensor] = torch.Tensor.copy_

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        found.copies.append(non_blocking)
        return copy(target, source, non_blocking)

    empty: Callable[..., Any] = torch.empty
    stream = SimpleNamespace(wait_stream=lambda _other: None)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=host_register))
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch, "ones", kernel)
    return found


def test_registered_memory_is_copied_without_waiting(memory: HostMemory, cuda: SimpleNamespace) -> None:
    loader, cache = RowLoader(WIDTH, "bfloat16", torch.device("cuda")), {}
    for seed in range(3):
        load, rows = filled(memory, 4, seed)
        loader.load(memory.path, [load], cache)
        assert cache[str(seed)].view(torch.int16).equal(rows.view(torch.int16))
    [(_, size_bytes, _)] = cuda.registered  # once, and all of it
    assert size_bytes == memory.size_bytes
    assert set(cuda.copies) == {True}


def test_unregistered_memory_is_copied_synchronously(
    memory: HostMemory, cuda: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = 2
    loader, (load, _) = RowLoader(WIDTH, "bfloat16", torch.device("cuda")), filled(memory, 4, 1)
    with caplog.at_level(logging.WARNING, "vllm.encoder_service"):
        loader.load(memory.path, [load], {})
    assert set(cuda.copies) == {False}
    assert not cuda.kept, "the step's first kernel would fail with the error of the registration"
    assert "ulimit -l" in caplog.text


@pytest.mark.gpu
def test_cuda_registers_the_memory_of_another_process(memory: HostMemory) -> None:
    mapped = MappedMemory(memory.path, writable=True)
    assert register(mapped, torch.device("cuda"))
    assert torch.from_numpy(mapped.whole).is_pinned()
