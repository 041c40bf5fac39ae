"""The space of a tier: which pages are free, which run of them an embedding gets, and which entry is evicted next.

That is the least recently used one of the holder with the most pages, and never one that is pinned.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

Run = tuple[int, int]
"""(first page, number of pages)."""

_START_BITS = 32

MAX_HOLDERS = 64
"""Holders that are told apart. The rows of all others count against one share: an eviction looks at every share."""
UNUSED_S = 600.0
"""An entry that nobody has used for so long is evicted before others: a holder that left does not keep its part."""


class Arena:
    """Allocates pages by number; does not touch their contents. Not thread-safe: its owner holds the lock.

    Adjacent free runs are merged when they are freed. Free runs are kept as one sorted list of integers (length in
    the high bits, start in the low bits), so best fit is a bisection and a free run needs no object beyond two
    dictionary entries.
    """

    def __init__(self, pages: int) -> None:
        """Start with all `pages` pages free."""
        assert 0 < pages < 1 << _START_BITS
        self.pages = pages
        self.free_pages = 0
        self._length_at: dict[int, int] = {}  # first page of a free run -> its length
        self._start_before: dict[int, int] = {}  # page behind a free run -> its first page
        self._by_length: list[int] = []
        self._add(0, pages)

    @property
    def free_runs(self) -> int:
        """Number of free runs."""
        return len(self._by_length)

    @property
    def largest_free_run(self) -> int:
        """Pages of the longest free run."""
        return self._by_length[-1] >> _START_BITS if self._by_length else 0

    def allocate(self, pages: int, max_runs: int) -> tuple[Run, ...] | None:
        """Allocate `pages` pages: the shortest run that holds them, else up to `max_runs` of the longest; else None."""
        assert pages > 0
        if pages > self.free_pages:
            return None
        longest = self._by_length[-max_runs:]
        if sum(run >> _START_BITS for run in longest) < pages:
            return None
        taken: list[Run] = []
        while pages:
            place = bisect_left(self._by_length, pages << _START_BITS)
            run = self._by_length[min(place, len(self._by_length) - 1)]
            length, start = run >> _START_BITS, run & ((1 << _START_BITS) - 1)
            count = min(length, pages)
            self._remove(start, length)
            if count < length:
                self._add(start + count, length - count)
            taken.append((start, count))
            pages -= count
        return tuple(taken)

    def free(self, runs: tuple[Run, ...]) -> None:
        """Free runs that `allocate` returned."""
        for start, count in runs:
            end = start + count
            before = self._start_before.get(start)
            if before is not None:
                self._remove(before, start - before)
                start = before
            behind = self._length_at.get(end)
            if behind is not None:
                self._remove(end, behind)
                end += behind
            self._add(start, end - start)

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        insort(self._by_length, length << _START_BITS | start)
        self.free_pages += length

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        del self._by_length[bisect_left(self._by_length, length << _START_BITS | start)]
        self.free_pages -= length


class Evictable(Protocol):
    """What an eviction order has to know of an entry."""

    address: bytes
    holder: str
    """The name that `EvictionOrder.take` returned."""
    used_s: float
    """When it was last added to the order, on the caller's clock."""


Entry = TypeVar("Entry", bound=Evictable)


class _Share(Generic[Entry]):
    """What one holder has."""

    __slots__ = ("pages", "unpinned")

    def __init__(self) -> None:
        self.pages = 0
        self.unpinned: OrderedDict[bytes, Entry] = OrderedDict()  # the least recently used first


class EvictionOrder(Generic[Entry]):
    """The pages of each holder, and the order of the entries that may be evicted. Not thread-safe.

    While pages are free, a holder may take all of them. Then the holder with the most makes room, so that holders that
    always want more have equal shares. An entry leaves the order while it is pinned, and returns as the most recently
    used of its holder when its last pin is released, so finding a victim takes the same time however much is pinned.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._shares: dict[str, _Share[Entry]] = {}

    def __len__(self) -> int:
        """Return the number of shares."""
        return len(self._shares)

    def pages(self, holder: str) -> int:
        """Return how many pages count against `holder`."""
        share = self._shares.get(self._name(holder))
        return 0 if share is None else share.pages

    def take(self, holder: str, pages: int) -> str:
        """Count `pages` more against `holder`; return the name they count under: its own, or that of all others."""
        name = self._name(holder)
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = _Share()
        share.pages += pages
        return name

    def give_back(self, name: str, pages: int) -> None:
        """Undo a `take` that returned `name`."""
        share = self._shares[name]
        share.pages -= pages
        if not share.pages:
            del self._shares[name]

    def add(self, entry: Entry, now: float) -> None:
        """Make an entry evictable, as the one of its holder that was used most recently: `now`."""
        entry.used_s = now
        self._shares[entry.holder].unpinned[entry.address] = entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry from the order: it is pinned or dropped."""
        del self._shares[entry.holder].unpinned[entry.address]

    def victim(self, now: float, holder: str = "", pages: int = 0) -> Entry | None:
        """Return the entry to evict next for `pages` more of `holder`, or None if there is none."""
        writer = self._name(holder)
        oldest: Entry | None = None
        largest: Entry | None = None
        most = 0
        for name, share in self._shares.items():
            entry = next(iter(share.unpinned.values()), None)
            if entry is None:
                continue
            if oldest is None or entry.used_s < oldest.used_s:
                oldest = entry
            held = share.pages + pages if name == writer else share.pages
            if held > most:
                most, largest = held, entry
        return oldest if oldest is not None and now - oldest.used_s > UNUSED_S else largest

    def _name(self, holder: str) -> str:
        return holder if holder in self._shares or len(self._shares) < MAX_HOLDERS else ""
