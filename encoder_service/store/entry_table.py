"""Ledger: who lies where, who writes, who reads. All bookkeeping of the store, under its one short lock.

Bytes are copied outside the lock, into pages that nobody else can see yet. An address is written by one
thread at a time: the others wait for it and then find the embedding held.
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
"""Longest sleep of a waiter: pins that the garbage collector drops wake nobody."""


class EntryTable:
    """Thread-safe. `tiers` are in the order in which readers prefer them: the host, then the device."""

    def __init__(self, tiers: Sequence[Tier], on_evict: Callable[[bytes, TierName], None] | None) -> None:
        """Begin with empty tiers; `on_evict` is told each (address, tier) that was dropped, unlocked."""
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
        self._wanting_since: float | None = None  # since when there was no room for so many pages
        self._wanting_pages = 0

    def lookup(self, address: bytes) -> Entry | None:
        """Return the best copy of an embedding, pinned and counted as a hit; another copy counts as used."""
        found = None
        with self._turn:
            self._settle()
            for tier in self.tiers:
                slot = tier.slots.get(address)
                if slot is None:
                    continue
                if found is None:
                    found = slot
                    tier.pin(slot)
                    tier.hits += 1
                    slot.hits += 1
                else:
                    tier.touch(slot)
            self.misses += found is None
        return found

    def tier_of(self, address: bytes) -> TierName | None:
        """Return the tier that `lookup` would find; counts nothing."""
        with self._turn:
            return next((tier.name for tier in self.tiers if address in tier.slots), None)

    def grids(self) -> dict[bytes, Grid]:
        """Return address and grid of all embeddings, in any tier."""
        with self._turn:
            return {address: slot.grid for tier in self.tiers for address, slot in tier.slots.items()}

    def claim(self, address: bytes, tiers: Collection[Tier], deadline: float) -> Entry | None:
        """Return the embedding, pinned, if one of `tiers` holds it; else None, and the caller is its writer.

        Waits for another writer of the same address, until `deadline` (monotonic): then `OverloadedError`.
        """
        with self._turn:
            while True:
                self._settle()
                for tier in tiers:
                    if (slot := tier.slots.get(address)) is not None:
                        tier.pin(slot)
                        return slot
                if address not in self._writing:
                    self._writing.add(address)
                    return None
                self._wait(deadline)

    def unclaim(self, address: bytes) -> None:
        """End what `claim` began, whether or not the embedding was written."""
        with self._turn:
            self._writing.discard(address)
            self._turn.notify_all()

    def reserve_free(self, tier: Tier, address: bytes, tokens: int, grid: Grid) -> Entry | None:
        """Take pages that are free now, or None."""
        with self._turn:
            return tier.reserve(address, tokens, grid)

    def reserve(self, tier: Tier, address: bytes, tokens: int, grid: Grid, deadline: float) -> Entry:
        """Take pages, dropping what was used longest ago; wait until `deadline` while too much is pinned.

        Raises `OverloadedError` then.
        """
        dropped: list[bytes] = []
        try:
            with self._turn:
                while True:
                    self._settle()
                    slot = tier.reserve(address, tokens, grid)
                    room = tier.make_room(tokens)
                    while slot is None and (victim := next(room, None)) is not None:
                        dropped.append(victim)
                        slot = tier.reserve(address, tokens, grid)
                    if slot is not None:
                        return slot
                    self._wait(deadline)
        finally:
            self.tell_dropped((address, tier.name) for address in dropped)

    def promise(self, pages: Sequence[int], wait_s: float) -> int:
        """Count pages of embeddings that are about to be written; return how many, from the first on, have room.

        Waits while not even the first has, until room of that size has been wanting for `wait_s`, whoever wanted it:
        then `OverloadedError`, at once for those who come after.
        """
        with self._turn:
            while not (count := self._with_room(pages)):
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

    def fill(self, slot: Entry, sources: Iterable[Tensor]) -> Entry:
        """Copy the embedding's bytes into reserved pages and let everyone see it; it stays pinned once."""
        try:
            copy_bytes(slot.tier.pieces(slot), sources)
        except BaseException:
            with self._turn:
                slot.tier.abandon(slot)
                self._turn.notify_all()
            raise
        with self._turn:
            slot.tier.commit(slot)
        return slot

    def copy(self, slot: Entry, tier: Tier, deadline: float) -> Entry:
        """Return a pinned copy of a pinned slot in another tier, made now unless it is there."""
        held = self.claim(slot.address, (tier,), deadline)
        if held is not None:
            return held
        try:
            target = self.reserve(tier, slot.address, slot.tokens, slot.grid, deadline)
            return self.fill(target, slot.tier.pieces(slot))
        finally:
            self.unclaim(slot.address)

    def copy_if_free(self, slot: Entry, tier: Tier) -> Entry | None:
        """Return a new pinned copy of a pinned slot in pages of another tier that are free now.

        None, without waiting, when none are, or when the tier has a copy already.
        """
        with self._turn:
            if slot.address in self._writing or slot.address in tier.slots:
                return None
            target = tier.reserve(slot.address, slot.tokens, slot.grid)
            if target is None:
                return None
            self._writing.add(slot.address)
        try:
            return self.fill(target, slot.tier.pieces(slot))
        finally:
            self.unclaim(slot.address)

    def pin_in(self, tier: Tier, address: bytes) -> Entry | None:
        """Return the copy that `tier` holds, pinned, or None; not counted as a hit."""
        with self._turn:
            slot = tier.slots.get(address)
            if slot is not None:
                tier.pin(slot)
            return slot

    def unpin(self, slot: Entry) -> None:
        """Undo one pin."""
        with self._turn:
            slot.tier.unpin(slot)
            self._released()

    def unpin_later(self, slot: Entry) -> None:
        """Undo one pin at the next call of anyone. The garbage collector may call this, the lock held."""
        self._forgotten.append(slot)

    def pin_victim(self, tier: Tier, free_pages: int) -> Entry | None:
        """Return, pinned, what should leave `tier` next when it has fewer than `free_pages` pages free."""
        with self._turn:
            self._settle()
            slot = tier.unpinned.victim() if tier.arena.free_pages < free_pages else None
            if slot is not None:
                tier.pin(slot)
            return slot

    def unpin_and_drop(self, slot: Entry) -> bool:
        """Undo one pin and forget the embedding in that tier, unless someone else has pinned it meanwhile."""
        with self._turn:
            slot.tier.unpin(slot)
            gone = not slot.pins
            if gone:
                slot.tier.drop(slot)
            self._turn.notify_all()
        if gone:
            self.tell_dropped([(slot.address, slot.tier.name)])
        return gone

    def evict(self, address: bytes) -> bool:
        """Drop an embedding from all tiers; False, and nothing done, if it is not held, pinned or written."""
        with self._turn:
            self._settle()
            slots = [tier.slots[address] for tier in self.tiers if address in tier.slots]
            if not slots or any(slot.pins for slot in slots) or address in self._writing:
                return False
            for slot in slots:
                slot.tier.drop(slot)
            self._turn.notify_all()
        self.tell_dropped((address, slot.tier.name) for slot in slots)
        return True

    def flush(self) -> int:
        """Drop everything that is not pinned; return how many entries went."""
        dropped: list[tuple[bytes, TierName]] = []
        with self._turn:
            self._settle()
            for tier in self.tiers:
                while (slot := tier.unpinned.victim()) is not None:
                    tier.drop(slot)
                    dropped.append((slot.address, tier.name))
            self._turn.notify_all()
        self.tell_dropped(dropped)
        return len(dropped)

    def snapshot(self) -> list[tuple[Tier, list[Entry]]]:
        """Return the entries of each tier at one moment."""
        with self._turn:
            self._settle()
            return [(tier, list(tier.slots.values())) for tier in self.tiers]

    def tell_dropped(self, dropped: Iterable[tuple[bytes, TierName]]) -> None:
        """Report what left a tier."""
        if self._on_evict is not None:
            for address, name in dropped:
                self._on_evict(address, name)

    def _with_room(self, pages: Sequence[int]) -> int:
        """How many of these embeddings, from the first on, fit where nothing is pinned, written or promised."""
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
        """Undo the pins whose holders were garbage-collected."""
        while self._forgotten:
            slot = self._forgotten.popleft()
            slot.tier.unpin(slot)

    def _wait(self, deadline: float) -> None:
        """Let others release something; `OverloadedError` at the deadline."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self.refusals += 1
            raise OverloadedError("the embedding store is full of pinned entries", retry_after_ms=1000)
        self.waits += 1
        self._turn.wait(min(left_s, _NAP_S))
