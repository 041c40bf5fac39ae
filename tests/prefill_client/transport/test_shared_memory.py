"""Rows of handles at the client: mapped once and viewed in place, or read from a device; never wrong rows.

A memory file stands in for the device's memory: all but the calls of CUDA's driver is the code that runs on a GPU.
"""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from encoder_contract.errors import StaleHandleError
from prefill_client.transport import device as device_module
from testing.stored import write
from tests.rows_by_handle import (
    WIDTH,
    as_bytes,
    embedding,
    flat,
    make_store,
    mappings_of,
    scattered,
    shared_rows,
)
from tests.waiting import START_S


def test_rows_in_place_are_read_only_views(shm):
    pin = write(shm, b"a", embedding(1), (1, 1, 1))
    with shared_rows(pin.handle(10, 900)).reading() as rows:
        assert (rows.shape, rows.dtype, rows.base is not None) == ((890, WIDTH), np.uint16, True)
        assert rows.tobytes() == as_bytes(embedding(1)[10:900])
        pin.rows()[0][10 * 128] ^= 0xFF  # the server's bytes, not a copy of them
        assert rows.tobytes() != as_bytes(embedding(1)[10:900])
        with pytest.raises(ValueError, match="read-only"):
            rows[0, 0] = 0


def test_rows_of_several_extents_are_copied(store):
    handle = scattered(store).handle()
    assert len(handle.extents) > 1
    expected = embedding(99, 2000)
    with shared_rows(handle).reading() as rows:
        assert rows.tobytes() == as_bytes(expected)
    assert shared_rows(handle).shape == expected.shape
    assert flat(handle) == as_bytes(expected)


def test_a_window_within_one_extent_is_a_view(shm):
    with shared_rows(scattered(shm).handle(0, 100)).reading() as rows:
        assert not rows.flags.writeable
        assert rows.tobytes() == as_bytes(embedding(99, 2000)[:100])


def test_a_segment_is_mapped_once_for_all_handles(store):
    pins = [write(store, bytes([n]), embedding(n), (1, 1, 1)) for n in range(6)]
    assert {bool(pin.handle().memory) for pin in pins} == {bool(store.device_probe)}
    assert len({flat(pin.handle()) for pin in pins}) == 6
    assert len(mappings_of(str(store.segment.path))) == 1


def test_rows_that_change_during_a_copy_raise_stale_handle(store, monkeypatch):
    handle = scattered(store).handle()
    shared = shared_rows(handle)
    place, name = (device_module, "device_copy") if handle.memory else (np, "concatenate")
    gather = getattr(place, name)

    def evict_meanwhile(*arguments):
        store.flush()
        store.evict(b"wide")
        return gather(*arguments)

    monkeypatch.setattr(place, name, evict_meanwhile)
    for use in (shared.copy, shared.own):
        with pytest.raises(StaleHandleError):
            use()


def test_segments_of_a_dead_server_are_unmapped(tmp_path):
    first = make_store(tmp_path)
    gone = str(first.segment.path)
    shared_rows(write(first, b"a", embedding(1), (1, 1, 1)).handle())
    assert len(mappings_of(gone)) == 1
    first.close()
    second = make_store(tmp_path)
    shared_rows(write(second, b"a", embedding(1), (1, 1, 1)).handle())
    assert not mappings_of(gone)
    second.close()


RANK = """
import pickle, sys
import numpy as np
from prefill_client import DeviceRows, SharedRows
handle = pickle.load(sys.stdin.buffer)
rows = (DeviceRows if handle.memory else SharedRows)(handle, 64, "bfloat16").copy()
print(int(rows.sum(dtype=np.uint64)), *rows.shape, "torch" in sys.modules)
"""


def test_four_ranks_map_a_broadcast_handle_without_torch(store):
    pin = write(store, b"a", embedding(5), (1, 1, 1))
    pickled = pickle.dumps(pickle.loads(pickle.dumps(pin.handle(100, 700))))
    assert len(pickled) < 500
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    expected = int(embedding(5)[100:700].view(torch.uint16).numpy().sum(dtype=np.uint64))
    for rank in ranks:
        answer, _ = rank.communicate(pickled, timeout=START_S)
        assert answer.decode().split() == [str(expected), "600", str(WIDTH), str(bool(store.device_probe))]
        assert rank.returncode == 0
    assert store.segment.path.exists()  # a reader that ends takes nothing with it


def test_rows_of_a_device_are_tensors_that_outlive_their_pin(device):
    pin = scattered(device)
    rows = shared_rows(pin.handle(3, 1900))
    with rows.lent() as lent:
        kept = lent.tensor("bfloat16")
    pin.release()
    device.flush()
    assert torch.equal(kept, embedding(99, 2000)[3:1900])
    assert lent.own().copy().tobytes() == as_bytes(kept)
    assert rows.lost
