"""Shares of holders: one may take all free pages, and loses its own rows first once it has the most."""

import random
import time
from collections import Counter

import pytest

from encoder_service.store import Store
from encoder_service.store.eviction import MAX_HOLDERS, UNUSED_S
from encoder_service.store.tier import Entry, Tier
from testing.stored import write
from tests.small_store import NewStore, embedding

ROWS = embedding(1)
GRID = (1, 2, 2)


def put(store: Store, holder: str, *numbers: int) -> None:
    """Put rows of a page each."""
    for number in numbers:
        write(store, f"{holder} {number}".encode(), ROWS, GRID, holder=holder).release()


def held(store: Store) -> Counter[str]:
    """Return how many rows of each holder are in the store."""
    return Counter(address.decode().rsplit(maxsplit=1)[0] for address in store.grids())


def pages_by_holder(tier: Tier) -> dict[str, int]:
    return {name: pages for name, (pages,) in tier.order.held.items()}


def ask(store: Store, holder: str, *numbers: int) -> int:
    """Pin and release rows; return how many of them are stored."""
    pins = [store.pin(f"{holder} {number}".encode()) for number in numbers]
    for pin in pins:
        if pin is not None:
            pin.release()
    return sum(pin is not None for pin in pins)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass on the store's clock."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)


@pytest.mark.attack("a tenant that fills the store")
def test_a_flood_does_not_evict_a_holder_with_half_of_the_store(new_store: NewStore) -> None:
    store = new_store(host_pages=16)
    put(store, "a", *range(8))
    for flood in range(5):
        put(store, "b", *range(100 * flood, 100 * flood + 20))  # more than the store holds
        assert ask(store, "a", *range(8)) == 8
    assert held(store) == {"a": 8, "b": 8}
    assert ask(store, "b", *range(412, 420)) == 8, "the latest of b stay"


def test_a_holder_that_comes_later_gets_as_much_as_the_others(new_store: NewStore) -> None:
    store = new_store(host_pages=18)
    put(store, "a", *range(40))
    assert ask(store, "a", *range(22, 40)) == 18, (
        "alone it may fill the store, and loses its oldest rows first"
    )
    put(store, "b", *range(40))
    assert held(store) == {"a": 9, "b": 9}
    put(store, "c", *range(40))
    assert held(store) == {"a": 6, "b": 6, "c": 6}
    put(store, "b", *range(100, 140))
    put(store, "a", *range(100, 140))
    assert held(store) == {"a": 6, "b": 6, "c": 6}


def test_a_flood_of_random_sizes_spares_a_holder_with_a_third(new_store: NewStore) -> None:
    store = new_store(host_pages=64)
    put(store, "a", *range(21))
    draw = random.Random(0)
    for number in range(300):
        rows = embedding(1, draw.uniform(0.1, 12))
        write(store, f"b {number}".encode(), rows, GRID, holder="b").release()
    assert held(store)["a"] == 21


def test_pinned_rows_count_against_their_holder(new_store: NewStore) -> None:
    store = new_store(host_pages=16)
    put(store, "a", *range(6))
    pins = [write(store, f"b {number}".encode(), ROWS, GRID, holder="b") for number in range(9)]
    put(store, "b", *range(20, 40))
    assert held(store) == {"a": 6, "b": 10}
    for pin in pins:
        pin.release()


def test_incoming_rows_count_against_their_holder(new_store: NewStore) -> None:
    store = new_store(host_pages=16)
    put(store, "a", *range(6))
    put(store, "b", *range(2))
    coming = [store.reserve(f"b {number}".encode(), len(ROWS), GRID, "b") for number in range(10, 18)]
    put(store, "b", *range(20, 40))
    assert held(store) == {"a": 6, "b": 2}
    for incoming in coming:
        assert isinstance(incoming, Entry)
        store.abandon(incoming)
    put(store, "b", *range(40, 60))
    assert held(store) == {"a": 6, "b": 10}


def test_rows_unused_for_ten_minutes_go_first(new_store: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a holder that left would keep its part of the store."""
    store = new_store(host_pages=16)
    put(store, "a", *range(8))
    put(store, "b", *range(8))
    later(monkeypatch, UNUSED_S + 1)
    assert ask(store, "a", 3) == 1
    put(store, "b", *range(100, 140))
    assert held(store) == {"a": 1, "b": 15}
    assert ask(store, "a", 3) == 1


def test_holders_beyond_the_limit_have_one_common_share(new_store: NewStore) -> None:
    store = new_store(host_pages=MAX_HOLDERS + 16)
    for number in range(MAX_HOLDERS):
        put(store, f"named {number}", 0)
    for number in range(16):
        put(store, f"other {number}", 0)
    order = store.host.order
    assert (len(order.held), order.held[""]) == (MAX_HOLDERS + 1, (16,))
    put(store, "late", *range(40))
    assert {address for address in store.grids() if address.startswith(b"named")} == {
        f"named {number} 0".encode() for number in range(MAX_HOLDERS)
    }
    assert order.held[""] == (16,)
    store.flush()
    assert not order.held
    put(store, "late", 0)
    assert pages_by_holder(store.host) == {"late": 1}


def test_the_device_tier_has_shares_and_a_copy_keeps_its_holder(new_store: NewStore) -> None:
    store = new_store(host_pages=64, device_pages=10)
    put(store, "a", 0, 1)
    put(store, "b", *range(8))
    assert store.moves.move_once()
    on_device = next(tier for tier in store.tiers if tier.name == "device")
    assert pages_by_holder(on_device) == {"a": 2, "b": 7}
    assert pages_by_holder(store.host) == {"b": 1}
    pin = store.pin(b"a 0")
    assert pin is not None
    pin.to_host()
    pin.release()
    assert pages_by_holder(store.host) == {"a": 1, "b": 1}
