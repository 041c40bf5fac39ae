"""Which parts of a memory are free: pages of the store, or bytes of an engine's host memory."""

from bisect import bisect_left, insort
from collections.abc import Iterable

Run = tuple[int, int]
"""(first page, number of pages)."""

_START_BITS = 48  # all bytes that a process can address


class Arena:
    """Allocates page numbers by best fit, and never touches the pages' contents. Not thread-safe.

    `free` merges adjacent free runs. The free runs are one sorted list of integers (length in the high bits, start in
    the low bits), so best fit is a bisection, and a free run costs no object beyond two dictionary entries.
    """

    def __init__(self, pages: int) -> None:
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
        """Allocate `pages` pages; return their runs, or None if they do not fit.

        Takes the shortest run that is long enough. If there is none, takes up to `max_runs` of the longest runs.
        """
        assert pages > 0
        if pages > self.free_pages:
            return None
        if self.largest_free_run < pages:
            longest = self._by_length[-max_runs:]
            if sum(run >> _START_BITS for run in longest) < pages:
                return None
        allocated: list[Run] = []
        while pages:
            place = bisect_left(self._by_length, pages << _START_BITS)
            run = self._by_length[min(place, len(self._by_length) - 1)]
            length, start = run >> _START_BITS, run & ((1 << _START_BITS) - 1)
            count = min(length, pages)
            self._remove(start, length)
            if count < length:
                self._add(start + count, length - count)
            allocated.append((start, count))
            pages -= count
        return tuple(allocated)

    def free(self, runs: Iterable[Run]) -> None:
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
