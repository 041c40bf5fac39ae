"""The space of a tier: which pages are free, which run of them an embedding gets, and which entry is evicted next.

The least recently used entry is evicted, never one that is pinned.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Generic, TypeVar

Run = tuple[int, int]
"""(first page, number of pages)."""

_START_BITS = 32


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


Entry = TypeVar("Entry")


class LeastRecentlyUsed(Generic[Entry]):
    """The eviction order of the entries that may be evicted.

    An entry leaves the order while it is pinned, and returns as the most recently used when its last pin is
    released, so finding a victim takes constant time however much is pinned.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._order: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, address: bytes, entry: Entry) -> None:
        """Make an entry evictable, as the most recently used one."""
        assert address not in self._order
        self._order[address] = entry

    def remove(self, address: bytes) -> None:
        """Remove an entry from the order: it is pinned or dropped."""
        del self._order[address]

    def victim(self) -> Entry | None:
        """Return the entry to evict next, or None if there is none."""
        return next(iter(self._order.values()), None)
