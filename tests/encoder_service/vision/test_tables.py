"""The tables of a grid: made once, by the first thread that needs them, and bounded."""

import threading
from typing import Any

import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_service.vision.tower import MAX_TABLE_PATCHES, GridTables, cached_by_grid
from tests.waiting import PATIENCE_S


def test_equal_grids_share_their_tables_and_the_cache_is_bounded():
    made = []

    def make(grid):
        made.append(grid)
        return GridTables(grid, torch.empty(0))

    tables: Any = cached_by_grid(make, max_patches=100)
    small, other, large = Grid(1, 6, 6), Grid(1, 8, 8), Grid(1, 20, 20)
    assert tables(small) is tables(small)
    tables(other)
    tables(small)
    tables(Grid(1, 2, 2))  # 104 patches: evicts the least recently used, which is `other`
    tables(small)
    assert made == [small, other, Grid(1, 2, 2)]
    tables(large)
    tables(large)
    assert made.count(large) == 2  # over the bound: never cached
    assert len(tables.cache) == 2


def test_concurrent_threads_share_the_tables_of_a_grid():
    both = threading.Barrier(2)

    def make(grid):
        both.wait()  # neither thread has cached its tables yet
        return GridTables(grid, torch.empty(0))

    tables: Any = cached_by_grid(make, max_patches=100)
    grid, found = Grid(1, 6, 6), []
    threads = [threading.Thread(target=lambda: found.append(tables(grid))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is tables(grid)
    assert tables.cache.currsize == grid.patches


def test_cached_tables_are_available_while_others_are_made():
    made, may_end = threading.Event(), threading.Event()

    def make(grid):
        if grid.w == 8:
            made.set()
            assert may_end.wait(PATIENCE_S)
        return GridTables(grid, torch.empty(0))

    tables: Any = cached_by_grid(make, max_patches=1000)
    known = tables(Grid(1, 6, 6))
    slow = threading.Thread(target=lambda: tables(Grid(1, 8, 8)))
    slow.start()
    assert made.wait(PATIENCE_S)
    assert tables(Grid(1, 6, 6)) is known
    may_end.set()
    slow.join()
    assert len(tables.cache) == 2


@pytest.mark.cuda
def test_a_gpu_keeps_a_hundred_and_eighty_grids_of_720p():
    assert MAX_TABLE_PATCHES["cuda"] // (44 * 80) >= 180
