"""Reserved pages: got without waiting, invisible until they are committed, and used again only once they are free."""

import threading

import pytest

from encoder_contract.errors import ImageLimitError
from encoder_service.store import Pin
from encoder_service.store.tier import Entry
from testing.stored import write
from tests.small_store import PAGE_ROWS, NewStore, embedding
from tests.waiting import PATIENCE_S

SIX, FIVE, FOUR = (pages * PAGE_ROWS for pages in (6, 5, 4))
GRID = (1, 2, 2)


def test_placed_rows_are_invisible_until_they_are_committed(new_store: NewStore) -> None:
    store = new_store(host_pages=10)
    entry = store.reserve(b"rows", FOUR, GRID, "me")
    assert isinstance(entry, Entry)
    assert not store.contains(b"rows")
    assert store.pin(b"rows") is None
    [pin] = store.commit([entry])
    assert store.contains(b"rows")
    found = store.reserve(b"rows", FOUR, GRID)
    assert isinstance(found, Pin)
    pin.release()
    found.release()
    assert store.flush() == 1


def test_placing_evicts_but_does_not_take_pages_in_use(new_store: NewStore) -> None:
    store = new_store(host_pages=10)
    write(store, b"unused", embedding(1, 6), GRID).release()
    first = store.reserve(b"a", SIX, GRID)
    assert isinstance(first, Entry)
    assert not store.contains(b"unused")
    assert store.reserve(b"b", FIVE, GRID) is None
    second = store.reserve(b"b", FOUR, GRID)
    assert isinstance(second, Entry)
    assert not {page for page, _ in first.runs} & {page for page, _ in second.runs}
    assert store.reserve(b"from a peer", FOUR, GRID, on_host=True) is None
    store.abandon(first)
    write(store, b"from a peer", embedding(1, 5), GRID).release()


def test_pages_that_a_lost_device_may_still_write_stay_taken_and_their_address_can_be_written(
    new_store: NewStore,
) -> None:
    store = new_store(host_pages=10)
    first, second = (store.reserve(b"rows", FIVE, GRID) for _ in range(2))
    assert isinstance(first, Entry)
    assert isinstance(second, Entry)
    assert store.reserve(b"more", FIVE, GRID) is None
    [pin] = store.commit([second])
    store.abandon(first)
    assert pin.entry is second
    assert isinstance(store.reserve(b"more", FIVE, GRID), Entry)


def test_rows_go_to_the_device_while_it_has_space_unless_they_are_for_the_host(new_store: NewStore) -> None:
    store = new_store(host_pages=16, device_pages=10)
    entries = [store.reserve(bytes([at]), FOUR, GRID, on_host=at == 0) for at in range(4)]
    assert [isinstance(entry, Entry) and entry.tier.name for entry in entries] == [
        *("host", "device", "device", "host")
    ]


def test_rows_that_never_fit_are_refused(new_store: NewStore) -> None:
    store = new_store(host_pages=4)
    with pytest.raises(ImageLimitError):
        store.reserve(b"rows", FIVE, GRID)


@pytest.mark.parametrize("how", ["released", "forgotten", "abandoned", "dropped"])
def test_freed_pages_are_reported_once_to_whoever_found_none(new_store: NewStore, how: str) -> None:
    store = new_store(host_pages=10)
    calls = threading.Semaphore(0)
    store.on_freed.append(calls.release)
    pins = [write(store, b"pinned", embedding(1, 6), GRID)]
    incoming = store.reserve(b"coming", FOUR, GRID)
    assert isinstance(incoming, Entry)
    assert store.reserve(b"rows", SIX if how != "abandoned" else FOUR, GRID) is None
    assert not calls.acquire(blocking=False)
    if how == "released":
        pins.pop().release()
    elif how == "forgotten":
        pins.clear()
    elif how == "abandoned":
        store.abandon(incoming)
    else:
        pins.pop().release()
        assert calls.acquire(timeout=PATIENCE_S)
        assert store.fits(SIX)
        assert not store.fits(SIX + FIVE)
        store.flush()
    assert calls.acquire(timeout=PATIENCE_S)
    assert not calls.acquire(blocking=False)
    assert isinstance(store.reserve(b"rows", FOUR, GRID), Entry)
