"""The space of one tier: its pages, the embeddings in them, whose they are, and which of them is evicted next.

That is the least recently used one of the holder with the most pages, and never one that is pinned. Nothing here locks:
the store calls every method with its lock held.
"""

import time
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import Tensor

SPARE = 0.06
"""Share of an arena given up for contiguity: an embedding is split only if that much more than it needs is free.

With random sizes, 80 % of the embeddings are then in one run, which a client can view in place, instead of 49 %.
"""
MAX_RUNS = 4
"""Most runs of an embedding that is split although other entries could be evicted."""

TierName = Literal["device", "host"]
Grid = tuple[int, int, int]
Run = tuple[int, int]
"""(first page, number of pages)."""

_START_BITS = 32

MAX_HOLDERS = 64
"""Holders that are told apart. The rows of all others count against one share: an eviction looks at every share."""
UNUSED_S = 600.0
"""An entry that has been unused for this long is evicted before others: a holder that left does not keep its share."""


class Arena:
    """Allocates pages by number; does not touch their contents.

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


class Layout(NamedTuple):
    """How rows are laid out in pages. A page is a whole number of rows, so an embedding wastes less than one page."""

    row_bytes: int
    page_rows: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.row_bytes * self.page_rows

    def pages(self, tokens: int) -> int:
        """Return the pages that an embedding of `tokens` rows takes."""
        return -(-tokens // self.page_rows)


class Share:
    """What one holder has in a tier."""

    __slots__ = ("name", "pages", "unpinned")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages = 0
        self.unpinned: OrderedDict[bytes, Entry] = OrderedDict()  # the least recently used first


class Entry:
    """One embedding in one tier. `pins` counts its readers, and its writer until it is complete."""

    __slots__ = (
        "address",
        "checksum",
        "device_readers",
        "generation",
        "grid",
        "hits",
        "pages",
        "pins",
        "runs",
        "share",
        "tier",
        "tokens",
        "used_s",
    )

    def __init__(
        self, tier: "Tier", address: bytes, tokens: int, grid: Grid, runs: tuple[Run, ...], share: Share
    ) -> None:
        self.tier = tier
        self.address = address
        self.tokens = tokens
        self.pages = tier.layout.pages(tokens)
        self.grid = grid
        self.runs = runs
        self.share = share
        self.used_s = 0.0  # when its last pin was released, monotonic
        self.pins = 1
        self.hits = 0
        self.device_readers = 0
        self.generation = 0
        self.checksum: int | None = None

    @property
    def holder(self) -> str:
        """The name that its pages count under."""
        return self.share.name

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows."""
        return self.tokens * self.tier.layout.row_bytes

    def extents(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (offset in the arena, length), bytes, of the rows [begin, end), in order."""
        layout = self.tier.layout
        first, last = begin * layout.row_bytes, end * layout.row_bytes  # of the window, in the embedding
        reached = 0
        for page, pages in self.runs:
            length = pages * layout.page_bytes
            low, high = max(first - reached, 0), min(last - reached, length)
            if low < high:
                yield page * layout.page_bytes + low, high - low
            reached += length


class EvictionOrder:
    """The pages of each holder, and the order of the entries that may be evicted.

    While pages are free, a holder may take all of them. Then the holder with the most makes room, so that holders that
    always want more have equal shares. An entry leaves the order while it is pinned, and returns as the most recently
    used of its holder when its last pin is released, so finding a victim takes the same time however much is pinned.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._shares: dict[str, Share] = {}

    def __len__(self) -> int:
        """Return the number of shares."""
        return len(self._shares)

    def pages(self, holder: str) -> int:
        """Return how many pages count against `holder`."""
        share = self._shares.get(self._name(holder))
        return 0 if share is None else share.pages

    def reserve(self, holder: str, pages: int) -> Share:
        """Count `pages` more against `holder`; return the share they count in: its own, or that of all others."""
        name = self._name(holder)
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name)
        share.pages += pages
        return share

    def release(self, share: Share, pages: int) -> None:
        """Undo a `reserve` that returned `share`."""
        share.pages -= pages
        if not share.pages:
            del self._shares[share.name]

    def add(self, entry: Entry, now: float) -> None:
        """Make an entry evictable, as the one of its holder that was used most recently: `now`."""
        entry.used_s = now
        entry.share.unpinned[entry.address] = entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry from the order: it is pinned or dropped."""
        del entry.share.unpinned[entry.address]

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


class Tier:
    """Arena, memory and entries of one tier; device and host differ only in their memory.

    `pieces` alone may be called without the store's lock: a pin keeps their bytes in place.
    """

    def __init__(
        self,
        name: TierName,
        memory: Tensor,
        layout: Layout,
        generations: "memoryview[int] | None" = None,
        shared_as: bytes = b"",
    ) -> None:
        """Divide `memory` (flat uint8) into pages; `generations` has one item per page, see `Segment`.

        `shared_as` is the name by which others open the memory, if it is not the segment's.
        """
        pages = memory.numel() // layout.page_bytes
        self.name = name
        self.memory = memory
        self.layout = layout
        self.shared_as = shared_as
        self.arena = Arena(pages)
        self.entries: dict[bytes, Entry] = {}
        self.order = EvictionOrder()
        self._spare_pages = int(pages * SPARE)
        self.hits = 0
        self.evictions = 0
        self.writes = 0
        self.evictable_pages = 0
        self._generations = memoryview(array("Q", bytes(8 * pages))) if generations is None else generations
        self._last_generation = 0

    def reserve(self, address: bytes, tokens: int, grid: Grid, holder: str = "") -> Entry | None:
        """Reserve free pages for an embedding of `holder`, invisible until `commit`.

        None if another must be evicted first.
        """
        pages, arena = self.layout.pages(tokens), self.arena
        runs = arena.allocate(pages, max_runs=1)
        if runs is None and arena.free_pages >= pages + self._spare_pages:
            runs = arena.allocate(pages, MAX_RUNS)
        if runs is None and not self.evictable_pages:
            runs = arena.allocate(pages, arena.free_runs)  # nothing can be evicted: accept any number of runs
        if runs is None:
            return None
        return Entry(self, address, tokens, grid, runs, self.order.reserve(holder, pages))

    def make_room(self, tokens: int, holder: str = "") -> Iterator[Entry]:
        """Drop embeddings in the eviction order for one of `holder`, one after the other, and yield them.

        Ends at once if dropping everything that is not pinned would not free enough pages.
        """
        pages, now = self.layout.pages(tokens), time.monotonic()
        while self.arena.free_pages + self.evictable_pages >= pages:
            victim = self.order.victim(now, holder, pages)
            if victim is None:
                return
            self.drop(victim)
            yield victim

    def touch(self, entry: Entry) -> None:
        """Make an embedding the most recently used one."""
        if not entry.pins:
            self.order.remove(entry)
            self.order.add(entry, time.monotonic())

    def release(self, entry: Entry) -> None:
        """Free the pages of an embedding: one that was reserved and not committed, or one that is dropped."""
        self.arena.free(entry.runs)
        self.order.release(entry.share, entry.pages)

    def commit(self, entry: Entry) -> None:
        """Make a completely written embedding visible; its writer's pin becomes the first reader's."""
        assert entry.address not in self.entries
        self._last_generation += 1
        entry.generation = self._last_generation
        self._generations[entry.runs[0][0]] = entry.generation
        self.entries[entry.address] = entry
        self.writes += 1

    def pin(self, entry: Entry) -> None:
        """Keep an embedding in place until `unpin`."""
        if not entry.pins:
            self.order.remove(entry)
            self.evictable_pages -= entry.pages
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`; the last one makes the embedding the most recently used."""
        entry.pins -= 1
        assert entry.pins >= 0
        if not entry.pins:
            self.order.add(entry, time.monotonic())
            self.evictable_pages += entry.pages

    def drop(self, entry: Entry) -> None:
        """Drop an unpinned embedding. Its generation is cleared first, so that readers of stale handles notice."""
        assert not entry.pins
        self.order.remove(entry)
        self.evictable_pages -= entry.pages
        del self.entries[entry.address]
        self._generations[entry.runs[0][0]] = 0
        self.release(entry)
        self.evictions += 1

    def pieces(self, entry: Entry) -> list[Tensor]:
        """Return the entry's bytes as flat uint8 tensors, in order, viewed in place."""
        return [self.memory[offset : offset + length] for offset, length in entry.extents(0, entry.tokens)]
