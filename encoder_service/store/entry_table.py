"""The entry table: where each embedding is, and who reads and writes it, under the store's one short lock.

Bytes are copied outside the lock, into pages that no reader can see yet. An address is written by one
thread at a time: other writers wait for it and then find the embedding held.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from torch import Tensor

from encoder_contract.errors import OverloadedError
from encoder_service.store.tiers import Entry, Grid, Tier, TierName, copy_bytes

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
        self, tier: Tier, address: bytes, tokens: int, grid: Grid, *, promised: bool
    ) -> Entry | None:
        """Reserve pages that are free now; None if there are too few. `promised` as in `reserve`."""
        with self._turn:
            has_room = promised or self._with_room([tier.layout.pages(tokens)])
            return tier.reserve(address, tokens, grid) if has_room else None

    def reserve(
        self, tier: Tier, address: bytes, tokens: int, grid: Grid, deadline: float, *, promised: bool = False
    ) -> Entry:
        """Reserve pages, evicting the least recently used entries; wait while too much is pinned or promised to others.

        `promised` are pages of the caller's own `promise`. Raises `OverloadedError` at `deadline` (monotonic).
        """
        dropped: list[bytes] = []
        try:
            with self._turn:
                while True:
                    self._settle()
                    if promised or self._with_room([tier.layout.pages(tokens)]):
                        entry = tier.reserve(address, tokens, grid)
                        room = tier.make_room(tokens)
                        while entry is None and (victim := next(room, None)) is not None:
                            dropped.append(victim)
                            entry = tier.reserve(address, tokens, grid)
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
        except BaseException:  # whatever it is: pages that stay reserved are lost
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
            target = self.reserve(tier, entry.address, entry.tokens, entry.grid, deadline)
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
            target = tier.reserve(entry.address, entry.tokens, entry.grid)
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
            entry = tier.unpinned.victim() if tier.arena.free_pages < free_pages else None
            if entry is not None:
                tier.pin(entry)
            return entry

    def unpin_and_drop(self, entry: Entry) -> bool:
        """Undo one pin and drop the entry, unless another reader has pinned it meanwhile."""
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
                while (entry := tier.unpinned.victim()) is not None:
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
            raise OverloadedError("the embedding store is full of pinned entries", retry_after_ms=1000)
        self.waits += 1
        self._turn.wait(min(left_s, _NAP_S))
