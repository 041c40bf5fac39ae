"""A worker's copies of rows from the host memory that the scheduler's process fills."""

from collections.abc import Iterator

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
        torch.cuda.synchronize()
    memory.write([(0, memory.size_bytes)], np.zeros(memory.size_bytes, np.uint8))  # the cache has copies
    for load, rows in images:
        assert cache[load.identifier].cpu().view(torch.int16).equal(rows.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.cuda
def test_cuda_registers_the_memory_of_another_process(memory: HostMemory) -> None:
    mapped = torch.from_numpy(MappedMemory(memory.path, writable=True).whole)
    assert register(mapped, torch.device("cuda"))
    assert mapped.is_pinned()
