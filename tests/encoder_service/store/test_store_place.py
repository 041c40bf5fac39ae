"""Pages for rows that another process writes: reserved without waiting, and used again only once they are free."""

import threading
from pathlib import Path

import pytest

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.store import Obstacle, Pin
from encoder_service.store.tier import Entry
from tests.small_store import PAGE_ROWS, embedding, make_store
from tests.waiting import PATIENCE_S

SIX, FIVE, FOUR = (pages * PAGE_ROWS for pages in (6, 5, 4))
GRID = (1, 2, 2)


def test_placed_rows_are_invisible_until_they_are_committed(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=10)
    entry = store.place(b"rows", FOUR, GRID, "me")
    assert isinstance(entry, Entry)
    assert not store.contains(b"rows")
    assert store.pin(b"rows") is None
    [pin] = store.commit_all([entry])
    assert store.contains(b"rows")
    found = store.place(b"rows", FOUR, GRID)
    assert isinstance(found, Pin)
    pin.release()
    found.release()
    assert store.flush() == 1
    store.close()


def test_placing_evicts_but_does_not_take_pages_in_use(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=10)
    store.put(b"unused", embedding(1, 6), GRID).release()
    first = store.place(b"a", SIX, GRID)
    assert isinstance(first, Entry)
    assert not store.contains(b"unused")
    assert store.place(b"b", FIVE, GRID) is Obstacle.FULL
    second = store.place(b"b", FOUR, GRID)
    assert isinstance(second, Entry)
    assert not {page for page, _ in first.runs} & {page for page, _ in second.runs}
    with pytest.raises(OverloadedError):
        store.receive(b"from a peer", FOUR, GRID)
    store.abandon(first)
    store.put(b"from a peer", embedding(1, 5), GRID).release()
    store.close()


def test_an_address_has_one_writer_at_a_time(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=10)
    incoming = store.receive(b"rows", FOUR, GRID)
    assert incoming is not None
    assert store.place(b"rows", FOUR, GRID) is Obstacle.WRITER
    incoming.abandon()
    assert isinstance(store.place(b"rows", FOUR, GRID), Entry)
    store.close()


def test_disowned_pages_stay_taken_but_their_address_is_free(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=10)
    first = store.place(b"rows", FIVE, GRID)
    assert isinstance(first, Entry)
    store.disown(first)
    second = store.place(b"rows", FIVE, GRID)
    assert isinstance(second, Entry)
    assert store.place(b"more", FIVE, GRID) is Obstacle.FULL
    store.free(first)
    assert store.place(b"rows", FIVE, GRID) is Obstacle.WRITER, "that of the second writer"
    assert isinstance(store.place(b"more", FIVE, GRID), Entry)
    store.close()


def test_rows_that_never_fit_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=4)
    with pytest.raises(ImageLimitError):
        store.place(b"rows", FIVE, GRID)
    store.close()


@pytest.mark.parametrize("how", ["released", "forgotten", "abandoned", "dropped"])
def test_freed_pages_are_reported_once_to_whoever_found_none(tmp_path: Path, how: str) -> None:
    store = make_store(tmp_path, host_pages=10)
    calls = threading.Semaphore(0)
    store.on_freed = calls.release
    pins = [store.put(b"pinned", embedding(1, 6), GRID)]
    incoming = store.receive(b"coming", FOUR, GRID)
    assert incoming is not None
    assert store.place(b"rows", SIX if how != "abandoned" else FOUR, GRID) is Obstacle.FULL
    assert not calls.acquire(blocking=False)
    if how == "released":
        pins.pop().release()
    elif how == "forgotten":
        pins.clear()
    elif how == "abandoned":
        incoming.abandon()
    else:
        pins.pop().release()
        assert calls.acquire(timeout=PATIENCE_S)
        assert store.fits(SIX)
        assert not store.fits(SIX + FIVE)
        store.flush()
    assert calls.acquire(timeout=PATIENCE_S)
    assert not calls.acquire(blocking=False)
    assert isinstance(store.place(b"rows", FOUR, GRID), Entry)
    store.close()
