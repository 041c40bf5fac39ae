"""The store: reads, writes, eviction, pins, limits and errors."""

import gc
import os
import threading
import time

import pytest
import xxhash

from encoder_contract.errors import ImageLimitError, InvalidRequestError, OverloadedError
from encoder_contract.extents import pairs
from encoder_service.store import StoreSizeError, segment
from testing.stored import write
from tests.small_store import PAGE_BYTES, WIDTH, embedding, make_store, put, read, tier_of
from tests.waiting import PATIENCE_S


def as_bytes(rows):
    return memoryview(rows.numpy()).cast("B")


@pytest.fixture
def store(new_store):
    return new_store()


def test_rows_and_their_windows_are_read_bit_for_bit(store):
    rows = embedding(1, 2.3)
    with write(store, b"a", rows, (1, 4, 6)) as pin:
        assert (pin.tokens, pin.grid, pin.tier, pin.address) == (len(rows), (1, 4, 6), "host", b"a")
        for begin, end in [(0, len(rows)), (5, 6), (1000, 1100), (len(rows) - 1, len(rows))]:
            assert read(pin, begin, end) == rows[begin:end].numpy().tobytes()
            assert sum(length for _, length in pin.handle(begin, end).extents) == (end - begin) * WIDTH * 4


def test_checksums_cover_the_window_and_are_cached_for_all_rows(store):
    rows = embedding(1, 2.5)
    with write(store, b"a", rows, (1, 4, 6)) as pin:
        assert pin.checksum(7, 2000) == xxhash.xxh3_64_intdigest(rows[7:2000].numpy())
        assert not pin.checksum_known
        assert pin.checksum() == pin.checksum(0, len(rows)) == xxhash.xxh3_64_intdigest(rows.numpy())
        assert pin.checksum_known


def test_a_scattered_embedding_reads_as_one(store):
    for index in range(16):
        put(store, bytes([index]))
    pins = [store.pin(bytes([index])) for index in range(1, 16, 2)]
    with write(store, b"wide", embedding(9, 5.5), (1, 1, 1)) as pin:
        assert len(pin.rows()) > 1
        assert read(pin) == embedding(9, 5.5).numpy().tobytes()
        assert read(pin, 1000, 3000) == embedding(9, 5.5)[1000:3000].numpy().tobytes()
    assert len(pins) == 8


@pytest.mark.parametrize("window", [(-1, 3), (3, 3), (5, 4), (0, 1025), (1024, 1025)])
def test_a_window_outside_the_embedding_is_an_error(store, window):
    with write(store, b"a", embedding(1), (1, 1, 1)) as pin:
        with pytest.raises(InvalidRequestError, match="1024 rows"):
            pin.rows(*window)
        with pytest.raises(InvalidRequestError):
            pin.handle(*window)


def test_the_first_writer_wins(store):
    put(store, b"a")
    with write(store, b"a", embedding(99, 2), (1, 9, 9), "another") as pin:
        assert read(pin) == embedding(ord("a")).numpy().tobytes()
        assert (pin.grid, pin.entry.holder) == ((1, 2, 2), "")
    assert store.stats().tiers[0].used_bytes == PAGE_BYTES


def test_the_least_recently_used_is_evicted_first(new_store):
    gone = []
    store = new_store(4, on_evict=lambda address, tier: gone.append((address, tier)))
    for name in (b"a", b"b", b"c", b"d"):
        put(store, name)
    store.pin(b"a").release()
    put(store, b"e")
    put(store, b"f")
    assert gone == [(b"b", "host"), (b"c", "host")]
    assert tier_of(store, b"a") == "host"


def test_a_pinned_embedding_stays_and_a_full_store_refuses_with_a_hint(store):
    pin = write(store, b"a", embedding(1, 16), (1, 1, 1))
    with pytest.raises(OverloadedError) as refusal:
        put(store, b"b")
    assert refusal.value.retry_after_ms > 0
    assert store.stats().refusals == 1
    assert not store.evict(b"a")
    assert store.flush() == 0
    pin.release()
    put(store, b"b")
    assert not store.contains(b"a")


def test_a_move_waits_for_a_release_for_at_most_wait_s(new_store):
    store = new_store(device_pages=16)
    full = store.copy(write(store, b"a", embedding(1, 16), (1, 1, 1)), b"b")
    assert full.tier == "host"
    with store.pin(b"a") as pin:
        began = time.monotonic()
        with pytest.raises(OverloadedError):
            pin.to_host(wait_s=0.5)
        assert 0.5 <= time.monotonic() - began < PATIENCE_S
        began = time.monotonic()
        threading.Timer(0.1, full.release).start()
        pin.to_host(wait_s=60.0)  # there is no room before that
        assert time.monotonic() - began < PATIENCE_S
        assert read(pin) == embedding(1, 16).numpy().tobytes()


def test_the_garbage_collector_releases_forgotten_pins_even_in_a_cycle(store):
    pin = write(store, b"a", embedding(1, 16), (1, 1, 1))
    cycle = [pin]
    cycle.append(cycle)
    del pin, cycle
    gc.collect()
    put(store, b"b")
    assert store.stats().pins == 0


def test_of_two_writers_of_one_address_the_first_to_commit_wins(store):
    first, second = (store.reserve(b"a", 1024, (1, 1, number)) for number in range(2))
    for entry, number in ((second, 2), (first, 1)):
        with store.filling(entry):
            for target, part in pairs(store.rows(entry), [as_bytes(embedding(number))]):
                target[:] = part
    assert store.pin(b"a") is None  # not before one is complete
    assert not store.evict(b"a")
    pins = [*store.commit([second]), *store.commit([first])]
    assert [pin.grid for pin in pins] == [(1, 1, 1)] * 2
    assert {read(pin) for pin in pins} == {bytes(as_bytes(embedding(2)))}
    host = store.stats().tiers[0]
    assert (host.writes, host.used_bytes, store.stats().pins) == (1, PAGE_BYTES, 2)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_copy_has_the_rows_and_the_checksum_under_its_own_address_and_holder(new_store, where):
    store = new_store(device_pages=8 if where == "device" else 0)
    with write(store, b"a", embedding(1, 2.5), (1, 4, 6), "me") as pin:
        assert pin.tier == where
        if where == "host":
            pin.checksum()
        with store.copy(pin, b"b", "you") as copy:
            assert (copy.address, copy.grid, copy.entry.holder) == (b"b", (1, 4, 6), "you")
            assert copy.checksum_known == (where == "host")
            copy.to_host()
            assert read(copy) == bytes(as_bytes(embedding(1, 2.5)))
            assert copy.checksum() == xxhash.xxh3_64_intdigest(as_bytes(embedding(1, 2.5)))
        with store.copy(pin, b"b", "you") as again:
            assert again.address == b"b"


def test_a_copy_without_room_is_none_and_takes_no_page(store):
    with write(store, b"a", embedding(1, 9), (1, 1, 1)) as pin:
        used = store.stats().tiers[0].used_bytes
        assert store.copy(pin, b"b") is None
        assert store.stats().tiers[0].used_bytes == used


def test_a_write_that_fails_leaves_nothing_behind(store):
    with pytest.raises(RuntimeError, match="lost"), store.filling(store.reserve(b"a", 1024, (1, 1, 1))):
        raise RuntimeError("the device is lost")
    assert store.stats().tiers[0].used_bytes == 0
    put(store, b"a")


def test_an_embedding_larger_than_the_host_tier_is_refused_by_name(store):
    with pytest.raises(ImageLimitError, match="--store-host-gib"):
        write(store, b"a", embedding(1, 17), (1, 1, 1))


def test_hits_misses_and_pins_are_counted(store):
    put(store, b"a", 3)
    with store.pin(b"a"):
        stats = store.stats()
        assert (stats.pins, stats.tiers[0].hits, stats.tiers[0].pinned_bytes) == (1, 1, 3 * PAGE_BYTES)
    assert store.pin(b"x") is None
    assert store.pin(b"x", again=True) is None
    stats = store.stats()
    assert (stats.pins, stats.misses, stats.tiers[0].hits) == (0, 1, 1)


def test_a_grid_that_is_asked_for_counts_as_a_pin_does_and_pins_nothing(store):
    put(store, b"a")
    put(store, b"b")
    assert store.grid(b"a") == store.grids()[b"a"]
    assert store.grid(b"x") is store.grid(b"x", again=True) is None
    stats = store.stats()
    assert (stats.pins, stats.misses, stats.tiers[0].hits) == (0, 1, 1)
    while store.contains(b"b"):
        put(store, os.urandom(4))
    assert store.contains(b"a"), "it was used last"


def test_a_store_too_large_for_its_folder_names_the_setting(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StoreSizeError, match=r"--store-host-gib.*shm_size.*emptyDir"):
        make_store(tmp_path, host_pages=2 * free // PAGE_BYTES)
    with pytest.raises(StoreSizeError, match="does not exist"):
        make_store(tmp_path / "missing")
    with pytest.raises(StoreSizeError, match="--store-host-gib"):
        make_store(tmp_path, host_pages=0)
    with pytest.raises(StoreSizeError, match="--store-device-gib"):
        make_store(tmp_path, device_pages=1 << 40)
    assert not list(tmp_path.iterdir())


def test_a_store_beyond_the_memory_limit_is_refused(tmp_path, monkeypatch):
    for name, text in (
        ("memory.max", "1000000\n"),
        ("memory.stat", "anon 400000\nfile 99999\nshmem 100000\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(segment, "_CGROUP", tmp_path)
    segment.require_room(tmp_path, 500_000)
    with pytest.raises(StoreSizeError, match="container's memory limit"):
        segment.require_room(tmp_path, 500_001)


def test_close_removes_the_segment_and_keeps_views_valid(tmp_path):
    store = make_store(tmp_path)
    pin = write(store, b"a", embedding(1), (1, 1, 1))
    views = pin.rows()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    assert bytes(views[0]) == embedding(1).numpy().tobytes()


def test_prefault_touches_every_page_and_changes_none(store):
    with write(store, b"a", embedding(1), (1, 1, 1)) as pin:
        assert sum(store.segment.prefault()) == store.segment.size_bytes
        assert read(pin) == embedding(1).numpy().tobytes()


def test_statistics_walk_no_entries(store):
    class Counted(dict):
        def __iter__(self):
            raise AssertionError("the entries are walked")

        keys = values = items = __iter__

    for name in (b"a", b"b"):
        put(store, name)
    held = store.host.entries
    store.host.entries = Counted(held)
    with store.pin(b"a"):
        (host,) = store.stats().tiers
        assert (store.stats().pins, host.entries, host.pinned_bytes) == (1, 2, PAGE_BYTES)
    assert store.stats().pins == 0
    store.host.entries = held
