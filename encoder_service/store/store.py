"""The embedding store: embeddings by address, in a host tier and an optional device tier, each bounded in bytes.

One short lock guards all bookkeeping. Bytes are copied outside the lock, into pages that no reader can see yet.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from encoder_contract.device_memory import CUDA_SHARED_BYTES, DeviceMemory, DeviceMemoryError, allocate
from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_service.store import segment
from encoder_service.store.arena import Entry, Grid, Layout, Tier, TierName
from encoder_service.store.pin import Incoming, Pin
from encoder_service.store.segment import GIB, Segment, StoreSizeError, device_error

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier. Bytes count whole pages; counters only grow."""

    name: TierName
    size_bytes: int
    used_bytes: int
    pinned_bytes: int
    entries: int
    hits: int
    evictions: int
    writes: int
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
_NAP_S = 0.05
"""Longest sleep of a waiter: pins released by the garbage collector do not notify waiters."""
LOW_WATER = 0.1
"""Share of the device tier kept free: a new embedding that does not fit there goes to the host tier."""
PROMOTE_READERS = 3
"""An embedding is copied to the device tier for every third reader who would read it there and found it on the host."""
_SUGGESTIONS = 64
"""Pending promotions kept; those that overflow are suggested again by later readers."""
_IDLE_S = 0.02
"""Pause of the migrator when nothing is due: far shorter than the time in which encoding fills the share kept free."""


class Store:
    """Thread-safe. `pin`, `contains`, `tier_of` and `Pin.release` take microseconds: call them from an event loop.

    `put` and `Pin.to_host` copy megabytes and may wait for other threads: call them from worker threads. An address is
    written by one thread at a time: other writers wait for it and then find the embedding held.
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
        self._on_evict = on_evict
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
        self.device_probe: DeviceMemory | None = None
        """Memory without rows, for others to try to open; None if there is no device tier that they can read."""
        self._device = None if on_device is None else self._device_tier(on_device, device)
        # In the order in which readers prefer them.
        self._tiers = (self._host,) if self._device is None else (self._host, self._device)
        on_gpu = on_device is not None and device.startswith("cuda")
        self._registered_with = device if on_gpu and segment.register_memory(memory, device) else ""
        if prefault and not self._registered_with:
            threading.Thread(target=self.segment.prefault, name="store-prefault", daemon=True).start()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for `_freed`
        self._writing: set[bytes] = set()
        self._forgotten: deque[Entry] = deque()
        self._reserved_pages = 0
        self._wanting_since: float | None = None  # since when there has been no space for `_wanting_pages`
        self._wanting_pages = 0
        self._low_pages = 0 if self._device is None else max(1, int(self._device.arena.pages * LOW_WATER))
        self._suggested: deque[bytes] = deque(maxlen=_SUGGESTIONS)
        self._misses = self._waits = self._refusals = self._demotions = self._promotions = 0

    def pin(self, address: bytes) -> Pin | None:
        """Return a pin on the embedding, on its host copy if there is one; None if it is not held.

        It counts as a hit; a copy in another tier counts as used.
        """
        found = None
        with self._lock:
            self._settle()
            for tier in self._tiers:
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
            if found is None:
                self._misses += 1
                return None
        return Pin(self, found)

    def to_device(self, pin: Pin) -> None:
        """Move a pin to the device tier's copy, for a reader on the device; if there is none, it stays as it is.

        An embedding that such readers find on the host repeatedly is copied to the device. Takes microseconds; for one
        thread.
        """
        entry = pin.entry
        if self._device is None or entry.tier is self._device:
            return
        if (copy := self._pin_in(self._device, entry.address)) is not None:
            pin.move_to(copy)
            return
        entry.device_readers += 1
        if entry.device_readers % PROMOTE_READERS == 0:
            self._suggested.append(entry.address)

    def put(
        self, address: bytes, rows: Tensor, grid: Grid, *, holder: str = "", is_reserved: bool = False
    ) -> Pin:
        """Store `rows` ([tokens, width], any device) under `address`; return a pin on the embedding held there.

        First writer wins: if the address is held, or another thread is writing it, `rows` are discarded.
        With a device tier, rows go there while it has space. The rows count against `holder`, whose least recently used
        go first while it has the most. `is_reserved`: into space that the caller reserved with `reserve`.
        Raises `OverloadedError` if everything stays pinned, or reserved by others, for `wait_s`, and
        `ImageLimitError` for an embedding larger than the host tier.
        """
        assert rows.ndim == 2, rows.shape
        assert (rows.shape[1], rows.dtype) == (self.width, self.dtype), (rows.shape, rows.dtype)
        entry, is_new = self.begin(address, len(rows), grid, holder, is_reserved=is_reserved)
        if is_new:
            self._fill(entry, map(flat, [rows]))  # rows that are discarded are not even made contiguous
        return Pin(self, entry)

    def begin(
        self,
        address: bytes,
        tokens: int,
        grid: Grid,
        holder: str = "",
        *,
        is_reserved: bool = False,
        is_shared: bool = False,
    ) -> tuple[Entry, bool]:
        """Begin what `put` does; return the pinned entry, and whether its bytes are to be written by the caller.

        It calls `commit` or `abandon` then. `is_shared`: into memory that other processes can open.
        """
        self._check_size(tokens)
        into = [
            tier for tier in reversed(self._tiers) if tier is self._host or tier.shared_as or not is_shared
        ]
        deadline = time.monotonic() + self._wait_s
        return self._begin(
            address, tokens, grid, holder, self._tiers, into, deadline, is_reserved=is_reserved
        )

    @property
    def device_memory(self) -> tuple[bytes, int] | None:
        """The name by which other processes open the device tier, and its size in bytes; None if they cannot."""
        if self._device is None or not self._device.shared_as:
            return None
        return self._device.shared_as, self._device.memory.numel()

    def receive(self, address: bytes, tokens: int, grid: Grid, holder: str = "") -> Incoming | None:
        """Return where to write rows that arrive piece by piece, in the host tier; None if they are held.

        They count against `holder` from now on.
        Takes microseconds: call it from an event loop. Raises `OverloadedError` at once if everything is pinned or
        reserved, or another thread is writing the address, and `ImageLimitError` if the host tier is too small for it.
        """
        self._check_size(tokens)
        entry, is_new = self._begin(
            address, tokens, grid, holder, self._tiers, (self._host,), time.monotonic()
        )
        if is_new:
            return Incoming(self, entry, self.dtype)
        self.unpin(entry)
        return None

    def reserve(self, tokens: Sequence[int], *, wait: bool = True) -> int:
        """Reserve space for embeddings about to be computed; return how many of them, from the first on, fit.

        No other writer takes the space. Call `release` once for each embedding reserved, after `put` or instead of it.
        Raises what `put` would, before rows are computed that could not be stored: with `wait`, `OverloadedError` once
        space for the first, or for less, has been lacking for `wait_s`, for any caller who waits; later callers get it
        at once. Without `wait`, none may fit.
        """
        self._check_size(tokens[0])
        pages = [self.layout.pages(count) for count in tokens]
        with self._lock:
            self._settle()
            while not (count := self._room_for(pages)) and wait:
                if self._wanting_since is None or pages[0] < self._wanting_pages:
                    self._wanting_since, self._wanting_pages = time.monotonic(), pages[0]
                self._wait(self._wanting_since + self._wait_s)
                self._settle()
            self._reserved_pages += sum(pages[:count])
            return count

    def release(self, tokens: int) -> None:
        """Undo `reserve` for one embedding."""
        with self._lock:
            self._reserved_pages -= self.layout.pages(tokens)
            self._wake()

    def contains(self, address: bytes) -> bool:
        """Whether any tier holds the embedding now."""
        return self.tier_of(address) is not None

    def tier_of(self, address: bytes) -> TierName | None:
        """Return the tier that `pin` would find, or None; takes no pin and counts no hit."""
        with self._lock:
            return next((tier.name for tier in self._tiers if address in tier.entries), None)

    def grids(self) -> dict[bytes, Grid]:
        """Return address and grid of every embedding held now."""
        with self._lock:
            return {address: entry.grid for tier in self._tiers for address, entry in tier.entries.items()}

    def evict(self, address: bytes) -> bool:
        """Drop the embedding from all tiers; return False, and do nothing, if it is absent, pinned or being written."""
        with self._lock:
            self._settle()
            entries = [tier.entries[address] for tier in self._tiers if address in tier.entries]
            if not entries or any(entry.pins for entry in entries) or address in self._writing:
                return False
            for entry in entries:
                entry.tier.drop(entry)
            self._wake()
        self._tell(entries)
        return True

    def flush(self) -> int:
        """Drop every embedding that is not pinned; return how many copies were dropped."""
        with self._lock:
            self._settle()
            entries = [entry for tier in self._tiers for entry in tier.entries.values() if not entry.pins]
            for entry in entries:
                entry.tier.drop(entry)
            self._wake()
        self._tell(entries)
        return len(entries)

    def keep_moving(self) -> None:
        """Demote and promote until the store is closed: a thread's target. Returns at once without a device tier."""
        while self._device is not None and not self._closed.is_set():
            if not self.move_once():
                self._closed.wait(_IDLE_S)

    def move_once(self) -> bool:
        """Make one move between the tiers; return False if none is due or possible. Takes milliseconds: it copies.

        Demotion copies an embedding from the device to the host, then drops it from the device. Promotion copies one
        that `to_device` found on the host to the device.
        """
        if (device := self._device) is None:
            return False
        with self._lock:
            self._settle()
            is_due = device.arena.free_pages < self._low_pages
            victim = device.order.victim(time.monotonic()) if is_due else None
            if victim is not None:
                device.pin(victim)
        if victim is not None:
            return self._demote(victim)
        return bool(self._suggested) and self._promote(self._suggested.popleft(), device)

    def stats(self) -> StoreStats:
        """Return current statistics. Walks all entries: for scrapes and admin calls, not for every request."""
        with self._lock:
            self._settle()
            tiers = [(tier, list(tier.entries.values())) for tier in reversed(self._tiers)]
        entries = [entry for _, held in tiers for entry in held]
        return StoreStats(
            tiers=tuple(_tier_stats(tier, held) for tier, held in tiers),
            pins=sum(entry.pins for entry in entries),
            misses=self._misses,
            waits=self._waits,
            refusals=self._refusals,
            demotions=self._demotions,
            promotions=self._promotions,
            largest=tuple(map(_entry_stats, nlargest(_LARGEST, entries, key=lambda entry: entry.tokens))),
        )

    def close(self) -> None:
        """Remove the segment's file and stop the migrator. Views of rows stay valid; `put` must not be called again."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._registered_with:
            segment.unregister_memory(self._host.memory, self._registered_with)
        self.segment.close()

    # For pins: see `EntryStore`

    def unpin(self, entry: Entry) -> None:
        """Undo one pin."""
        with self._lock:
            entry.tier.unpin(entry)
            self._wake()

    def unpin_later(self, entry: Entry) -> None:
        """Undo one pin at the next call. For the garbage collector, which may run while the lock is held."""
        self._forgotten.append(entry)

    def copy_to_host(self, entry: Entry, wait_s: float) -> Entry:
        """Return a pinned copy of a pinned entry in the host tier, made now if there is none."""
        host, deadline = (self._host,), time.monotonic() + wait_s
        copy, is_new = self._begin(
            entry.address, entry.tokens, entry.grid, entry.holder, host, host, deadline
        )
        if is_new:
            self._fill(copy, entry.tier.pieces(entry))
        return copy

    def commit(self, entry: Entry) -> None:
        """Make a reserved entry visible whose bytes are written; it stays pinned once."""
        with self._lock:
            entry.tier.commit(entry)
            self._writing.discard(entry.address)
            self._wake()

    def abandon(self, entry: Entry) -> None:
        """Free the pages of a reserved entry whose bytes will not be complete."""
        with self._lock:
            entry.tier.release(entry)
            self._writing.discard(entry.address)
            self._wake()

    def _device_tier(self, memory: DeviceMemory, device: str) -> Tier:
        """Return the device tier over its memory, and set `device_probe` if other processes can open that."""
        if memory.name:
            self.device_probe = _allocate(device, CUDA_SHARED_BYTES)
        else:
            log.warning(
                "store: other processes cannot read the device tier, and get its rows by way of the host: %s",
                memory.private_because,
            )
        generations = self.segment.device_generations
        return Tier("device", tensor_over(memory, device), self.layout, generations, memory.name)

    # Writing and moving

    def _begin(
        self,
        address: bytes,
        tokens: int,
        grid: Grid,
        holder: str,
        held_in: Sequence[Tier],
        into: Sequence[Tier],
        deadline: float,
        *,
        is_reserved: bool = False,
    ) -> tuple[Entry, bool]:
        """Return the embedding, pinned, if a tier in `held_in` has it, and False; else reserved pages, and True.

        The caller is then the address's only writer, until `commit` or `abandon`. Waits for another writer, and while
        too much is pinned or reserved by others, until `deadline` (monotonic): then `OverloadedError`.
        """
        dropped: list[Entry] = []
        try:
            with self._lock:
                while True:
                    self._settle()
                    for tier in held_in:
                        if (held := tier.entries.get(address)) is not None:
                            tier.pin(held)
                            return held, False
                    if address not in self._writing:
                        break
                    self._wait(deadline)
                self._writing.add(address)
                try:
                    while True:
                        if is_reserved or self._room_for([self.layout.pages(tokens)]):
                            entry = self._place(address, tokens, grid, holder, into, dropped)
                            if entry is not None:
                                return entry, True
                        self._wait(deadline)
                        self._settle()
                except BaseException:  # any error: an address that stays in `_writing` can never be put
                    self._writing.discard(address)
                    self._wake()
                    raise
        finally:
            self._tell(dropped)

    def _place(
        self,
        address: bytes,
        tokens: int,
        grid: Grid,
        holder: str,
        into: Sequence[Tier],
        dropped: list[Entry],
    ) -> Entry | None:
        """Reserve pages in the first tier that has them free; else evict others from the last, the host."""
        for tier in into:
            if (entry := tier.reserve(address, tokens, grid, holder)) is not None:
                return entry
        host = into[-1]
        for victim in host.make_room(tokens, holder):
            dropped.append(victim)
            if (entry := host.reserve(address, tokens, grid, holder)) is not None:
                return entry
        return None

    def _fill(self, entry: Entry, sources: Iterable[Tensor]) -> None:
        """Copy the embedding's bytes into its reserved pages and make it visible; it stays pinned once."""
        try:
            copy_bytes(entry.tier.pieces(entry), sources)
        except BaseException:  # any error: pages that stay reserved are lost
            self.abandon(entry)
            raise
        self.commit(entry)

    def _demote(self, victim: Entry) -> bool:
        """Copy a pinned entry to the host unless it is there, then drop it; not while the host is full."""
        try:
            copy = self.copy_to_host(victim, wait_s=0.0)
        except OverloadedError:
            self.unpin(victim)
            return False
        self.unpin(copy)
        with self._lock:
            victim.tier.unpin(victim)
            is_gone = not victim.pins  # no reader has pinned it since
            if is_gone:
                victim.tier.drop(victim)
                self._demotions += 1
            self._wake()
        if is_gone:
            self._tell([victim])
        return is_gone

    def _promote(self, address: bytes, device: Tier) -> bool:
        """Copy a host entry into free pages of the device; demotion keeps some free."""
        if (source := self._pin_in(self._host, address)) is None:
            return False
        try:
            with self._lock:
                if address in self._writing or address in device.entries:
                    return False
                copy = device.reserve(address, source.tokens, source.grid, source.holder)
                if copy is None:
                    return False
                self._writing.add(address)
            self._fill(copy, source.tier.pieces(source))
        finally:
            self.unpin(source)
        self.unpin(copy)
        self._promotions += 1
        return True

    def _pin_in(self, tier: Tier, address: bytes) -> Entry | None:
        """Return the copy in `tier`, pinned, or None; not counted as a hit."""
        with self._lock:
            entry = tier.entries.get(address)
            if entry is not None:
                tier.pin(entry)
            return entry

    # With the lock held

    def _room_for(self, pages: Sequence[int]) -> int:
        """Return how many of these embeddings, from the first on, fit beside what is pinned, written or reserved."""
        free = sum(tier.arena.free_pages for tier in self._tiers)
        room = free + self._host.evictable_pages - self._reserved_pages
        return sum(needed <= room for needed in accumulate(pages))

    def _wait(self, deadline: float) -> None:
        """Wait until something is freed; raises `OverloadedError` at the deadline."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self._refusals += 1
            raise OverloadedError(
                "the store is full of embeddings that are in use: retry", retry_after_ms=1000
            )
        self._waits += 1
        self._waiting += 1
        try:
            self._freed.wait(min(left_s, _NAP_S))
        finally:
            self._waiting -= 1

    def _wake(self) -> None:
        """Wake the threads that wait: pages, or an address, may be free now."""
        if self._wanting_since is not None and self._room_for([self._wanting_pages]):
            self._wanting_since = None
        if self._waiting:
            self._freed.notify_all()

    def _settle(self) -> None:
        """Undo pins whose holders were garbage-collected."""
        while self._forgotten:
            entry = self._forgotten.popleft()
            entry.tier.unpin(entry)
            self._wake()

    def _tell(self, dropped: Iterable[Entry]) -> None:
        """Report the entries dropped from a tier: without the lock."""
        if self._on_evict is not None:
            for entry in dropped:
                self._on_evict(entry.address, entry.tier.name)

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


def flat(rows: Tensor) -> Tensor:
    """Return the bytes of rows, uint8 [bytes]."""
    return rows.contiguous().view(torch.uint8).view(-1)


def _allocate(device: str, size_bytes: int) -> DeviceMemory:
    try:
        return allocate(device, size_bytes)
    except DeviceMemoryError as error:
        raise device_error(device, size_bytes, str(error)) from error


def tensor_over(memory: DeviceMemory, device: str) -> Tensor:
    """Return memory as a tensor, uint8 [bytes], without copying it."""
    content = memory.content
    if isinstance(content, memoryview):
        return torch.frombuffer(content, dtype=torch.uint8)
    tensor = torch.as_tensor(content, device=device)
    assert tensor.data_ptr() == content.address, (
        "the tier is a copy of its memory, which nobody else would see"
    )
    return tensor


def _tier_stats(tier: Tier, entries: list[Entry]) -> TierStats:
    page_bytes, arena = tier.layout.page_bytes, tier.arena
    pinned = sum(entry.pages for entry in entries if entry.pins)
    return TierStats(
        name=tier.name,
        size_bytes=arena.pages * page_bytes,
        used_bytes=(arena.pages - arena.free_pages) * page_bytes,
        pinned_bytes=pinned * page_bytes,
        entries=len(entries),
        hits=tier.hits,
        evictions=tier.evictions,
        writes=tier.writes,
        largest_free_bytes=arena.largest_free_run * page_bytes,
    )


def _entry_stats(entry: Entry) -> EntryStats:
    return EntryStats(entry.address, entry.tier.name, entry.row_bytes, entry.tokens, entry.pins, entry.hits)
