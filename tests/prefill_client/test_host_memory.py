"""Memory for rows: extents never overlap, all memory can be allocated again, and many images cost no more than few."""

import itertools
import random
from collections.abc import Iterator
from time import perf_counter

import pytest

from prefill_client.vllm.host_memory import Extent, HostMemory

SIZE = 4096


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(SIZE)
    yield memory
    memory.close()


@pytest.mark.parametrize("seed", range(20))
def test_extents_never_overlap_and_free_memory_is_joined(memory: HostMemory, seed: int) -> None:
    draw, held = random.Random(seed), list[tuple[Extent, ...]]()
    for _ in range(2000):
        size = draw.randrange(1, SIZE // 4)
        extents = memory.allocate(size) if draw.random() < 0.6 else None
        if extents is not None:
            assert sum(length for _, length in extents) == size
            held.append(extents)
        elif held:
            memory.release(held.pop(draw.randrange(len(held))))
        used = sorted(extent for extents in held for extent in extents)
        assert all(begin + length <= after for (begin, length), (after, _) in itertools.pairwise(used))
        assert memory.free_bytes == SIZE - sum(length for _, length in used)
    for extents in held:
        memory.release(extents)
    assert memory.allocate(SIZE) == ((0, SIZE),), "one piece again"


def test_more_than_the_free_bytes_is_not_allocated(memory: HostMemory) -> None:
    extents = memory.allocate(SIZE - 10)
    assert extents is not None
    assert memory.allocate(11) is None
    assert memory.allocate(10) is not None


def test_an_image_costs_the_same_beside_thousands() -> None:
    def seconds(images: int) -> float:
        """Return the least time of a release and an allocation beside this many images."""
        memory = HostMemory(images * 4096)
        held = [memory.allocate(3072) for _ in range(images)]
        random.Random(1).shuffle(held)
        times = []
        for _ in range(200):
            begun = perf_counter()
            extents = held.pop(0)
            assert extents is not None
            memory.release(extents)
            held.append(memory.allocate(3072))
            times.append(perf_counter() - begun)
        memory.close()
        return min(times)

    assert seconds(5000) < 20 * seconds(10), "it was 200 times as much when free memory was a sorted list"
