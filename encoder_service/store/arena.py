"""One tier of the store: its pages, the embeddings in them, the share of each holder, and the eviction order.

Eviction takes the least recently used embedding of the holder with the most pages. Pinned embeddings are never evicted.
Not thread-safe: the store calls every method with its lock held.
"""

import time
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import Tensor

from encoder_contract.geometry import Grid

SPARE = 0.06
"""Share of an arena that is left unused to keep embeddings contiguous: an embedding is split into several runs only if
this share would still be free afterwards.

With random sizes, 80 % of the embeddings then lie in one run, which a client can view in place, instead of 49 %.
"""
MAX_RUNS = 4
"""Most runs of an embedding, as long as evicting others could make room for a single run."""

TierName = Literal["device", "host"]
Run = tuple[int, int]
"""(first page, number of pages)."""

_START_BITS = 32

MAX_HOLDERS = 64
"""Most holders with a share of their own. All further holders count against one common share, because each eviction
walks all shares."""
UNUSED_S = 600.0
"""Entries unused for this long are evicted first, so that a holder that has left does not keep its share."""


class Arena:
    """Allocates page numbers by best fit, and never touches the pages' contents.

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
    """How rows are laid out in pages. A page holds a whole number of rows; an embedding wastes less than one page."""

    row_bytes: int
    page_rows: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.row_bytes * self.page_rows

    def pages(self, tokens: int) -> int:
        """Return how many pages an embedding of `tokens` rows takes."""
        return -(-tokens // self.page_rows)


class Share:
    """The pages and the evictable entries of one holder in a tier."""

    __slots__ = ("name", "pages", "unpinned")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages = 0
        self.unpinned: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first


class Entry:
    """One embedding in one tier. `pins` counts its readers, and, until it is complete, its writer."""

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
        self.used_s = 0.0  # monotonic time at which its last pin was released
        self.pins = 1
        self.hits = 0
        self.device_readers = 0
        self.generation = 0
        self.checksum: int | None = None

    @property
    def holder(self) -> str:
        """The holder whose share its pages count against."""
        return self.share.name

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows."""
        return self.tokens * self.tier.layout.row_bytes

    def extents(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (offset in the arena, length), in bytes, of the rows [begin, end), in order."""
        layout = self.tier.layout
        first, last = begin * layout.row_bytes, end * layout.row_bytes  # byte range within the embedding
        run_begin = 0
        for page, pages in self.runs:
            length = pages * layout.page_bytes
            low, high = max(first - run_begin, 0), min(last - run_begin, length)
            if low < high:
                yield page * layout.page_bytes + low, high - low
            run_begin += length


class EvictionOrder:
    """Each holder's share of a tier's pages, and the order in which entries are evicted.

    While pages are free, one holder may take them all. Once none are free, the holder with the most pages makes room,
    so holders that keep writing end up with equal shares. A pinned entry is not in the order. Releasing its last pin
    adds it as its holder's most recently used entry, so finding a victim takes equally long however much is pinned.
    """

    def __init__(self) -> None:
        self.shares: dict[str, Share] = {}  # by name; "" is the common one

    def reserve(self, holder: str, pages: int) -> Share:
        """Add `pages` to the share of `holder`, or to the common share; return that share."""
        name = self._name(holder)
        share = self.shares.get(name)
        if share is None:
            share = self.shares[name] = Share(name)
        share.pages += pages
        return share

    def release(self, share: Share, pages: int) -> None:
        """Undo a `reserve` that returned `share`."""
        share.pages -= pages
        if not share.pages:
            del self.shares[share.name]

    def add(self, entry: Entry, now: float) -> None:
        """Make an entry evictable, as its holder's most recently used one."""
        entry.used_s = now
        entry.share.unpinned[entry.address] = entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is pinned or dropped."""
        del entry.share.unpinned[entry.address]

    def victim(self, now: float, holder: str = "", pages: int = 0) -> Entry | None:
        """Return the entry to evict so that `holder` can have `pages` more; None if every entry is pinned."""
        writer = self._name(holder)
        oldest: Entry | None = None
        largest: Entry | None = None
        most = 0
        for name, share in self.shares.items():
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
        return holder if holder in self.shares or len(self.shares) < MAX_HOLDERS else ""


class Tier:
    """The arena, memory and entries of one tier. The device tier and the host tier differ only in their memory.

    Only `pieces` may be called without the store's lock: a pin keeps the bytes in place.
    """

    def __init__(
        self,
        name: TierName,
        memory: Tensor,
        layout: Layout,
        generations: "memoryview[int] | None" = None,
        shared_as: bytes = b"",
    ) -> None:
        """Divide `memory` (flat uint8) into pages. `generations` has one item per page: see `Segment`.

        `shared_as` is the name by which other processes open the memory; empty for the segment's own memory.
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
        """Reserve free pages for an embedding of `holder`, which no reader sees until `commit`.

        Return None if another embedding must be evicted first.
        """
        pages, arena = self.layout.pages(tokens), self.arena
        runs = arena.allocate(pages, max_runs=1)
        if runs is None and arena.free_pages >= pages + self._spare_pages:
            runs = arena.allocate(pages, MAX_RUNS)
        if runs is None and not self.evictable_pages:
            # There is nothing to evict: accept any number of runs.
            runs = arena.allocate(pages, arena.free_runs)
        if runs is None:
            return None
        return Entry(self, address, tokens, grid, runs, self.order.reserve(holder, pages))

    def make_room(self, tokens: int, holder: str = "") -> Iterator[Entry]:
        """Drop embeddings one by one, in the eviction order, for a new one of `holder`; yield each.

        Drops nothing if even dropping everything unpinned would not free enough pages.
        """
        pages, now = self.layout.pages(tokens), time.monotonic()
        while self.arena.free_pages + self.evictable_pages >= pages:
            victim = self.order.victim(now, holder, pages)
            if victim is None:
                return
            self.drop(victim)
            yield victim

    def touch(self, entry: Entry) -> None:
        """Make an embedding its holder's most recently used one."""
        if not entry.pins:
            self.order.remove(entry)
            self.order.add(entry, time.monotonic())

    def release(self, entry: Entry) -> None:
        """Free the pages of an embedding that was dropped, or reserved and not committed."""
        self.arena.free(entry.runs)
        self.order.release(entry.share, entry.pages)

    def commit(self, entry: Entry) -> None:
        """Make a completely written embedding visible. The writer's pin becomes the first reader's pin."""
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
        """Undo one `pin`. The last one makes the embedding evictable, as its holder's most recently used."""
        entry.pins -= 1
        assert entry.pins >= 0
        if not entry.pins:
            self.order.add(entry, time.monotonic())
            self.evictable_pages += entry.pages

    def drop(self, entry: Entry) -> None:
        """Drop an unpinned embedding. Clear its generation first, so that readers with a stale handle notice."""
        assert not entry.pins
        self.order.remove(entry)
        self.evictable_pages -= entry.pages
        del self.entries[entry.address]
        self._generations[entry.runs[0][0]] = 0
        self.release(entry)
        self.evictions += 1

    def pieces(self, entry: Entry) -> list[Tensor]:
        """Return the entry's bytes as flat uint8 tensors, in order, without a copy."""
        return [self.memory[offset : offset + length] for offset, length in entry.extents(0, entry.tokens)]
