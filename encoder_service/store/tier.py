"""One tier of the store: its pages, and the embeddings in them.

`eviction.py` says which embedding is evicted next. Pinned embeddings are never evicted. Not thread-safe: the store
calls every method with its lock held.
"""

import time
from array import array
from collections.abc import Iterator
from typing import Literal, NamedTuple

from encoder_contract.arena import Arena, Run
from encoder_contract.extents import Extent, View, views
from encoder_contract.geometry import Grid
from encoder_service.store.eviction import EvictionOrder, Item

SPARE = 0.06
"""Share of an arena that is left unused to keep embeddings contiguous: an embedding is split into several runs only if
this share would still be free afterwards.

With random sizes, 80 % of the embeddings then lie in one run, which a client can view in place, instead of 49 %.
"""
MAX_RUNS = 4
"""Most runs of an embedding, as long as evicting others could make room for a single run."""

TierName = Literal["device", "host"]
AnyTier = Literal["device", "host", "disk"]


class PageLayout(NamedTuple):
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


class Entry(Item):
    """One embedding in one tier. `pins` counts its readers, and, until it is complete, its writer."""

    __slots__ = (
        "address",
        "checksum",
        "device_readers",
        "generation",
        "grid",
        "pages",
        "pins",
        "runs",
        "tier",
        "tokens",
    )

    def __init__(self, tier: "Tier", address: bytes, tokens: int, grid: Grid, runs: tuple[Run, ...]) -> None:
        self.tier = tier
        self.address = address
        self.tokens = tokens
        self.pages = tier.layout.pages(tokens)
        super().__init__(address, self.pages)
        self.grid = grid
        self.runs = runs
        self.pins = 1
        self.device_readers = 0
        self.generation = 0
        self.checksum: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows."""
        return self.tokens * self.tier.layout.row_bytes

    def extents(self, begin: int, end: int) -> Iterator[Extent]:
        """Yield (offset in the arena, length), in bytes, of the rows [begin, end), in order."""
        row_bytes, page_bytes = self.tier.layout.row_bytes, self.tier.layout.page_bytes
        first, last = begin * row_bytes, end * row_bytes  # byte range within the embedding
        run_begin = 0
        for page, pages in self.runs:
            length = pages * page_bytes
            low, high = max(first - run_begin, 0), min(last - run_begin, length)
            if low < high:
                yield page * page_bytes + low, high - low
            run_begin += length


class Tier:
    """The arena, memory and entries of one tier. The device tier and the host tier differ only in their memory.

    Only `pieces` may be called without the store's lock: a pin keeps the bytes in place.
    """

    def __init__(
        self,
        name: TierName,
        memory: View,
        layout: PageLayout,
        generations: "memoryview[int] | None" = None,
        shared_as: bytes = b"",
    ) -> None:
        """Divide `memory` (flat bytes) into pages. `generations` has one item per page: see `Segment`.

        `shared_as` is the name by which other processes open the memory; empty for the segment's own memory.
        """
        pages = len(memory) // layout.page_bytes
        self.name = name
        self.memory = memory
        self.layout = layout
        self.shared_as = shared_as
        self.arena = Arena(pages)
        self.entries: dict[bytes, Entry] = {}
        self.order: EvictionOrder[Entry] = EvictionOrder(pages)
        self._spare_pages = int(pages * SPARE)
        self.hits = 0
        self.evictions = 0
        self.writes = 0
        self.evictable_pages = 0
        self.pinned_pages = 0
        self.pins = 0
        self._generations = memoryview(array("Q", bytes(8 * pages))) if generations is None else generations
        self._last_generation = 0

    @property
    def is_shared(self) -> bool:
        """Whether other processes can open the memory."""
        return self.name == "host" or bool(self.shared_as)

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
        entry = Entry(self, address, tokens, grid, runs)
        self.order.admit(entry, holder)
        return entry

    def make_room(self, address: bytes, tokens: int, holder: str = "") -> Iterator[Entry]:
        """Drop embeddings one by one, in the eviction order, for a new one of `holder`; yield each.

        Drops nothing if even dropping everything unpinned would not free enough pages.
        """
        pages, now = self.layout.pages(tokens), time.monotonic()
        while self.arena.free_pages + self.evictable_pages >= pages:
            victim = self.order.victim(now, holder, pages, key=address)
            if victim is None:
                return
            self.order.dropped(victim)
            self.drop(victim)
            yield victim

    def use(self, entry: Entry) -> None:
        """Count that a request used a pinned embedding."""
        self.hits += 1
        self.order.use(entry, time.monotonic())

    def touch(self, entry: Entry) -> None:
        """Count that a request used an embedding, of which it reads no row of this tier."""
        if not entry.pins:
            self.order.remove(entry)
        self.order.use(entry, time.monotonic())
        if not entry.pins:
            self.order.add(entry)

    def release(self, entry: Entry) -> None:
        """Free the pages of an embedding that was dropped, or reserved and not committed."""
        self.arena.free(entry.runs)
        self.order.release(entry)

    def commit(self, entry: Entry) -> None:
        """Make a completely written embedding visible. The writer's pin becomes the first reader's pin."""
        assert entry.address not in self.entries
        self._last_generation += 1
        entry.generation = self._last_generation
        self._generations[entry.runs[0][0]] = entry.generation
        self.entries[entry.address] = entry
        self.writes += 1
        self.pins += entry.pins
        self.pinned_pages += entry.pages
        if not entry.uses:  # else a copy from another tier
            self.order.use(entry, time.monotonic())

    def pin(self, entry: Entry) -> None:
        """Keep an embedding in place until `unpin`."""
        if not entry.pins:
            self.order.remove(entry)
            self.evictable_pages -= entry.pages
            self.pinned_pages += entry.pages
        entry.pins += 1
        self.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`. The last one makes the embedding evictable, as the most recently used of its class."""
        entry.pins -= 1
        self.pins -= 1
        assert entry.pins >= 0
        if not entry.pins:
            self.order.add(entry)
            self.evictable_pages += entry.pages
            self.pinned_pages -= entry.pages

    def drop(self, entry: Entry) -> None:
        """Drop an unpinned embedding. Clear its generation first, so that readers with a stale handle notice."""
        assert not entry.pins
        self.order.remove(entry)
        self.evictable_pages -= entry.pages
        del self.entries[entry.address]
        self._generations[entry.runs[0][0]] = 0
        self.release(entry)
        self.evictions += 1

    def pieces(self, entry: Entry) -> list[View]:
        """Return the entry's bytes, in order, without a copy."""
        return views(self.memory, entry.extents(0, entry.tokens))
