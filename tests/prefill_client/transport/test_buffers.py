"""Buffers for arriving rows: reused once nothing refers to them, and never earlier."""

import gc

import numpy as np
import pytest
import torch

from prefill_client.transport.receiver import MIN_POOLED_BYTES, Buffers

pytestmark = pytest.mark.slow

SIZE = 4 * MIN_POOLED_BYTES


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_buffer_is_reused_after_its_last_view() -> None:
    buffers = Buffers()
    first = buffers.acquire(SIZE)
    first[:] = 7
    view = first.view(np.uint16).reshape(-1, 64)[3:]
    where = address(first)
    del first
    gc.collect()
    assert buffers._idle_bytes == 0, "a view still reads it"
    assert address(buffers.acquire(SIZE)) != where
    assert (view == 0x0707).all()
    del view
    gc.collect()
    assert buffers._idle_bytes >= SIZE
    assert where in {address(buffers.acquire(SIZE)), address(buffers.acquire(SIZE))}


def test_a_tensor_keeps_its_buffer() -> None:
    buffers = Buffers()
    tensor = torch.from_numpy(buffers.acquire(SIZE)).view(torch.bfloat16)
    gc.collect()
    assert buffers._idle_bytes == 0
    del tensor
    gc.collect()
    assert buffers._idle_bytes == SIZE


def test_idle_buffers_are_bounded() -> None:
    buffers = Buffers(max_idle_bytes=3 * SIZE)
    held = [buffers.acquire(SIZE) for _ in range(5)]
    held.clear()
    gc.collect()
    assert buffers._idle_bytes == 3 * SIZE
    small = buffers.acquire(MIN_POOLED_BYTES)
    assert buffers._idle_bytes == 3 * SIZE
    assert len(small) == MIN_POOLED_BYTES
