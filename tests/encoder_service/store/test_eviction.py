"""The eviction order: which item goes next, by the chance of another use, and what holders are guaranteed."""

import itertools
import math

import pytest

from encoder_service.store.eviction import (
    CLAIM,
    LEARNING,
    MAX_HOLDERS,
    MAX_REMEMBERED,
    SAME_USE_S,
    SELDOM,
    UNUSED_S,
    USES,
    EvictionOrder,
    Item,
)


class Cache:
    """A cache of named items of equal size, whose clock the test sets. Shows what was dropped, in order."""

    def __init__(self, size: float, files: float = math.inf) -> None:
        self.order: EvictionOrder[Named] = EvictionOrder(size, files)
        self.limits = (size, files)
        self.items: dict[str, Named] = {}
        self.dropped: list[str] = []
        self.now = 0.0

    def ask(self, holder: str, name: str, size: int = 1) -> bool:
        """Request an item a while after the last request; return whether it is cached. If not, cache it."""
        self.now += SAME_USE_S
        return self.ask_at_once(holder, name, size)

    def ask_at_once(self, holder: str, name: str, size: int = 1) -> bool:
        """Request an item in the same moment as the last one."""
        if (item := self.items.get(name)) is not None:
            self.order.remove(item)
            self.order.use(item, self.now)
            self.order.add(item)
            return True
        for limit, new in enumerate((size, 1)):
            while sum(item.amounts[limit] for item in self.items.values()) + new > self.limits[limit]:
                self.drop(self.order.victim(self.now, holder, new, limit, name))
        item = self.items[name] = Named(name, size)
        self.order.admit(item, holder)
        self.order.use(item, self.now)
        self.order.add(item)
        return False

    def drop(self, item: "Named | None") -> None:
        assert item is not None
        self.order.remove(item)
        self.order.dropped(item)
        self.order.release(item)
        del self.items[item.name]
        self.dropped.append(item.name)

    def next(self) -> str:
        """The item that would be evicted if nobody in particular needed space."""
        victim = self.order.victim(self.now)
        assert victim is not None
        return victim.name

    def chance(self, holder: str, uses: int) -> float:
        return self.order.shares[holder].classes[uses - 1].chance

    def held(self, holder: str) -> int:
        return self.order.held.get(holder, (0,))[0]


class Named(Item):
    """An item with a name."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size, 1)
        self.name = name


def learn(cache: Cache, holder: str, times: int, *, used: bool) -> None:
    """Teach the order about new items of a holder: each is used again, or dropped at once and in the end forgotten."""
    for number in range(times):
        name = f"lesson {holder} {number}"
        cache.ask(holder, name)
        if used:
            cache.ask(holder, name)
        item = cache.items[name]
        cache.order.remove(item)
        if not used:
            cache.order.dropped(item)
        cache.order.release(item)
        del cache.items[name]


SURE = math.ceil(math.log(SELDOM / 2) / math.log(1 - LEARNING))
"""Observations after which a chance is below `SELDOM`."""


def test_while_nothing_is_learned_the_least_recently_used_item_goes_first() -> None:
    cache = Cache(4)
    for name in "abcd":
        cache.ask("one", name)
    cache.ask_at_once("one", "a")
    assert cache.next() == "b"
    cache.ask("one", "e")
    cache.ask("one", "f")
    assert cache.dropped == ["b", "c"]


def test_items_that_are_never_used_again_go_before_older_ones() -> None:
    cache = Cache(8)
    learn(cache, "scans", SURE, used=False)
    for name in "ab":
        cache.ask("chats", name)
    for name in ("page 1", "page 2"):
        cache.ask("scans", name)
    assert cache.chance("scans", 1) < SELDOM
    assert cache.next() == "page 1"
    for number in range(3, 20):
        cache.ask("scans", f"page {number}")
    assert {"a", "b"} < cache.items.keys()


def test_a_use_of_a_class_that_is_used_again_outweighs_some_age() -> None:
    cache = Cache(10)
    learn(cache, "chats", 300, used=True)
    learn(cache, "albums", 300, used=False)
    assert cache.chance("chats", 1) > 0.8
    assert SELDOM < cache.chance("albums", 1) < 0.2
    for number in range(6):  # more than its share
        cache.ask("chats", f"chat {number}")
    for number in range(4):
        cache.ask("albums", f"picture {number}")
    assert cache.next() == "picture 0"
    for number in range(4, 30):
        cache.ask("albums", f"picture {number}")
    assert cache.dropped[0] == "picture 0"
    assert "chat 0" in cache.dropped, "in the end, age counts"


def test_chances_are_of_one_holder_and_one_number_of_uses() -> None:
    cache = Cache(100)
    learn(cache, "a", 10, used=True)
    assert cache.chance("a", 1) > 0.5
    assert [cache.chance("a", uses) for uses in (2, 3, 4)] == [0.5] * 3
    cache.ask("b", "x")
    assert cache.chance("b", 1) == 0.5
    for _ in range(10):
        cache.ask("b", "x")
    assert [cache.chance("b", uses) > 0.5 for uses in (1, 2, 3, 4)] == [True] * 4


def test_the_calls_of_one_request_are_one_use() -> None:
    cache = Cache(100)
    cache.ask("a", "x")
    for _ in range(9):
        cache.now += SAME_USE_S / 10
        cache.ask_at_once("a", "x")
    assert (cache.items["x"].uses, cache.chance("a", 1)) == (1, 0.5)
    cache.ask("a", "x")
    assert (cache.items["x"].uses, cache.chance("a", 1)) == (2, 0.5 + LEARNING / 2)


def test_a_popular_item_is_used_again_although_its_requests_are_close() -> None:
    cache = Cache(100)
    cache.ask("a", "x")
    for _ in range(40):
        cache.now += SAME_USE_S / 10
        cache.ask_at_once("a", "x")
    assert cache.items["x"].uses == 5


@pytest.mark.attack("a tenant that fills the store and uses its rows again")
def test_a_flood_evicts_nothing_of_a_holder_below_its_share_whose_items_are_used() -> None:
    cache = Cache(16)
    for name in "abcdefgh":
        cache.ask("calm", name)
    for number in range(400):
        cache.ask("flood", f"flood {number}")
        cache.ask("flood", f"flood {number}")  # a flood that also uses its items again
        if number % 20 == 0:
            assert sum(cache.ask("calm", name) for name in "abcdefgh") == 8
    assert cache.chance("flood", 1) > 0.8
    assert cache.held("calm") == 8


def test_a_holder_below_its_share_evicts_none_of_its_own_items() -> None:
    cache = Cache(16)
    learn(cache, "late", 100, used=False)
    assert CLAIM < cache.chance("late", 1) < 0.5
    for number in range(20):
        cache.ask("first", f"first {number}")
        cache.ask("first", f"first {number}")
    for number in range(8):
        cache.ask("late", f"late {number}")
    assert (cache.held("first"), cache.held("late")) == (8, 8)
    cache.ask("late", "late 8")
    assert cache.dropped[-1] == "late 0"


def test_a_holder_whose_items_are_hardly_used_again_has_no_claim() -> None:
    cache = Cache(16)
    learn(cache, "scans", SURE, used=False)
    for number in range(16):
        cache.ask("chats", f"chat {number}")
    for number in range(100):
        cache.ask("scans", f"page {number}")
    assert cache.held("scans") == 1


UNCERTAIN = math.ceil(math.log(CLAIM + SELDOM) / math.log(1 - LEARNING))
"""Observations after which a chance is below `CLAIM` and above `SELDOM`."""


def test_items_that_are_probably_not_used_again_are_not_protected() -> None:
    cache = Cache(16)
    learn(cache, "scans", UNCERTAIN, used=False)
    assert SELDOM < cache.chance("scans", 1) < CLAIM
    for number in range(8):
        cache.ask("scans", f"page {number}")
    for number in range(9):
        cache.ask("chats", f"chat {number}")
    assert (cache.held("scans"), cache.held("chats")) == (7, 9)


def test_a_holder_whose_items_are_probably_not_used_again_evicts_its_own() -> None:
    cache = Cache(16)
    learn(cache, "scans", UNCERTAIN, used=False)
    for number in range(4):
        cache.ask("scans", f"index {number}")
        cache.ask("scans", f"index {number}")
    for number in range(12):
        cache.ask("chats", f"chat {number}")
    assert SELDOM < cache.chance("scans", 1) < CLAIM < cache.chance("scans", 2)
    cache.ask("scans", "page")
    assert cache.dropped == ["index 0"], "the last use of any other item was later"


def test_a_holder_that_left_does_not_keep_its_share() -> None:
    cache = Cache(16)
    for name in "abcdefgh":
        cache.ask("gone", name)
    for number in range(10):
        cache.ask("here", f"here {number}")
    assert cache.held("gone") == 8
    cache.now += UNUSED_S
    for number in range(100, 120):
        cache.ask("here", f"here {number}")
    assert cache.held("gone") == 0


@pytest.mark.attack("a tenant that takes the share of another, which had only scanned before")
@pytest.mark.parametrize("pages", [20, 90])
@pytest.mark.parametrize("stale", [False, True])
def test_a_holder_that_only_scanned_gets_its_share_back(pages: int, stale: bool) -> None:
    """Its pages were never used again; now it requests fewer pages than its share, each once a minute."""
    cache = Cache(200)
    if stale:  # so were those that it had used often before
        for _ in range(USES + 1):
            for number in range(SURE):
                cache.ask("alice", f"old {number}", 0)
        for number in range(SURE):
            cache.drop(cache.items[f"old {number}"])
    learn(cache, "alice", SURE, used=False)
    hits, ticks = [0] * 30, 90  # minutes, and in each
    for tick in range(len(hits) * ticks):
        cache.now += 60 / ticks
        if tick * pages % ticks < pages:
            hits[tick // ticks] += cache.ask_at_once("alice", f"page {tick % ticks * pages // ticks}")
        for age in range(0, 200, 40):  # mallory uses all of her items again
            cache.ask_at_once("mallory", f"new {tick - age}")
    assert hits[0] == 0
    assert hits[10:] == [pages] * 20, "all, after ten minutes"


def test_a_request_for_a_dropped_item_is_another_use() -> None:
    cache = Cache(4)
    cache.ask("one", "a")
    cache.ask("one", "a")
    for name in "bcde":
        cache.ask("one", name)
    assert cache.dropped == ["a"]
    chances = [cache.chance("one", uses) for uses in range(1, USES + 1)]
    assert chances == [0.5 + LEARNING / 2, 0.5, 0.5, 0.5], "what became of it is not known yet"
    cache.ask("one", "a")
    assert cache.items["a"].uses == 3
    assert cache.chance("one", 2) == 0.5 + LEARNING / 2
    for name in "fghi":
        cache.ask("one", name)
    cache.now += UNUSED_S
    cache.ask("one", "a")
    assert cache.items["a"].uses == 1, "too late, as for the guarantee"
    assert cache.chance("one", 3) == 0.5 - LEARNING / 2


def test_a_dropped_item_that_the_same_request_names_again_was_not_used_twice() -> None:
    cache = Cache(2)
    for name in "abca":
        cache.ask_at_once("one", name)
    assert cache.dropped == ["a", "b"]
    assert (cache.items["a"].uses, cache.chance("one", 1)) == (1, 0.5)


def test_dropped_items_are_forgotten_after_an_even_share_more() -> None:
    cache = Cache(100, files=10)
    cache.ask("other", "x", 10)
    for number in range(30):
        cache.ask("one", f"item {number}", 10)
    past = cache.order.shares["one"].past
    assert list(past) == [f"item {number}" for number in range(16, 21)], "half of 100, and of 10 files"
    assert cache.chance("one", 1) == pytest.approx(0.5 * (1 - LEARNING) ** 16)


def test_the_number_of_remembered_items_is_bounded() -> None:
    order: EvictionOrder[Named] = EvictionOrder(math.inf, math.inf)
    for holder in range(4):
        for number in range(MAX_REMEMBERED):
            item = Named(f"{number}", 1)
            order.admit(item, f"holder {holder}")
            order.use(item, 0.0)
            order.add(item)
            order.remove(item)
            order.dropped(item)
            if number:
                order.release(item)
    assert sum(len(share.past) for share in order.shares.values()) <= MAX_REMEMBERED * (
        1 + 1 / 2 + 1 / 3 + 1 / 4
    )
    assert len(order.shares["holder 3"].past) == MAX_REMEMBERED // 4


def test_shares_are_of_the_limit_that_is_reached() -> None:
    """A few large files, and many small ones of another holder: the number of files is short, not the bytes."""
    cache = Cache(1000, files=16)
    for name in "abcd":
        cache.ask("alice", name, 100)
    for number in range(50):
        cache.ask("mallory", f"tiny {number}")
    assert cache.order.held["alice"] == (400, 4)
    assert cache.order.held["mallory"][1] == 12


def test_many_holders_share_one_share_and_those_that_left_make_room() -> None:
    cache = Cache(10 * MAX_HOLDERS)
    for number in range(MAX_HOLDERS + 5):
        cache.ask(f"holder {number}", f"item {number}")
    assert len(cache.order.shares) == MAX_HOLDERS + 1
    assert cache.held("") == 5
    cache.drop(cache.items["item 3"])
    cache.ask("new", "its item")
    assert cache.held("new") == 1
    assert "holder 3" not in cache.order.shares


@pytest.mark.parametrize("holders", [1, 1000])
def test_the_number_of_items_that_an_eviction_looks_at_is_bounded(holders: int) -> None:
    looked_at = itertools.count()

    class Watched(Named):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            if name == "used_at":
                next(looked_at)
            return super().__getattribute__(name)

    order: EvictionOrder[Watched] = EvictionOrder(10_000, math.inf)
    for number in range(10_000):
        item = Watched(str(number), 1)
        order.admit(item, f"holder {number % holders}")
        order.use(item, float(number))
        order.add(item)
    before = next(looked_at)
    assert order.victim(10_000.0, "holder 0", 1) is not None
    assert next(looked_at) - before <= 2 * (MAX_HOLDERS + 1)
