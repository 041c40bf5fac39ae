"""The store's tiers: where rows are, and when they move. A second arena on the CPU stands in for the device."""

import threading
import time

import pytest

from encoder_service.store.moves import PROMOTE_READERS
from testing.stored import write
from tests.small_store import PAGE_ROWS, embedding, put, read, tier_of
from tests.waiting import PATIENCE_S


def test_rows_go_to_the_device_and_are_copied_to_the_host_for_readers(new_store):
    store = new_store(device_pages=8)
    pin = write(store, b"a", embedding(1, 2), (1, 1, 1))
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


def test_a_full_device_sends_new_rows_to_the_host_and_demotes_the_coldest(new_store):
    gone = []
    store = new_store(device_pages=4, on_evict=lambda *dropped: gone.append(dropped))
    for name in b"abcde":
        put(store, bytes([name]))
    assert [tier_of(store, bytes([name])) for name in b"abcde"] == ["device"] * 4 + ["host"]
    assert store.moves.move_once()
    assert not store.moves.move_once()
    assert tier_of(store, b"a") == "host"
    assert gone == [(b"a", "device")]
    with store.pin(b"a") as pin:
        assert read(pin) == embedding(ord("a")).numpy().tobytes()
    assert store.stats().demotions == 1


def test_free_pages_that_other_processes_cannot_open_do_not_count(new_store):
    store = new_store(host_pages=4, device_pages=4)
    assert store.device is not None
    assert store.device_memory == (store.device.shared_as, len(store.device.memory))
    store.device.shared_as = b""
    assert store.device_memory is None, "a device's process would fail to open it"
    pin = write(store, b"p", embedding(1, 4), (1, 1, 1))
    assert pin.tier == "host"
    freed = []
    store.on_freed.append(lambda: freed.append(True))
    assert not store.fits(PAGE_ROWS)
    pin.release()
    assert freed
    assert store.fits(PAGE_ROWS)


def test_demotion_waits_while_the_host_is_pinned_and_loses_nothing(new_store):
    store = new_store(host_pages=4, device_pages=4)
    for name in b"abcd":
        put(store, bytes([name]))
    pin = write(store, b"p", embedding(1, 4), (1, 1, 1))
    assert pin.tier == "host"
    assert not store.moves.move_once()
    assert all(tier_of(store, bytes([name])) == "device" for name in b"abcd")
    pin.release()
    assert store.moves.move_once()
    assert not store.contains(b"p")


@pytest.fixture
def with_room(new_store):
    """A store with an embedding on the host, `e`, and room for it on the device."""
    store = new_store(device_pages=4)
    for name in b"abcde":
        put(store, bytes([name]))
    assert store.moves.move_once()
    return store


def test_an_embedding_moves_to_the_device_after_enough_readers(with_room):
    store = with_room
    for _ in range(PROMOTE_READERS):
        assert not store.moves.move_once()
        with store.pin(b"e") as pin:
            store.moves.to_device(pin)
            assert pin.tier == "host"
    assert store.moves.move_once()
    assert store.stats().promotions == 1
    with store.pin(b"e") as pin:
        store.moves.to_device(pin)
        assert pin.tier == "device"
        assert store.stats().pins == 1
        pin.to_host()
        assert read(pin) == embedding(ord("e")).numpy().tobytes()
    assert store.evict(b"e")
    assert not store.contains(b"e")


def test_pins_alone_do_not_promote_rows_to_the_device(with_room):
    store = with_room
    for _ in range(3 * PROMOTE_READERS):
        store.pin(b"e").release()
        assert not store.moves.move_once()
    assert store.stats().promotions == 0
    assert tier_of(store, b"e") == "host"


def test_the_migrator_keeps_device_space_and_ends_with_the_store(new_store):
    store = new_store(host_pages=64, device_pages=8)
    thread = threading.Thread(target=store.moves.keep_moving)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
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
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_migrator_without_work_takes_no_lock(new_store, monkeypatch):
    store = new_store(host_pages=64, device_pages=8)
    put(store, b"a")
    asked = threading.Semaphore(0)
    wait = store.moves._closed.wait

    def noted(seconds):
        asked.release()
        return wait(seconds)

    monkeypatch.setattr(store.moves._closed, "wait", noted)
    thread = threading.Thread(target=store.moves.keep_moving)
    with store.lock:
        thread.start()
        assert all(asked.acquire(timeout=PATIENCE_S) for _ in range(3))
    store.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
