"""The tiers of a store under one lock: embeddings are found, written, pinned and evicted here.

The lock is held for microseconds. Bytes are copied outside it, into pages that no reader sees yet.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_contract.extents import views
from encoder_contract.geometry import Grid
from encoder_service.store.copies import copy_bytes
from encoder_service.store.disk import Disk
from encoder_service.store.pin import Pin
from encoder_service.store.segment import GIB, Segment
from encoder_service.store.tier import AnyTier, Entry, Tier

_MAX_SLEEP_S = 0.05
"""Longest sleep of a waiting thread: a pin that the garbage collector releases does not wake it."""
HOST_LOW_WATER = 0.05
"""Share of the host tier that is kept free with a disk; at least the largest embedding, up to a quarter of the tier."""


class Tiers(ABC):
    """Embeddings by address. Thread-safe.

    Rows are written in three steps: `reserve` pages, fill them, `commit`. The first to commit an address wins.

    `pin`, `reserve`, `commit` and `Pin.release` take microseconds: an event loop may call them. `copy` and
    `Pin.to_host` copy megabytes and may wait for other threads: call them from worker threads.
    """

    def __init__(
        self,
        segment: Segment,
        host: Tier,
        device: Tier | None,
        disk: Disk | None,
        wait_s: float,
        on_evict: Callable[[bytes, AnyTier], None],
    ) -> None:
        """See `Store`. `segment` has the memory of `host`."""
        self.segment, self.host, self.device, self.disk = segment, host, device, disk
        self.tiers = (host,) if device is None else (host, device)
        """Those in memory, in the order in which `pin` looks."""
        self.layout = host.layout
        self.wait_s = wait_s
        self._on_evict = on_evict
        self.lock = threading.Lock()
        self._freed = threading.Condition(self.lock)
        self._waiting = 0  # threads that wait for `_freed`
        self._collected: deque[Entry] = deque()  # one per pin that was garbage-collected and is still counted
        self.moving: set[bytes] = set()
        """Addresses that a thread copies to another tier."""
        self.on_freed: list[Callable[[], None]] = []
        """Called once when there may be pages for whom `reserve` found none; on any thread, with the lock held."""
        self._is_awaited = False  # whether to call them
        self.low_host_pages = max(1, int(host.arena.pages * HOST_LOW_WATER))
        """Free pages of the host tier below which embeddings move to the disk. Grows with the largest embedding."""
        self.misses = self.waits = self.refusals = 0

    def pin(self, address: bytes, *, again: bool = False) -> Pin | None:
        """Pin the embedding, its host copy if there is one; return None if it is not in memory: see `Moves.load_later`.

        Counts a hit, or a miss unless the same call has looked for it before (`again`). A second copy, in another tier,
        counts as used.
        """
        found = None
        with self.lock:
            if self._collected:
                self.unpin_collected()
            for tier in self.tiers:
                entry = tier.entries.get(address)
                if entry is None:
                    continue
                if found is None:
                    found = entry
                    tier.pin(entry)
                    tier.use(entry)
                else:
                    tier.touch(entry)
            if found is None:
                self.misses += not (again or self._is_on_disk(address))
                return None
        return Pin(self, found)

    def reserve(
        self, address: bytes, tokens: int, grid: Grid, holder: str = "", *, on_host: bool = False
    ) -> Entry | Pin | None:
        """Reserve pages for rows, which no reader sees before `commit`: the first step of every write. Does not wait.

        Fill the pages, then call `commit`, or `abandon` if the bytes will never be complete. The pages are in memory
        that other processes can open: on the device while it has space, else, or with `on_host`, on the host. They
        count against `holder` (see `EvictionOrder`) at once.

        Return a pin if the rows are held already, and None if everything is in use: `on_freed` then tells when to try
        again. Raises `ImageLimitError` for an embedding larger than the host tier.
        """
        self._check_size(tokens)
        into = [self.host] if on_host else [tier for tier in reversed(self.tiers) if tier.is_shared]
        dropped: list[Entry] = []
        try:
            with self.lock:
                self.unpin_collected()
                if (held := self.pin_first(self.tiers, address)) is not None:
                    return Pin(self, held)
                entry = self.place(address, tokens, grid, holder, into, dropped)
                if entry is None:
                    self._is_awaited = True
                    self.waits += 1
                return entry
        finally:
            self.report_dropped(dropped)

    def rows(self, entry: Entry) -> list[memoryview]:
        """Return the bytes of an entry of the host tier, in order, without a copy. To fill them, use `filling`."""
        return views(self.segment.view, entry.extents(0, entry.tokens), self.segment.data_offset)

    @contextmanager
    def filling(self, entry: Entry) -> Iterator[None]:
        """Abandon a reserved entry if the block, which fills its pages, raises. By then, nothing may write to them."""
        try:
            yield
        except BaseException:  # any error: pages that stay reserved would be lost
            self.abandon(entry)
            raise

    def commit(self, entries: Iterable[Entry]) -> list[Pin]:
        """Make reserved entries visible, once their bytes are written; return a pin on the rows of each address.

        The first to commit wins: the pages of a later writer of the address are freed, and its pin is on the rows held.
        """
        with self.lock:
            pins = [Pin(self, self.committed(entry)) for entry in entries]
            self.wake()
        return pins

    def abandon(self, entry: Entry) -> None:
        """Free the pages of a reserved entry that is not committed, once nobody can write to them any more."""
        with self.lock:
            entry.tier.release(entry)
            self.wake()

    def copy(self, held: Pin, address: bytes, holder: str = "") -> Pin | None:
        """Write pinned rows under another address; return a pin on them. Copies megabytes: call it on a worker thread.

        Returns None if everything is in use.
        """
        source = held.entry
        copy = self.reserve(address, source.tokens, source.grid, holder)
        if not isinstance(copy, Entry):
            return copy
        copy.checksum = source.checksum
        with self.filling(copy):
            copy_bytes(copy.tier.pieces(copy), source.tier.pieces(source))
        [pin] = self.commit([copy])
        return pin

    def fits(self, tokens: int) -> bool:
        """Whether an embedding of this size finds pages now. If not, `on_freed` is called as after `reserve`."""
        with self.lock:
            self.unpin_collected()
            needed = self.layout.pages(tokens)
            fits = any(tier.is_shared and tier.arena.free_pages >= needed for tier in self.tiers) or (
                self.host.arena.free_pages + self.host.evictable_pages >= needed
            )
            self._is_awaited |= not fits
            return fits

    def full_error(self) -> OverloadedError:
        """Return the error for rows that found no space for `wait_s`, and count it."""
        self.refusals += 1
        return OverloadedError(
            "the store is full, and all its embeddings are in use: retry", retry_after_ms=1000
        )

    def contains(self, address: bytes) -> bool:
        """Whether any tier holds the embedding. Takes no pin and counts no hit."""
        with self.lock:
            return any(address in tier.entries for tier in self.tiers) or self._is_on_disk(address)

    def grid(self, address: bytes, *, again: bool = False) -> Grid | None:
        """Return the grid of an embedding that any tier holds, else None. Counts a hit or a miss as `pin` does."""
        grid = None
        with self.lock:
            for tier in self.tiers:
                if (entry := tier.entries.get(address)) is not None:
                    tier.hits += grid is None
                    tier.touch(entry)
                    grid = entry.grid
            if grid is None and self.disk is not None and (file := self.disk.find(address)) is not None:
                grid = file.grid
            self.misses += grid is None and not again
        return grid

    def grids(self) -> dict[bytes, Grid]:
        """Return the grid of every embedding held, by address."""
        files = self.disk.files() if self.disk is not None else []
        with self.lock:
            held = [list(tier.entries.values()) for tier in self.tiers]
        return {file.address: file.grid for file in files} | {
            entry.address: entry.grid for entries in held for entry in entries
        }

    def evict(self, address: bytes) -> bool:
        """Drop the embedding from all tiers. If it is absent, pinned or being written, do nothing and return False."""
        with self.lock:
            self.unpin_collected()
            entries = [tier.entries[address] for tier in self.tiers if address in tier.entries]
            is_on_disk = self._is_on_disk(address)
            if not (entries or is_on_disk) or any(entry.pins for entry in entries) or address in self.moving:
                return False
            for entry in entries:
                entry.tier.drop(entry)
            self.wake()
        self.report_dropped(entries)
        if self.disk is not None:
            self.disk.drop(address)
        return True

    def flush(self) -> int:
        """Drop every embedding that is not pinned; return how many copies were dropped."""
        with self.lock:
            self.unpin_collected()
            entries = [entry for tier in self.tiers for entry in tier.entries.values() if not entry.pins]
            for entry in entries:
                entry.tier.drop(entry)
            self.wake()
        self.report_dropped(entries)
        files = self.disk.clear() if self.disk is not None else 0
        return len(entries) + files

    # For pins: the contract is in `EntryStore`

    @abstractmethod
    def copy_to_host(self, entry: Entry, wait_s: float) -> Entry: ...

    def unpin(self, entry: Entry) -> None:
        with self.lock:
            entry.tier.unpin(entry)
            self.wake()

    def unpin_later(self, entry: Entry) -> None:
        self._collected.append(entry)
        if self._is_awaited:
            self._tell_freed()

    # For `reserve` and `Moves`, with the lock held

    def place(
        self,
        address: bytes,
        tokens: int,
        grid: Grid,
        holder: str,
        into: Sequence[Tier],
        dropped: list[Entry],
    ) -> Entry | None:
        """Reserve pages in the first tier that has enough free. If none has, evict from the last one, the host tier."""
        for tier in into:
            if (entry := tier.reserve(address, tokens, grid, holder)) is not None:
                return entry
        host = into[-1]
        self.low_host_pages = max(self.low_host_pages, min(self.layout.pages(tokens), host.arena.pages // 4))
        for victim in host.make_room(address, tokens, holder):
            dropped.append(victim)
            if (entry := host.reserve(address, tokens, grid, holder)) is not None:
                return entry
        return None

    def pin_first(self, tiers: Iterable[Tier], address: bytes) -> Entry | None:
        """Pin and return the copy in the first of `tiers` that holds the embedding. Counts no hit."""
        for tier in tiers:
            if (held := tier.entries.get(address)) is not None:
                tier.pin(held)
                return held
        return None

    def committed(self, entry: Entry) -> Entry:
        """Make an entry visible and return it; if its address is held by now, free its pages and pin what is held."""
        if (held := self.pin_first(self.tiers, entry.address)) is not None:
            entry.tier.release(entry)
            return held
        entry.tier.commit(entry)
        return entry

    def wait(self, deadline: float) -> None:
        """Wait until a thread frees pages or has moved an address. Raises `OverloadedError` at the deadline."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise self.full_error()
        self.waits += 1
        self._waiting += 1
        try:
            self._freed.wait(min(left_s, _MAX_SLEEP_S))
        finally:
            self._waiting -= 1

    def wake(self) -> None:
        """Wake the waiting threads: there may be free pages, or an address without a writer."""
        if self._waiting:
            self._freed.notify_all()
        if self._is_awaited:
            self._tell_freed()

    def _tell_freed(self) -> None:
        self._is_awaited = False
        for call in self.on_freed:
            call()

    def unpin_collected(self) -> None:
        """Undo the pins that were garbage-collected."""
        while self._collected:
            entry = self._collected.popleft()
            entry.tier.unpin(entry)
            self.wake()

    def _is_on_disk(self, address: bytes) -> bool:
        return self.disk is not None and address in self.disk

    def report_dropped(self, dropped: Iterable[Entry]) -> None:
        """Tell `on_evict` of entries that were dropped."""
        for entry in dropped:
            self._on_evict(entry.address, entry.tier.name)

    def _check_size(self, tokens: int) -> None:
        if self.layout.pages(tokens) > self.host.arena.pages:
            raise ImageLimitError(
                f"the embedding has {tokens * self.layout.row_bytes / GIB:.3f} GiB, more than the whole "
                f"host store of {len(self.host.memory) / GIB:.3f} GiB (--store-host-gib)"
            )
