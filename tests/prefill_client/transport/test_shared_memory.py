"""Shared-memory rows at the client: mapped once, viewed in place, and never wrong data from a stale handle."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_contract.errors import InternalError, StaleHandleError, UnavailableError
from encoder_contract.handle import Handle
from encoder_service.store import Store, entry_table
from encoder_service.store.tiers import copy_bytes
from prefill_client import SharedRows

WIDTH = 64  # bfloat16: 128 bytes a row, 512 rows a page
PAGE_BYTES = 64 << 10


def make_store(folder, pages=16):
    return Store(
        host_bytes=pages * PAGE_BYTES, width=WIDTH, dtype=torch.bfloat16, segment_dir=str(folder), wait_s=0.0
    )


@pytest.fixture
def store(tmp_path):
    store = make_store(tmp_path)
    yield store
    store.close()


def embedding(seed, tokens=1000):
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def shared_rows(handle):
    return SharedRows(handle, WIDTH, "bfloat16")


def flat(handle):
    """All bytes of a handle's rows, copied."""
    return shared_rows(handle).copy().tobytes()


def as_bytes(rows):
    return rows.view(torch.uint8).numpy().tobytes()


def mappings_of(path):
    """The read-only mappings of a file in this process; the store's own is writable."""
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if path in line and " r--s " in line
    ]


def scattered(store):
    """Put an embedding that no single run can hold; return its pin."""
    keep = [store.put(bytes([n]), embedding(n, 512), (1, 1, 1)) for n in range(16)][1::2]
    pin = store.put(b"wide", embedding(99, 2000), (1, 1, 1))
    for other in keep:
        other.release()
    return pin


def test_rows_are_viewed_in_place_and_cannot_be_written(store):
    pin = store.put(b"a", embedding(1), (1, 1, 1))
    with shared_rows(pin.handle(10, 900)).reading() as rows:
        assert (rows.shape, rows.dtype, rows.base is not None) == ((890, WIDTH), np.uint16, True)
        assert rows.tobytes() == as_bytes(embedding(1)[10:900])
        pin.rows()[0][10 * 128] ^= 0xFF  # the server's bytes, not a copy of them
        assert rows.tobytes() != as_bytes(embedding(1)[10:900])
        with pytest.raises(ValueError, match="read-only"):
            rows[0, 0] = 0


def test_scattered_rows_are_one_array_as_a_copy(store):
    handle = scattered(store).handle()
    assert len(handle.extents) > 1
    expected = embedding(99, 2000)
    with shared_rows(handle).reading() as rows:
        assert rows.tobytes() == as_bytes(expected)
    assert shared_rows(handle).shape == expected.shape
    assert flat(handle) == as_bytes(expected)


def test_a_window_within_one_extent_of_scattered_rows_is_a_view(store):
    with shared_rows(scattered(store).handle(0, 100)).reading() as rows:
        assert not rows.flags.writeable
        assert rows.tobytes() == as_bytes(embedding(99, 2000)[:100])


def test_a_segment_is_mapped_once_however_many_handles(store):
    pins = [store.put(bytes([n]), embedding(n), (1, 1, 1)) for n in range(6)]
    assert len({flat(pin.handle()) for pin in pins}) == 6
    assert len(mappings_of(str(store.segment.path))) == 1


def test_a_handle_whose_rows_were_evicted_is_an_error_and_never_other_rows(store):
    pin = store.put(b"a", embedding(1), (1, 1, 1))
    handle = pin.handle()
    shared = shared_rows(handle)
    pin.release()
    assert flat(handle) == as_bytes(embedding(1))
    assert store.evict(b"a")
    assert shared.lost
    for use in (shared.copy, shared.reading().__enter__, lambda: SharedRows(handle, WIDTH, "float16")):
        with pytest.raises(StaleHandleError):
            use()
    again = store.put(b"a", embedding(1), (1, 1, 1))
    assert again.handle().extents == handle.extents
    with pytest.raises(StaleHandleError):
        shared.copy()
    assert issubclass(StaleHandleError, UnavailableError)
    assert StaleHandleError.retryable


def test_rows_that_change_while_they_are_copied_are_an_error(store, monkeypatch):
    handle = scattered(store).handle()
    shared = shared_rows(handle)
    concatenate = np.concatenate

    def evict_meanwhile(arrays):
        store.flush()
        store.evict(b"wide")
        return concatenate(arrays)

    monkeypatch.setattr(np, "concatenate", evict_meanwhile)
    with pytest.raises(StaleHandleError):
        shared.copy()


def test_no_byte_is_written_where_a_handle_still_says_that_its_rows_lie(store, monkeypatch):
    """Whatever is written over rows, their generation is gone before, and never comes back."""
    issued, overwritten = [], []
    base = store.segment.data_offset - store._host.memory.data_ptr()
    slots = store.segment.view

    def valid(handle):
        found = int.from_bytes(slots[handle.generation_offset :][:8], "little")
        return found == handle.generation

    def watched(targets, sources):
        targets = list(targets)
        for piece in targets:
            begin = base + piece.data_ptr()
            end = begin + piece.numel()
            under = [h for h in issued if any(at < end and begin < at + size for at, size in h.extents)]
            assert not any(valid(handle) for handle in under)
            overwritten.extend(under)
        copy_bytes(targets, sources)

    monkeypatch.setattr(entry_table, "copy_bytes", watched)
    for n in range(120):
        with store.put(bytes([n]), embedding(n, 200 + n * 97 % 3000), (1, 1, 1)) as pin:
            issued.append(pin.handle())
            assert valid(issued[-1])
    assert len(overwritten) > 100
    assert len({handle.generation for handle in issued}) == len(issued)
    assert 0 not in {handle.generation for handle in issued}


def test_a_handle_into_a_server_that_has_gone_or_restarted_is_an_error(tmp_path):
    store = make_store(tmp_path)
    handle = store.put(b"a", embedding(1), (1, 1, 1)).handle()
    path = Path(handle.segment)
    with pytest.raises(StaleHandleError, match="restarted"):
        shared_rows(replace(handle, segment_id=os.urandom(16)))
    store.close()
    with pytest.raises(StaleHandleError, match="cannot be opened"):
        shared_rows(handle)
    path.symlink_to("/etc/passwd")
    with pytest.raises(StaleHandleError):
        shared_rows(handle)


def test_the_memory_of_a_dead_server_is_not_kept_mapped(tmp_path):
    first = make_store(tmp_path)
    gone = str(first.segment.path)
    shared_rows(first.put(b"a", embedding(1), (1, 1, 1)).handle())
    assert len(mappings_of(gone)) == 1
    first.close()
    second = make_store(tmp_path)
    shared_rows(second.put(b"a", embedding(1), (1, 1, 1)).handle())
    assert not mappings_of(gone)
    second.close()


@pytest.mark.parametrize(
    "change",
    [
        {"extents": ()},
        {"extents": ((1 << 40, 10),)},
        {"extents": ((8, 100),)},
        {"extents": ((4096, 0),)},
        {"generation_offset": 1 << 40},
        {"generation_offset": 0},
        {"generation": 0},
        {"segment": "/dev/null"},
        {"segment_bytes": 1 << 50},
        {"segment_bytes": 0},
    ],
)
def test_a_handle_that_makes_no_sense_is_an_error_before_anything_is_read(store, change):
    handle = store.put(b"a", embedding(1), (1, 1, 1)).handle()
    if "segment_bytes" in change or "segment" in change:
        other = Path(handle.segment).with_name("other")  # not mapped yet
        other.write_bytes(Path(handle.segment).read_bytes())
        handle = replace(handle, segment=str(other))
    with pytest.raises(InternalError):
        shared_rows(replace(handle, **change))


def test_a_handle_survives_the_wire(store):
    handle = scattered(store).handle(3, 1900)
    message = handle.to_message()
    assert Handle.from_message(type(message).FromString(message.SerializeToString())) == handle
    assert len(message.SerializeToString()) < 300


RANK = """
import pickle, sys
import numpy as np
from prefill_client import SharedRows
rows = SharedRows(pickle.load(sys.stdin.buffer), 64, "bfloat16").copy()
print(int(rows.sum(dtype=np.uint64)), *rows.shape, "torch" in sys.modules)
"""


def test_a_broadcast_handle_is_mapped_by_each_of_four_ranks_for_itself_without_torch(store):
    pin = store.put(b"a", embedding(5), (1, 1, 1))
    pickled = pickle.dumps(pickle.loads(pickle.dumps(pin.handle(100, 700))))
    assert len(pickled) < 500
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    expected = int(embedding(5)[100:700].view(torch.uint16).numpy().sum(dtype=np.uint64))
    for rank in ranks:
        answer, _ = rank.communicate(pickled, timeout=60)
        assert answer.decode().split() == [str(expected), "600", str(WIDTH), "False"]
        assert rank.returncode == 0
    assert store.segment.path.exists()  # a reader that ends takes nothing with it
