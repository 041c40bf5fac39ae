"""A tier: one arena and the embeddings in it. Device and host differ only in their memory."""

from array import array
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from encoder_service.store.arena import Arena, Run
from encoder_service.store.eviction import LeastRecentlyUsed

SPARE = 0.06
"""Share of an arena given up for contiguity: an embedding is split only if that much more than it needs is free.

With random sizes, 80 % of the embeddings are then in one run, which a client can view in place, instead of 49 %.
"""
MAX_RUNS = 4
"""Most runs of an embedding that is split although other entries could be evicted."""

TierName = Literal["device", "host"]
Grid = tuple[int, int, int]


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


class Entry:
    """One embedding in one tier. `pins` counts its readers, and its writer until it is complete."""

    __slots__ = (
        "address",
        "checksum",
        "device_readers",
        "generation",
        "grid",
        "hits",
        "pins",
        "runs",
        "tier",
        "tokens",
    )

    def __init__(self, tier: "Tier", address: bytes, tokens: int, grid: Grid, runs: tuple[Run, ...]) -> None:
        self.tier = tier
        self.address = address
        self.tokens = tokens
        self.grid = grid
        self.runs = runs
        self.pins = 1
        self.hits = 0
        self.device_readers = 0
        self.generation = 0
        self.checksum: int | None = None

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


class Tier:
    """Arena, memory and entries of one tier. Not thread-safe: call every method with the store's lock held.

    The only exception is `pieces`, whose bytes a pin keeps in place.
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
        self.unpinned: LeastRecentlyUsed[Entry] = LeastRecentlyUsed()
        self._spare_pages = int(pages * SPARE)
        self.hits = 0
        self.evictions = 0
        self.writes = 0
        self.evictable_pages = 0
        self._generations = memoryview(array("Q", bytes(8 * pages))) if generations is None else generations
        self._last_generation = 0

    def reserve(self, address: bytes, tokens: int, grid: Grid) -> Entry | None:
        """Reserve free pages for an embedding, invisible until `commit`. None if another must be evicted first."""
        pages, arena = self.layout.pages(tokens), self.arena
        runs = arena.allocate(pages, max_runs=1)
        if runs is None and arena.free_pages >= pages + self._spare_pages:
            runs = arena.allocate(pages, MAX_RUNS)
        if runs is None and not len(self.unpinned):
            runs = arena.allocate(pages, arena.free_runs)  # nothing can be evicted: accept any number of runs
        return None if runs is None else Entry(self, address, tokens, grid, runs)

    def make_room(self, tokens: int) -> Iterator[bytes]:
        """Drop the least recently used embedding, then the next, and yield their addresses.

        Ends at once if dropping everything that is not pinned would not free enough pages.
        """
        while self.arena.free_pages + self.evictable_pages >= self.layout.pages(tokens):
            victim = self.unpinned.victim()
            if victim is None:
                return
            self.drop(victim)
            yield victim.address

    def touch(self, entry: Entry) -> None:
        """Make an embedding the most recently used one."""
        if not entry.pins:
            self.unpinned.remove(entry.address)
            self.unpinned.add(entry.address, entry)

    def abandon(self, entry: Entry) -> None:
        """Free the pages of a `reserve` that was not committed."""
        self.arena.free(entry.runs)

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
            self.unpinned.remove(entry.address)
            self.evictable_pages -= self._pages(entry)
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`; the last one makes the embedding the most recently used."""
        entry.pins -= 1
        assert entry.pins >= 0
        if not entry.pins:
            self.unpinned.add(entry.address, entry)
            self.evictable_pages += self._pages(entry)

    def drop(self, entry: Entry) -> None:
        """Drop an unpinned embedding. Its generation is cleared first, so that readers of stale handles notice."""
        assert not entry.pins
        self.unpinned.remove(entry.address)
        self.evictable_pages -= self._pages(entry)
        del self.entries[entry.address]
        self._generations[entry.runs[0][0]] = 0
        self.arena.free(entry.runs)
        self.evictions += 1

    def pieces(self, entry: Entry) -> list[Tensor]:
        """Return the entry's bytes as flat uint8 tensors, in order, viewed in place."""
        return [self.memory[offset : offset + length] for offset, length in entry.extents(0, entry.tokens)]

    def _pages(self, entry: Entry) -> int:
        return self.layout.pages(entry.tokens)


def copy_bytes(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy flat uint8 tensors into others of the same total length but different boundaries, and wait for completion.

    Between a GPU and registered host memory, pieces are copied asynchronously and synchronised once. The sources
    must be ready on the calling thread's current stream.
    """
    streams = set()
    rest = iter(sources)
    source = next(rest)
    for target in targets:
        filled = 0
        while filled < target.numel():
            if not source.numel():
                source = next(rest)
            count = min(target.numel() - filled, source.numel())
            target[filled : filled + count].copy_(source[:count], non_blocking=True)
            streams |= {piece.device for piece in (source, target) if piece.is_cuda}
            source = source[count:]
            filled += count
    for device in streams:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()  # takes no core meanwhile, as waiting for the stream would
