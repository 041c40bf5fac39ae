"""The entry table: where each embedding is, and who reads and writes it, under the store's one short lock.

Bytes are copied outside the lock, into pages that no reader can see yet. An address is written by one thread at a time:
other writers wait for it and then find the embedding held. A `Tier` is one arena and the embeddings in it; device and
host differ only in their memory.
"""

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from encoder_contract.errors import OverloadedError
from encoder_service.store.arena import Arena, EvictionOrder, Run

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
        "holder",
        "pins",
        "runs",
        "tier",
        "tokens",
        "used_s",
    )

    def __init__(
        self, tier: "Tier", address: bytes, tokens: int, grid: Grid, runs: tuple[Run, ...], holder: str
    ) -> None:
        self.tier = tier
        self.address = address
        self.tokens = tokens
        self.grid = grid
        self.runs = runs
        self.holder = holder
        self.used_s = 0.0  # when its last pin was released, monotonic
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
        self.order: EvictionOrder[Entry] = EvictionOrder()
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
        return Entry(self, address, tokens, grid, runs, self.order.take(holder, pages))

    def make_room(self, tokens: int, holder: str = "") -> Iterator[bytes]:
        """Drop embeddings in the eviction order for one of `holder`, one after the other, and yield their addresses.

        Ends at once if dropping everything that is not pinned would not free enough pages.
        """
        pages, now = self.layout.pages(tokens), time.monotonic()
        while self.arena.free_pages + self.evictable_pages >= pages:
            victim = self.order.victim(now, holder, pages)
            if victim is None:
                return
            self.drop(victim)
            yield victim.address

    def touch(self, entry: Entry) -> None:
        """Make an embedding the most recently used one."""
        if not entry.pins:
            self.order.remove(entry)
            self.order.add(entry, time.monotonic())

    def abandon(self, entry: Entry) -> None:
        """Free the pages of a `reserve` that was not committed."""
        self.arena.free(entry.runs)
        self.order.give_back(entry.holder, self._pages(entry))

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
            self.evictable_pages -= self._pages(entry)
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`; the last one makes the embedding the most recently used."""
        entry.pins -= 1
        assert entry.pins >= 0
        if not entry.pins:
            self.order.add(entry, time.monotonic())
            self.evictable_pages += self._pages(entry)

    def drop(self, entry: Entry) -> None:
        """Drop an unpinned embedding. Its generation is cleared first, so that readers of stale handles notice."""
        assert not entry.pins
        self.order.remove(entry)
        self.evictable_pages -= self._pages(entry)
        del self.entries[entry.address]
        self._generations[entry.runs[0][0]] = 0
        self.arena.free(entry.runs)
        self.order.give_back(entry.holder, self._pages(entry))
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
        copied.synchronize()  # uses no core while it waits, unlike waiting for the stream


_NAP_S = 0.05
"""Longest sleep of a waiter: pins released by the garbage collector do not notify waiters."""


class EntryTable:
    """Thread-safe. `tiers` are in the order in which readers prefer them: the host, then the device."""

    def __init__(self, tiers: Sequence[Tier], on_evict: Callable[[bytes, TierName], None] | None) -> None:
        """Start with empty tiers; `on_evict` is called without the lock with each (address, tier) dropped."""
        self.tiers = tiers
        self.host = tiers[0]
        self.misses = 0
        self.waits = 0
        self.refusals = 0
        self._on_evict = on_evict
        self._turn = threading.Condition(threading.Lock())
        self._writing: set[bytes] = set()
        self._forgotten: deque[Entry] = deque()
        self._promised_pages = 0
        self._wanting_since: float | None = None  # since when there has been no space for `_wanting_pages`
        self._wanting_pages = 0

    def lookup(self, address: bytes) -> Entry | None:
        """Return the preferred copy of an embedding, pinned and counted as a hit; other copies count as used."""
        found = None
        with self._turn:
            self._settle()
            for tier in self.tiers:
                entry = tier.entries.get(address)
                if entry is None:
                    continue
                if found is None:
                    found = entry
                    tier.pin(entry)
                    tier.hits += 1
                    entry.hits += 1
                else:
                    tier.touch(entry)
            self.misses += found is None
        return found

    def tier_of(self, address: bytes) -> TierName | None:
        """Return the tier that `lookup` would find; counts no hit."""
        with self._turn:
            return next((tier.name for tier in self.tiers if address in tier.entries), None)

    def grids(self) -> dict[bytes, Grid]:
        """Return address and grid of every embedding, in any tier."""
        with self._turn:
            return {address: entry.grid for tier in self.tiers for address, entry in tier.entries.items()}

    def claim(self, address: bytes, tiers: Collection[Tier], deadline: float) -> Entry | None:
        """Return the embedding, pinned, if one of `tiers` holds it; else None, and the caller is its writer.

        Waits for another writer of the same address, until `deadline` (monotonic): then `OverloadedError`.
        """
        with self._turn:
            while True:
                self._settle()
                for tier in tiers:
                    if (entry := tier.entries.get(address)) is not None:
                        tier.pin(entry)
                        return entry
                if address not in self._writing:
                    self._writing.add(address)
                    return None
                self._wait(deadline)

    def unclaim(self, address: bytes) -> None:
        """End a `claim`, whether or not the embedding was written."""
        with self._turn:
            self._writing.discard(address)
            self._turn.notify_all()

    def reserve_free(
        self, tier: Tier, address: bytes, tokens: int, grid: Grid, holder: str, *, promised: bool
    ) -> Entry | None:
        """Reserve pages that are free now; None if there are too few. `promised` as in `reserve`."""
        with self._turn:
            has_room = promised or self._with_room([tier.layout.pages(tokens)])
            return tier.reserve(address, tokens, grid, holder) if has_room else None

    def reserve(
        self,
        tier: Tier,
        address: bytes,
        tokens: int,
        grid: Grid,
        holder: str,
        deadline: float,
        *,
        promised: bool = False,
    ) -> Entry:
        """Reserve pages, evicting other entries; wait while too much is pinned or promised to others.

        `promised` are pages of the caller's own `promise`. Raises `OverloadedError` at `deadline` (monotonic).
        """
        dropped: list[bytes] = []
        try:
            with self._turn:
                while True:
                    self._settle()
                    if promised or self._with_room([tier.layout.pages(tokens)]):
                        entry = tier.reserve(address, tokens, grid, holder)
                        room = tier.make_room(tokens, holder)
                        while entry is None and (victim := next(room, None)) is not None:
                            dropped.append(victim)
                            entry = tier.reserve(address, tokens, grid, holder)
                        if entry is not None:
                            return entry
                    self._wait(deadline)
        finally:
            self.tell_dropped((address, tier.name) for address in dropped)

    def promise(self, pages: Sequence[int], wait_s: float | None) -> int:
        """Reserve pages for embeddings about to be written; return how many of them, from the first on, fit.

        Waits while not even the first fits. Once space of that size has been lacking for `wait_s`, for any caller who
        waits, raises `OverloadedError`; later callers get it at once. Without `wait_s` it returns 0 instead.
        """
        with self._turn:
            self._settle()
            while not (count := self._with_room(pages)) and wait_s is not None:
                if self._wanting_since is None or pages[0] < self._wanting_pages:
                    self._wanting_since, self._wanting_pages = time.monotonic(), pages[0]
                self._wait(self._wanting_since + wait_s)
                self._settle()
            self._promised_pages += sum(pages[:count])
            return count

    def unpromise(self, pages: int) -> None:
        """Undo `promise` for one embedding."""
        with self._turn:
            self._promised_pages -= pages
            self._released()

    def fill(self, entry: Entry, sources: Iterable[Tensor]) -> Entry:
        """Copy the embedding's bytes into its reserved pages and make it visible; it stays pinned once."""
        try:
            copy_bytes(entry.tier.pieces(entry), sources)
        except BaseException:  # any error: pages that stay reserved are lost
            self.abandon(entry)
            raise
        self.commit(entry)
        return entry

    def commit(self, entry: Entry) -> None:
        """Make a reserved entry visible whose bytes are written; it stays pinned once."""
        with self._turn:
            entry.tier.commit(entry)

    def abandon(self, entry: Entry) -> None:
        """Free the pages of a reserved entry whose bytes will not be complete."""
        with self._turn:
            entry.tier.abandon(entry)
            self._released()

    def copy(self, entry: Entry, tier: Tier, deadline: float) -> Entry:
        """Return a pinned copy of a pinned entry in another tier, made now if there is none."""
        held = self.claim(entry.address, (tier,), deadline)
        if held is not None:
            return held
        try:
            target = self.reserve(tier, entry.address, entry.tokens, entry.grid, entry.holder, deadline)
            return self.fill(target, entry.tier.pieces(entry))
        finally:
            self.unclaim(entry.address)

    def copy_if_free(self, entry: Entry, tier: Tier) -> Entry | None:
        """Return a new pinned copy of a pinned entry in pages of another tier that are free now.

        None, without waiting, if there are too few, or if the tier has a copy already.
        """
        with self._turn:
            if entry.address in self._writing or entry.address in tier.entries:
                return None
            target = tier.reserve(entry.address, entry.tokens, entry.grid, entry.holder)
            if target is None:
                return None
            self._writing.add(entry.address)
        try:
            return self.fill(target, entry.tier.pieces(entry))
        finally:
            self.unclaim(entry.address)

    def pin_in(self, tier: Tier, address: bytes) -> Entry | None:
        """Return the copy in `tier`, pinned, or None; not counted as a hit."""
        with self._turn:
            entry = tier.entries.get(address)
            if entry is not None:
                tier.pin(entry)
            return entry

    def unpin(self, entry: Entry) -> None:
        """Undo one pin."""
        with self._turn:
            entry.tier.unpin(entry)
            self._released()

    def unpin_later(self, entry: Entry) -> None:
        """Undo one pin at the next call. For the garbage collector, which may run while the lock is held."""
        self._forgotten.append(entry)

    def pin_victim(self, tier: Tier, free_pages: int) -> Entry | None:
        """Return, pinned, the entry that should leave `tier` next if fewer than `free_pages` pages are free."""
        with self._turn:
            self._settle()
            entry = tier.order.victim(time.monotonic()) if tier.arena.free_pages < free_pages else None
            if entry is not None:
                tier.pin(entry)
            return entry

    def unpin_and_drop(self, entry: Entry) -> bool:
        """Undo one pin and drop the entry, unless another reader has pinned it since."""
        with self._turn:
            entry.tier.unpin(entry)
            gone = not entry.pins
            if gone:
                entry.tier.drop(entry)
            self._released()
        if gone:
            self.tell_dropped([(entry.address, entry.tier.name)])
        return gone

    def evict(self, address: bytes) -> bool:
        """Drop an embedding from all tiers; return False, and do nothing, if it is absent, pinned or being written."""
        with self._turn:
            self._settle()
            entries = [tier.entries[address] for tier in self.tiers if address in tier.entries]
            if not entries or any(entry.pins for entry in entries) or address in self._writing:
                return False
            for entry in entries:
                entry.tier.drop(entry)
            self._turn.notify_all()
        self.tell_dropped((address, entry.tier.name) for entry in entries)
        return True

    def flush(self) -> int:
        """Drop everything that is not pinned; return the number of entries dropped."""
        dropped: list[tuple[bytes, TierName]] = []
        with self._turn:
            self._settle()
            for tier in self.tiers:
                for entry in [entry for entry in tier.entries.values() if not entry.pins]:
                    tier.drop(entry)
                    dropped.append((entry.address, tier.name))
            self._turn.notify_all()
        self.tell_dropped(dropped)
        return len(dropped)

    def snapshot(self) -> list[tuple[Tier, list[Entry]]]:
        """Return the entries of each tier at one moment."""
        with self._turn:
            self._settle()
            return [(tier, list(tier.entries.values())) for tier in self.tiers]

    def tell_dropped(self, dropped: Iterable[tuple[bytes, TierName]]) -> None:
        """Report the entries dropped from a tier."""
        if self._on_evict is not None:
            for address, name in dropped:
                self._on_evict(address, name)

    def _with_room(self, pages: Sequence[int]) -> int:
        """Return how many of these embeddings, from the first on, fit beside what is pinned, written or promised."""
        room = (
            sum(tier.arena.free_pages for tier in self.tiers)
            + self.host.evictable_pages
            - self._promised_pages
        )
        return sum(needed <= room for needed in accumulate(pages))

    def _released(self) -> None:
        if self._wanting_since is not None and self._with_room([self._wanting_pages]):
            self._wanting_since = None
        self._turn.notify_all()

    def _settle(self) -> None:
        """Undo pins whose holders were garbage-collected."""
        while self._forgotten:
            entry = self._forgotten.popleft()
            entry.tier.unpin(entry)
            self._released()

    def _wait(self, deadline: float) -> None:
        """Wait for a release; raises `OverloadedError` at the deadline."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self.refusals += 1
            raise OverloadedError(
                "the store is full of embeddings that are in use: retry", retry_after_ms=1000
            )
        self.waits += 1
        self._turn.wait(min(left_s, _NAP_S))
