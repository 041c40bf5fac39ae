"""The store against a simple model, and its promises one by one. A second CPU arena stands for the device tier."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from encoder_contract.errors import ImageLimitError, InvalidRequestError, OverloadedError
from encoder_service.store import Store, StoreSizeError, capacity
from encoder_service.store.mover import PROMOTE_HITS

WIDTH = 16  # float32: 64 bytes a row, 1024 rows a page
PAGE_BYTES = 64 << 10
PAGE_ROWS = PAGE_BYTES // (WIDTH * 4)


def make_store(folder, host_pages=16, device_pages=0, **settings):
    return Store(
        host_bytes=host_pages * PAGE_BYTES,
        device_bytes=device_pages * PAGE_BYTES,
        width=WIDTH,
        dtype=torch.float32,
        segment_dir=str(folder),
        **{"wait_s": 0.0} | settings,
    )


@pytest.fixture
def store(tmp_path):
    store = make_store(tmp_path)
    yield store
    store.close()


def embedding(seed, pages=1.0):
    tokens = max(1, int(pages * PAGE_ROWS))
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def read(pin, begin=0, end=None):
    return b"".join(pin.rows(begin, end))


def put(store, name, pages=1.0):
    store.put(name, embedding(name[0], pages), (1, 2, 2)).release()


class StoreMachine(RuleBasedStateMachine):
    """Anything anyone may do, in any order. `versions` is all the model knows: what an address means while held."""

    pins = Bundle("pins")
    device_pages = 0
    folder: Path

    def __init__(self):
        super().__init__()
        self.evicted = []
        self.store = make_store(
            self.folder, 12, self.device_pages, on_evict=lambda *dropped: self.evicted.append(dropped)
        )
        self.live = []
        self.versions = {}
        self.version = 0

    @rule(target=pins, name=st.integers(0, 9), pages=st.sampled_from([0.01, 0.5, 1, 1.5, 3, 4.25, 11]))
    def put(self, name, pages):
        address = bytes([name])
        held = self.store.contains(address)
        self.version += 1
        rows = embedding(self.version, pages)
        try:
            pin = self.store.put(address, rows, (1, 1, self.version))
        except OverloadedError:
            host = self.store.stats().tiers[-1]
            needed = -(-len(rows) // PAGE_ROWS) * PAGE_BYTES
            assert host.size_bytes - host.pinned_bytes < needed
            return None
        if not held:
            self.versions[address] = rows.numpy().tobytes()
        self.live.append(pin)
        return pin

    @rule(target=pins, name=st.integers(0, 9))
    def pin(self, name):
        pin = self.store.pin(bytes([name]))
        if pin is not None:
            self.live.append(pin)
        return pin

    @rule(pin=pins)
    def to_host(self, pin):
        if pin in self.live:
            try:
                pin.to_host(wait_s=0)
            except OverloadedError:
                assert pin.tier == "device"

    @rule(pin=consumes(pins))
    def release(self, pin):
        if pin is not None:
            pin.release()
            pin.release()
            self.live = [other for other in self.live if other is not pin]

    @rule(name=st.integers(0, 9))
    def evict(self, name):
        address = bytes([name])
        held, pinned = self.store.contains(address), any(pin.address == address for pin in self.live)
        assert self.store.evict(address) == (held and not pinned)
        assert self.store.contains(address) == (held and pinned)

    @rule()
    def flush(self):
        self.store.flush()
        stats = self.store.stats()
        assert all(tier.entries == tier.pinned_entries for tier in stats.tiers)

    @rule()
    def move(self):
        self.store.move_once()

    @invariant()
    def every_pin_reads_the_bytes_that_its_address_had_when_it_was_first_put(self):
        for pin in self.live:
            assert self.store.contains(pin.address)
            slot = pin._held
            found = b"".join(piece.numpy().tobytes() for piece in slot.tier.pieces(slot))
            assert found == self.versions[pin.address]
            if pin.tier == "host":
                assert read(pin) == found

    @invariant()
    def no_page_has_two_owners_and_none_is_lost(self):
        for tier in self.store._ledger.tiers:
            runs = [run for slot in tier.slots.values() for run in slot.runs]
            pages = [page for start, count in runs for page in range(start, start + count)]
            assert len(pages) == len(set(pages))
            assert len(pages) + tier.arena.free_pages == tier.arena.pages

    @invariant()
    def the_numbers_add_up(self):
        stats = self.store.stats()
        assert stats.pins == len(self.live)
        assert len(self.evicted) == sum(tier.evictions for tier in stats.tiers)
        for tier in stats.tiers:
            assert tier.entries == tier.writes - tier.evictions
            assert tier.pinned_bytes <= tier.used_bytes <= tier.size_bytes

    def teardown(self):
        self.store.close()


class TieredStoreMachine(StoreMachine):
    device_pages = 5


@pytest.mark.parametrize("machine", [StoreMachine, TieredStoreMachine])
def test_whatever_happens_in_whatever_order_the_store_is_as_the_model_says(machine, tmp_path):
    machine.folder = tmp_path
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    case("runTest").runTest()


def test_rows_come_back_bit_for_bit_and_any_window_of_them(store):
    rows = embedding(1, 2.3)
    with store.put(b"a", rows, (1, 4, 6)) as pin:
        assert (pin.tokens, pin.grid, pin.tier, pin.address) == (len(rows), (1, 4, 6), "host", b"a")
        for begin, end in [(0, len(rows)), (5, 6), (1000, 1100), (len(rows) - 1, len(rows))]:
            assert read(pin, begin, end) == rows[begin:end].numpy().tobytes()
            assert sum(length for _, length in pin.handle(begin, end).extents) == (end - begin) * WIDTH * 4


def test_the_checksum_is_that_of_the_window_and_known_for_all_rows_after_the_first_time(store):
    rows = embedding(1, 2.5)
    with store.put(b"a", rows, (1, 4, 6)) as pin:
        assert pin.checksum(7, 2000) == xxhash.xxh3_64_intdigest(rows[7:2000].numpy())
        assert not pin.checksum_known
        assert pin.checksum() == pin.checksum(0, len(rows)) == xxhash.xxh3_64_intdigest(rows.numpy())
        assert pin.checksum_known


def test_a_scattered_embedding_reads_as_one(store):
    for index in range(16):
        put(store, bytes([index]))
    pins = [store.pin(bytes([index])) for index in range(1, 16, 2)]
    with store.put(b"wide", embedding(9, 5.5), (1, 1, 1)) as pin:
        assert len(pin.rows()) > 1
        assert read(pin) == embedding(9, 5.5).numpy().tobytes()
        assert read(pin, 1000, 3000) == embedding(9, 5.5)[1000:3000].numpy().tobytes()
    assert len(pins) == 8


@pytest.mark.parametrize("window", [(-1, 3), (3, 3), (5, 4), (0, 1025), (1024, 1025)])
def test_a_window_outside_the_embedding_is_an_error(store, window):
    with store.put(b"a", embedding(1), (1, 1, 1)) as pin:
        with pytest.raises(InvalidRequestError, match="1024 rows"):
            pin.rows(*window)
        with pytest.raises(InvalidRequestError):
            pin.handle(*window)


def test_the_first_writer_wins(store):
    put(store, b"a")
    with store.put(b"a", embedding(99, 2), (1, 9, 9)) as pin:
        assert read(pin) == embedding(ord("a")).numpy().tobytes()
        assert pin.grid == (1, 2, 2)


def test_what_was_used_longest_ago_goes_first(tmp_path):
    gone = []
    store = make_store(tmp_path, 4, on_evict=lambda address, tier: gone.append((address, tier)))
    for name in (b"a", b"b", b"c", b"d"):
        put(store, name)
    store.pin(b"a").release()
    put(store, b"e")
    put(store, b"f")
    assert gone == [(b"b", "host"), (b"c", "host")]
    assert store.tier_of(b"a") == "host"
    store.close()


def test_a_pinned_embedding_stays_and_a_full_store_refuses_with_a_hint(store):
    pin = store.put(b"a", embedding(1, 16), (1, 1, 1))
    with pytest.raises(OverloadedError) as refusal:
        put(store, b"b")
    assert refusal.value.retry_after_ms > 0
    assert store.stats().refusals == 1
    assert not store.evict(b"a")
    assert store.flush() == 0
    pin.release()
    put(store, b"b")
    assert not store.contains(b"a")


def test_a_writer_waits_for_a_release_but_not_longer_than_it_may(tmp_path):
    store = make_store(tmp_path, wait_s=0.5)
    pin = store.put(b"a", embedding(1, 16), (1, 1, 1))
    threading.Timer(0.1, pin.release).start()
    began = time.monotonic()
    put(store, b"b", 16)
    assert 0.05 < time.monotonic() - began < 0.45
    with store.pin(b"b"):
        began = time.monotonic()
        with pytest.raises(OverloadedError):
            put(store, b"c")
        assert 0.5 <= time.monotonic() - began < 1
    store.close()


def test_a_pin_that_is_forgotten_is_released_by_the_garbage_collector_even_in_a_cycle(store):
    pin = store.put(b"a", embedding(1, 16), (1, 1, 1))
    cycle = [pin]
    cycle.append(cycle)
    del pin, cycle
    gc.collect()
    put(store, b"b")
    assert store.stats().pins == 0


def test_two_writers_of_one_address_write_once(tmp_path):
    store = make_store(tmp_path, wait_s=5.0)
    entered, go_on = threading.Event(), threading.Event()

    class SlowRows(torch.Tensor):
        def contiguous(self):
            entered.set()
            go_on.wait(5)
            return self.as_subclass(torch.Tensor).contiguous()

    pins = []
    first = threading.Thread(
        target=lambda: pins.append(store.put(b"a", embedding(1).as_subclass(SlowRows), (1, 1, 1)))
    )
    first.start()
    assert entered.wait(5)
    assert store.pin(b"a") is None  # not before it is complete
    assert not store.evict(b"a")
    second = threading.Thread(target=lambda: pins.append(store.put(b"a", embedding(2), (1, 1, 2))))
    second.start()
    time.sleep(0.05)
    go_on.set()
    first.join()
    second.join()
    assert [pin.grid for pin in pins] == [(1, 1, 1)] * 2
    assert store.stats().tiers[0].writes == 1
    store.close()


def test_a_write_that_fails_leaves_nothing_behind(store):
    class BrokenRows(torch.Tensor):
        def contiguous(self):
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="lost"):
        store.put(b"a", embedding(1).as_subclass(BrokenRows), (1, 1, 1))
    assert store.stats().tiers[0].used_bytes == 0
    put(store, b"a")


def test_an_embedding_larger_than_the_host_tier_is_refused_by_name(store):
    with pytest.raises(ImageLimitError, match="--store-host-gib"):
        store.put(b"a", embedding(1, 17), (1, 1, 1))


def test_rows_go_to_the_device_and_come_to_the_host_when_someone_reads(tmp_path):
    store = make_store(tmp_path, device_pages=8)
    pin = store.put(b"a", embedding(1, 2), (1, 1, 1))
    assert pin.tier == "device"
    pin.to_host()
    pin.to_host()
    assert pin.tier == "host"
    assert read(pin) == embedding(1, 2).numpy().tobytes()
    pin.release()
    device, host = store.stats().tiers
    assert (device.entries, host.entries, store.stats().pins) == (1, 1, 0)
    with store.pin(b"a") as again:
        assert again.tier == "host"
    store.close()


def test_a_full_device_sends_new_rows_to_the_host_and_demotes_the_coldest(tmp_path):
    gone = []
    store = make_store(tmp_path, device_pages=4, on_evict=lambda *dropped: gone.append(dropped))
    for name in b"abcde":
        put(store, bytes([name]))
    assert [store.tier_of(bytes([name])) for name in b"abcde"] == ["device"] * 4 + ["host"]
    assert store.move_once()
    assert not store.move_once()
    assert store.tier_of(b"a") == "host"
    assert gone == [(b"a", "device")]
    with store.pin(b"a") as pin:
        assert read(pin) == embedding(ord("a")).numpy().tobytes()
    assert store.stats().demotions == 1
    store.close()


def test_demotion_waits_while_the_host_is_pinned_and_loses_nothing(tmp_path):
    store = make_store(tmp_path, host_pages=4, device_pages=4)
    for name in b"abcd":
        put(store, bytes([name]))
    pin = store.put(b"p", embedding(1, 4), (1, 1, 1))
    assert pin.tier == "host"
    assert not store.move_once()
    assert all(store.tier_of(bytes([name])) == "device" for name in b"abcd")
    pin.release()
    assert store.move_once()
    assert not store.contains(b"p")
    store.close()


def test_repeated_hits_bring_an_embedding_to_the_device(tmp_path):
    store = make_store(tmp_path, device_pages=4)
    for name in b"abcde":
        put(store, bytes([name]))
    assert store.move_once()  # room for the promotion
    for _ in range(PROMOTE_HITS):
        assert not store.move_once()
        store.pin(b"e").release()
    assert store.move_once()
    assert store.stats().promotions == 1
    assert store.evict(b"e")
    assert not store.contains(b"e")
    store.close()


def test_the_mover_thread_keeps_room_on_the_device_and_ends_with_the_store(tmp_path):
    store = make_store(tmp_path, host_pages=64, device_pages=8)
    thread = threading.Thread(target=store.keep_moving)
    thread.start()
    deadline = time.monotonic() + 5
    for name in range(30):
        while (tier := store.stats().tiers[0]).used_bytes == tier.size_bytes and time.monotonic() < deadline:
            time.sleep(0.005)
        put(store, bytes([name]))
    assert store.stats().tiers[0].writes == 30
    for name in range(30):
        with store.pin(bytes([name])) as pin:
            pin.to_host()
            assert read(pin) == embedding(name).numpy().tobytes()
    store.close()
    thread.join(5)
    assert not thread.is_alive()


def test_stats_name_what_is_large_and_who_holds_it(store):
    for name, pages in ((b"a", 1), (b"b", 3), (b"c", 2)):
        put(store, name, pages)
    with store.pin(b"b"):
        stats = store.stats()
    assert [entry.address for entry in stats.largest] == [b"b", b"c", b"a"]
    assert (stats.largest[0].pins, stats.largest[0].hits, stats.largest[0].row_bytes) == (
        1,
        1,
        3 * PAGE_BYTES,
    )
    assert store.pin(b"x") is None
    assert store.stats().misses == 1
    assert stats.tiers[0].hits == 1


def test_a_store_that_the_folder_cannot_hold_says_what_to_set(tmp_path):
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


def test_a_store_beyond_the_memory_limit_says_so(tmp_path, monkeypatch):
    for name, text in (
        ("memory.max", "1000000\n"),
        ("memory.stat", "anon 400000\nfile 99999\nshmem 100000\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    capacity.check_host(tmp_path, 500_000)
    with pytest.raises(StoreSizeError, match="container's memory limit"):
        capacity.check_host(tmp_path, 500_001)


def test_close_removes_the_segment_and_keeps_what_is_viewed(tmp_path):
    store = make_store(tmp_path)
    pin = store.put(b"a", embedding(1), (1, 1, 1))
    views = pin.rows()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    assert bytes(views[0]) == embedding(1).numpy().tobytes()


def test_prefault_touches_every_page_and_changes_none(store):
    with store.put(b"a", embedding(1), (1, 1, 1)) as pin:
        store.segment.prefault()
        assert read(pin) == embedding(1).numpy().tobytes()
