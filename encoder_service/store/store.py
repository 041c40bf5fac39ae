"""The embedding store: embeddings by address, in a host tier and an optional device tier, each bounded in bytes.

`TierMigrator` moves embeddings between the tiers, in its own thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path

import torch
from torch import Tensor

from encoder_contract.device_memory import DeviceMemory, DeviceMemoryError, allocate
from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.store import segment
from encoder_service.store.pin import Incoming, Pin
from encoder_service.store.segment import GIB, Segment, StoreSizeError, device_error
from encoder_service.store.table import Entry, EntryTable, Grid, Layout, Tier, TierName


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier. Bytes count whole pages; counters only grow."""

    name: TierName
    size_bytes: int
    used_bytes: int
    pinned_bytes: int
    entries: int
    pinned_entries: int
    hits: int
    evictions: int
    writes: int
    free_runs: int
    largest_free_bytes: int


@dataclass(frozen=True, slots=True)
class EntryStats:
    """One embedding in one tier."""

    address: bytes
    tier: TierName
    row_bytes: int
    tokens: int
    pins: int
    hits: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store; `tiers` fastest first, `largest` by bytes."""

    tiers: tuple[TierStats, ...]
    misses: int
    pins: int
    demotions: int
    promotions: int
    waits: int
    refusals: int
    largest: tuple[EntryStats, ...]


PAGE_BYTES = 64 << 10
"""A page is as many rows as fit this, at least one: an embedding wastes half a page on average."""
_LARGEST = 10


class Store:
    """Thread-safe. `pin`, `contains`, `tier_of` and `Pin.release` take microseconds: call them from an event loop.

    `put` and `Pin.to_host` copy megabytes and may wait for other threads: call them from worker threads.
    """

    def __init__(
        self,
        *,
        host_bytes: int,
        width: int,
        dtype: torch.dtype,
        device_bytes: int = 0,
        device: str = "cpu",
        segment_dir: str = "/dev/shm",  # noqa: S108 - memory on every Linux; the segment is created safely
        wait_s: float = 2.0,
        on_evict: Callable[[bytes, TierName], None] | None = None,
        prefault: bool = False,
    ) -> None:
        """Allocate all memory now. Raises `StoreSizeError`, which names the setting to change, if that fails.

        A row is `width` elements of `dtype`. A writer waits up to `wait_s` while everything is pinned. `on_evict`
        is called with each (address, tier) that was dropped, without the lock, on the thread that dropped it;
        the address may still be in the other tier, or be held again: ask `contains`. `prefault` touches the host
        tier's pages in the background.
        """
        self.width, self.dtype = width, dtype
        row_bytes = width * dtype.itemsize
        self.layout = Layout(row_bytes, max(1, PAGE_BYTES // row_bytes))
        self._wait_s = wait_s
        self._device_name = device
        self._closed = threading.Event()
        on_device = _allocate(device, self._whole_pages(device_bytes, "device")) if device_bytes else None
        self.segment = Segment(
            Path(segment_dir),
            self._whole_pages(host_bytes, "host") // self.layout.page_bytes,
            self.layout.page_bytes,
            device_bytes // self.layout.page_bytes,
        )
        memory = torch.frombuffer(self.segment.view[self.segment.data_offset :], dtype=torch.uint8)
        self._host = Tier("host", memory, self.layout, self.segment.generations)
        self._device = None
        if on_device is not None:
            flat = _tensor_over(on_device, device)
            self._device = Tier("device", flat, self.layout, self.segment.device_generations, on_device.name)
        self._table = EntryTable(
            [self._host] if self._device is None else [self._host, self._device], on_evict
        )
        self._migrator = None if self._device is None else TierMigrator(self._table, self._device, self._host)
        self._registered = device.startswith("cuda") and segment.register_memory(memory, device)
        if prefault and not self._registered:
            threading.Thread(target=self.segment.prefault, name="store-prefault", daemon=True).start()

    def pin(self, address: bytes) -> Pin | None:
        """Return a pin on the embedding, on its host copy if there is one; None if it is not held."""
        entry = self._table.lookup(address)
        return None if entry is None else Pin(self._table, self.segment, entry)

    def to_device(self, pin: Pin) -> None:
        """Move a pin to the device tier's copy for someone who reads there; if there is none, it stays as it is.

        What such readers find on the host again and again is copied to the device. Takes microseconds; for one thread.
        """
        if self._device is not None and self._migrator is not None and not pin.move_to(self._device):
            self._migrator.wanted(pin.entry)

    @property
    def has_device(self) -> bool:
        """Whether there is a device tier."""
        return self._device is not None

    def put(
        self, address: bytes, rows: Tensor, grid: Grid, *, holder: str = "", is_set_aside: bool = False
    ) -> Pin:
        """Store `rows` ([tokens, width], any device) under `address`; return a pin on the embedding held there.

        First writer wins: if the address is held, or another thread is writing it, `rows` are discarded.
        With a device tier, rows go there while it has space. The rows count against `holder`, whose least recently used
        go first while it has the most. `is_set_aside`: into the caller's own `set_aside`.
        Raises `OverloadedError` if everything stays pinned, or set aside for others, for `wait_s`, and
        `ImageLimitError` for an embedding larger than the host tier.
        """
        assert rows.ndim == 2, rows.shape
        assert (rows.shape[1], rows.dtype) == (self.width, self.dtype), (rows.shape, rows.dtype)
        tokens = len(rows)
        self._check_size(tokens)
        deadline = time.monotonic() + self._wait_s
        table = self._table
        entry = table.claim(address, table.tiers, deadline)
        if entry is not None:
            return Pin(table, self.segment, entry)
        try:
            source = rows.contiguous().view(torch.uint8).view(-1)
            if self._device is not None:
                entry = table.reserve_free(self._device, address, tokens, grid, holder, promised=is_set_aside)
            if entry is None:
                entry = table.reserve(
                    self._host, address, tokens, grid, holder, deadline, promised=is_set_aside
                )
            return Pin(table, self.segment, table.fill(entry, [source]))
        finally:
            table.unclaim(address)

    def receive(self, address: bytes, tokens: int, grid: Grid, holder: str = "") -> Incoming | None:
        """Return where to write rows that arrive piece by piece, in the host tier; None if they are held.

        They count against `holder` from now on.
        Takes microseconds: call it from an event loop. Raises `OverloadedError` at once if everything is pinned or set
        aside, or another thread is writing the address, and `ImageLimitError` if the host tier is too small for it.
        """
        self._check_size(tokens)
        table, now = self._table, time.monotonic()
        if (held := table.claim(address, table.tiers, now)) is not None:
            table.unpin(held)
            return None
        try:
            entry = table.reserve(self._host, address, tokens, grid, holder, now)
        except BaseException:  # any error: an address that stays claimed can never be put
            table.unclaim(address)
            raise
        return Incoming(table, self.segment, entry, self.dtype)

    def set_aside(self, tokens: Sequence[int], *, wait: bool = True) -> int:
        """Reserve space for embeddings about to be computed; return how many of them, from the first on, fit.

        May `wait` while too much is pinned for the first; without that, none may fit. Raises what `put` would, before
        rows are computed that could not be stored. No other writer takes the space. Call `give_back` once for each
        embedding reserved, after `put` or instead of it.
        """
        self._check_size(tokens[0])
        return self._table.promise(
            [self.layout.pages(count) for count in tokens], self._wait_s if wait else None
        )

    def give_back(self, tokens: int) -> None:
        """Undo `set_aside` for one embedding."""
        self._table.unpromise(self.layout.pages(tokens))

    def contains(self, address: bytes) -> bool:
        """Whether any tier holds the embedding now."""
        return self.tier_of(address) is not None

    def tier_of(self, address: bytes) -> TierName | None:
        """Return the tier that `pin` would find, or None; takes no pin and counts no hit."""
        return self._table.tier_of(address)

    def grids(self) -> dict[bytes, Grid]:
        """Return address and grid of every embedding held now."""
        return self._table.grids()

    def evict(self, address: bytes) -> bool:
        """Drop the embedding from all tiers; return False, and do nothing, if it is not held or is pinned."""
        return self._table.evict(address)

    def flush(self) -> int:
        """Drop every embedding that is not pinned; return how many copies were dropped."""
        return self._table.flush()

    def keep_moving(self) -> None:
        """Demote and promote until the store is closed: a thread's target. Returns at once without a device tier."""
        if self._migrator is not None:
            self._migrator.run(self._closed)

    def move_once(self) -> bool:
        """Make one move between the tiers; return False if none is due or possible."""
        return self._migrator is not None and self._migrator.move_once()

    def stats(self) -> StoreStats:
        """Return current statistics. Walks all entries: for scrapes and admin calls, not for every request."""
        tiers = self._table.snapshot()
        entries = [entry for _, held in tiers for entry in held]
        return StoreStats(
            tiers=tuple(_tier_stats(tier, held) for tier, held in reversed(tiers)),
            pins=sum(entry.pins for entry in entries),
            misses=self._table.misses,
            waits=self._table.waits,
            refusals=self._table.refusals,
            demotions=0 if self._migrator is None else self._migrator.demotions,
            promotions=0 if self._migrator is None else self._migrator.promotions,
            largest=tuple(map(_entry_stats, nlargest(_LARGEST, entries, key=lambda entry: entry.tokens))),
        )

    def close(self) -> None:
        """Remove the segment's file and stop the migrator. Views of rows stay valid; `put` must not be called again."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._registered:
            segment.unregister_memory(self._host.memory, self._device_name)
        self.segment.close()

    def _check_size(self, tokens: int) -> None:
        if self.layout.pages(tokens) > self._host.arena.pages:
            raise ImageLimitError(
                f"the embedding has {tokens * self.layout.row_bytes / GIB:.3f} GiB, more than the whole "
                f"host store of {self._host.memory.numel() / GIB:.3f} GiB (--store-host-gib)"
            )

    def _whole_pages(self, size_bytes: int, name: TierName) -> int:
        """Round a tier's size down to whole pages."""
        size_bytes -= size_bytes % self.layout.page_bytes
        if size_bytes <= 0:
            raise StoreSizeError(
                f"the {name} store is smaller than one page of {self.layout.page_bytes} bytes: "
                f"raise --store-{name}-gib"
            )
        return size_bytes


def _allocate(device: str, size_bytes: int) -> DeviceMemory:
    try:
        return allocate(device, size_bytes)
    except DeviceMemoryError as error:
        raise device_error(device, size_bytes, str(error)) from error


def _tensor_over(memory: DeviceMemory, device: str) -> Tensor:
    content = memory.content
    if isinstance(content, memoryview):
        return torch.frombuffer(content, dtype=torch.uint8)
    return torch.as_tensor(content, device=device)


def _tier_stats(tier: Tier, entries: list[Entry]) -> TierStats:
    page_bytes, arena = tier.layout.page_bytes, tier.arena
    in_use = [entry for entry in entries if entry.pins]
    return TierStats(
        name=tier.name,
        size_bytes=arena.pages * page_bytes,
        used_bytes=(arena.pages - arena.free_pages) * page_bytes,
        pinned_bytes=sum(tier.layout.pages(entry.tokens) for entry in in_use) * page_bytes,
        entries=len(entries),
        pinned_entries=len(in_use),
        hits=tier.hits,
        evictions=tier.evictions,
        writes=tier.writes,
        free_runs=arena.free_runs,
        largest_free_bytes=arena.largest_free_run * page_bytes,
    )


def _entry_stats(entry: Entry) -> EntryStats:
    return EntryStats(entry.address, entry.tier.name, entry.row_bytes, entry.tokens, entry.pins, entry.hits)


LOW_WATER = 0.1
"""Share of the device tier kept free: a new embedding that does not fit there goes to the host tier."""
PROMOTE_READERS = 3
"""An embedding is copied to the device tier for every third reader who would read it there and found it on the host."""
_SUGGESTIONS = 64
"""Pending promotions kept; those that overflow are suggested again by later readers."""
_NAP_S = 0.02
"""Pause when nothing is due: far shorter than the time in which encoding fills the share kept free."""


class TierMigrator:
    """Demotion (device to host, then off the device); promotion (host to device, on both) of what `wanted` names."""

    def __init__(self, table: EntryTable, device: Tier, host: Tier) -> None:
        """Move between these two tiers of `table`."""
        self.demotions = 0
        self.promotions = 0
        self._table = table
        self._device = device
        self._host = host
        self._low_pages = max(1, int(device.arena.pages * LOW_WATER))
        self._suggested: deque[bytes] = deque(maxlen=_SUGGESTIONS)

    def wanted(self, entry: Entry) -> None:
        """Count a reader of a host copy who would read on the device: microseconds, from one thread."""
        entry.device_readers += 1
        if entry.device_readers % PROMOTE_READERS == 0:
            self._suggested.append(entry.address)

    def run(self, closed: threading.Event) -> None:
        """Make due moves until `closed` is set: the target of a thread."""
        while not closed.is_set():
            if not self.move_once():
                closed.wait(_NAP_S)

    def move_once(self) -> bool:
        """Make one move; return False if none is due or possible. Takes milliseconds: it copies."""
        victim = self._table.pin_victim(self._device, self._low_pages)
        if victim is not None:
            return self._demote(victim)
        try:
            address = self._suggested.popleft()
        except IndexError:
            return False
        return self._promote(address)

    def _demote(self, victim: Entry) -> bool:
        """Copy an entry to the host unless it is there, then drop it from the device; not while the host is full."""
        try:
            copy = self._table.copy(victim, self._host, deadline=time.monotonic())
        except OverloadedError:
            self._table.unpin(victim)
            return False
        self._table.unpin(copy)
        gone = self._table.unpin_and_drop(victim)
        self.demotions += gone
        return gone

    def _promote(self, address: bytes) -> bool:
        """Copy a host entry into free pages of the device; demotion keeps some free."""
        table = self._table
        source = table.pin_in(self._host, address)
        if source is None:
            return False
        try:
            copy = table.copy_if_free(source, self._device)
        finally:
            table.unpin(source)
        if copy is None:
            return False
        table.unpin(copy)
        self.promotions += 1
        return True
