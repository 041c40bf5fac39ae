"""Memory for rows: each image reads as it was written until it is released, and all memory can be allocated again."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from encoder_contract.extents import Extent
from prefill_client.vllm.host_memory import HostMemory, MappedMemory

SIZE = 4096


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(SIZE)
    yield memory
    memory.close()


@pytest.mark.parametrize("seed", range(20))
def test_images_do_not_overwrite_each_other_and_free_memory_is_joined(memory: HostMemory, seed: int) -> None:
    draw, held = random.Random(seed), list[tuple[tuple[Extent, ...], NDArray[np.uint8]]]()
    worker = MappedMemory(memory.path)
    for _ in range(500):
        size = draw.randrange(1, SIZE // 4)
        extents = memory.allocate(size) if draw.random() < 0.6 else None
        if extents is not None:
            held.append((extents, np.frombuffer(draw.randbytes(size), np.uint8)))
            memory.write(*held[-1])
        elif held:
            memory.release(held.pop(draw.randrange(len(held)))[0])
        for extents, content in held:
            assert np.array_equal(memory.read(extents), content)
            assert b"".join(worker.whole[at : at + length] for at, length in extents) == bytes(content)
        assert memory.free_bytes == SIZE - sum(len(content) for _, content in held)
    for extents, _ in held:
        memory.release(extents)
    assert memory.allocate(SIZE) == ((0, SIZE),), "one piece again"


def test_more_than_the_free_bytes_is_not_allocated(memory: HostMemory) -> None:
    extents = memory.allocate(SIZE - 10)
    assert extents is not None
    assert memory.allocate(11) is None
    assert memory.allocate(10) is not None
    assert memory.allocate(1) is None
