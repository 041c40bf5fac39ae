"""Handles: rows that are gone or never existed raise an error, and never return other rows.

Every test of a handle runs for both kinds of memory; a memory file stands in for a device's.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from encoder_contract.errors import InternalError, StaleHandleError, UnavailableError
from encoder_contract.handle import Handle
from encoder_service.store import moves, tiers
from encoder_service.store.copies import copy_bytes
from encoder_service.store.tensors import as_tensor
from prefill_client import DeviceRows, SharedRows
from testing import stored
from testing.stored import write
from tests.rows_by_handle import WIDTH, as_bytes, embedding, flat, make_store, scattered, shared_rows


def test_a_handle_to_evicted_rows_is_stale(store):
    pin = write(store, b"a", embedding(1), (1, 1, 1))
    handle = pin.handle()
    shared = shared_rows(handle)
    pin.release()
    assert flat(handle) == as_bytes(embedding(1))
    assert store.evict(b"a")
    assert shared.lost
    for use in (
        shared.copy,
        shared.reading().__enter__,
        shared.own,
        lambda: shared.tensor("bfloat16"),
        lambda: shared_rows(handle),
    ):
        with pytest.raises(StaleHandleError):
            use()
    again = write(store, b"a", embedding(1), (1, 1, 1))
    assert again.handle().extents == handle.extents
    with pytest.raises(StaleHandleError):
        shared.copy()
    assert issubclass(StaleHandleError, UnavailableError)
    assert StaleHandleError.retryable


def test_pages_are_not_overwritten_while_a_handle_is_valid(store, monkeypatch):
    """Before rows are overwritten, their generation is removed, and it never returns."""
    issued, overwritten = [], []
    host = as_tensor(store.host.memory).data_ptr() - store.segment.data_offset
    slots = store.segment.view

    def valid(handle):
        found = int.from_bytes(slots[handle.generation_offset :][:8], "little")
        return found == handle.generation

    def overlap(handle, begin, end):
        base = as_tensor(store.device.memory).data_ptr() if handle.memory else host
        return any(base + at < end and begin < base + at + size for at, size in handle.extents)

    def watched(targets, sources):
        targets = list(targets)
        for piece in map(as_tensor, targets):
            begin, end = piece.data_ptr(), piece.data_ptr() + piece.numel()
            under = [handle for handle in issued if overlap(handle, begin, end)]
            assert not any(valid(handle) for handle in under)
            overwritten.extend(under)
        copy_bytes(targets, sources)

    for writer in (moves, tiers, stored):
        monkeypatch.setattr(writer, "copy_bytes", watched)
    for n in range(120):
        with write(store, bytes([n]), embedding(n, 200 + n * 97 % 3000), (1, 1, 1)) as pin:
            issued.append(pin.handle())
            assert valid(issued[-1])
        while store.moves.move_once():
            pass
    assert len(overwritten) > 100
    assert len({(handle.memory, handle.generation) for handle in issued}) == len(issued)
    assert 0 not in {handle.generation for handle in issued}


def test_a_handle_of_a_stopped_or_restarted_server_is_stale(tmp_path):
    store = make_store(tmp_path)
    handle = write(store, b"a", embedding(1), (1, 1, 1)).handle()
    path = Path(handle.segment)
    with pytest.raises(StaleHandleError, match="restarted"):
        shared_rows(replace(handle, segment_id=os.urandom(16)))
    store.close()
    with pytest.raises(StaleHandleError, match="cannot be opened"):
        shared_rows(handle)
    path.symlink_to("/etc/passwd")
    with pytest.raises(StaleHandleError):
        shared_rows(handle)


@pytest.mark.attack("a handle that points elsewhere")
@pytest.mark.parametrize(
    "change",
    [
        {"extents": ()},
        {"extents": ((1 << 40, 10),)},
        {"extents": ((-8, 100),)},
        {"extents": ((4096, 0),)},
        {"generation_offset": 1 << 40},
        {"generation_offset": 0},
        {"generation": 0},
        {"segment": "/dev/null"},
        {"segment_bytes": 1 << 50},
        {"segment_bytes": 0},
    ],
)
def test_an_invalid_handle_is_refused_before_any_read(store, change):
    handle = write(store, b"a", embedding(1), (1, 1, 1)).handle()
    if "segment_bytes" in change or "segment" in change:
        other = Path(handle.segment).with_name("other")  # not mapped yet
        other.write_bytes(Path(handle.segment).read_bytes())
        handle = replace(handle, segment=str(other))
    with pytest.raises(InternalError):
        shared_rows(replace(handle, **change))


def test_a_handle_survives_serialization(store):
    handle = scattered(store).handle(3, 1900)
    message = handle.to_message()
    assert Handle.from_message(type(message).FromString(message.SerializeToString())) == handle
    assert len(message.SerializeToString()) < 300


def test_a_handle_cannot_read_the_segments_header(shm):
    handle = write(shm, b"a", embedding(1), (1, 1, 1)).handle()
    with pytest.raises(InternalError, match="points outside"):
        shared_rows(replace(handle, extents=((8, 100),)))


def test_rows_are_read_from_exactly_their_extents(shm, device):
    for store, other in ((shm, DeviceRows), (device, SharedRows)):
        handle = write(store, b"a", embedding(1), (1, 1, 1)).handle()
        with pytest.raises(InternalError, match="is for the transport"):
            other(handle, WIDTH, "bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"memory": b"file:1:0:0"},  # another's, or of another kind
        {"memory": b"file:no:0:0"},
        {"memory": b"file:"},
        {"memory": b"x" * 64},  # of CUDA, which is not here
        {"memory": b"x" * 63},
        {"memory_bytes": 1 << 40},
    ],
)
def test_device_memory_that_cannot_be_opened_makes_rows_stale(device, change):
    handle = write(device, b"a", embedding(1), (1, 1, 1)).handle()
    with pytest.raises(StaleHandleError):
        shared_rows(replace(handle, **change)).copy()


def test_a_reused_descriptor_is_not_read_as_device_memory(device, tmp_path):
    handle = write(device, b"a", embedding(1), (1, 1, 1)).handle()
    kind, pid, _, inode = handle.memory.split(b":")
    with (tmp_path / "other").open("w+b") as other:
        other.truncate(handle.memory_bytes)
        named = b":".join((kind, pid, str(other.fileno()).encode(), inode))
        with pytest.raises(StaleHandleError, match="no longer memory"):
            shared_rows(replace(handle, memory=named)).copy()
