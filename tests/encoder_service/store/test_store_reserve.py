"""Space reserved for embeddings that are about to be computed: no other writer gets it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from encoder_contract.errors import OverloadedError
from encoder_service.store import Store
from tests.small_store import PAGE_ROWS, embedding, make_store
from tests.waiting import PATIENCE_S

SIX, FIVE, FOUR = (pages * PAGE_ROWS for pages in (6, 5, 4))
GRID = (1, 2, 2)


def test_other_writers_do_not_get_reserved_space(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=10)
    assert store.reserve([SIX, FIVE]) == 1
    with pytest.raises(OverloadedError):
        store.receive(b"put by a caller", FIVE, GRID)
    with pytest.raises(OverloadedError):
        store.put(b"from a peer", embedding(1, 5), GRID)
    incoming = store.receive(b"put by another caller", FOUR, GRID)
    assert incoming is not None
    store.put(b"computed", embedding(2, 6), GRID, is_reserved=True).release()
    store.release(SIX)
    incoming.abandon()
    store.put(b"from a peer", embedding(1, 5), GRID).release()
    store.close()


def test_other_writers_do_not_get_reserved_space_with_a_device_tier(tmp_path: Path) -> None:
    store = make_store(tmp_path, host_pages=6, device_pages=4)
    assert store.reserve([FOUR, FOUR]) == 2
    with pytest.raises(OverloadedError):
        store.put(b"from a peer", embedding(1, 4), GRID)
    pins = [store.put(name, embedding(2, 4), GRID, is_reserved=True) for name in (b"a", b"b")]
    assert [pin.tier for pin in pins] == ["device", "host"]
    store.close()


def test_reserving_without_waiting_does_not_start_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an image might overtake a large batch, and is put back: its own turn comes when that batch is done."""
    store = make_store(tmp_path, host_pages=10, wait_s=PATIENCE_S)
    assert store.reserve([SIX]) == 1
    assert store.reserve([SIX], wait=False) == 0
    later(monkeypatch, 2 * PATIENCE_S)
    threading.Timer(0.1, lambda: store.release(SIX)).start()
    assert store.reserve([SIX]) == 1
    store.close()


@pytest.mark.parametrize("how", ["rows that never came", "a pin that was forgotten"])
def test_space_that_was_briefly_free_restarts_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = make_store(tmp_path, host_pages=10, wait_s=0.2)
    release = taken(store, how)
    with pytest.raises(OverloadedError):
        store.reserve([SIX])
    release()
    store._wait_s = PATIENCE_S
    later(monkeypatch, 2 * PATIENCE_S)
    assert store.reserve([SIX]) == 1
    threading.Timer(0.1, lambda: store.release(SIX)).start()
    assert store.reserve([SIX]) == 1
    store.close()


def taken(store: Store, how: str) -> Callable[[], None]:
    """Fill more than half of the store; return a call that frees it without waking writers that wait."""
    if how == "rows that never came":
        incoming = store.receive(b"rows", FIVE, GRID)
        assert incoming is not None
        return incoming.abandon
    pins = [store.put(b"pinned", embedding(1, 5), GRID)]
    return pins.clear


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass on the store's clock."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)
