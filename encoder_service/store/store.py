"""The embedding store: embeddings by address, in a host tier and optional tiers on device and disk, bounded in bytes.

One lock, held for microseconds, guards all bookkeeping. Bytes are copied outside the lock, into pages that no reader
sees yet.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from encoder_contract.device_memory import CUDA_SHARED_BYTES, DeviceMemory, DeviceMemoryError, allocate
from encoder_contract.errors import ImageLimitError, OverloadedError
from encoder_contract.extents import cut, pairs, views
from encoder_contract.fleet_key import FleetKey
from encoder_contract.framing import checksum
from encoder_contract.geometry import Grid
from encoder_service.store.disk import THREADS, Disk, DiskFile
from encoder_service.store.pin import Pin
from encoder_service.store.registration import CudaRegistration, within_piece
from encoder_service.store.segment import GIB, Segment, StoreSizeError, device_error
from encoder_service.store.tier import AnyTier, Entry, PageLayout, Tier, TierName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier. Bytes are counted in whole pages. Counters only grow."""

    name: AnyTier
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
    """Statistics of the whole store. `tiers` lists the fastest first."""

    tiers: tuple[TierStats, ...]
    damaged_files: int
    is_disk_off: bool
    misses: int
    pins: int
    demotions: int
    promotions: int
    waits: int
    refusals: int


PAGE_BYTES = 64 << 10
"""A page holds as many rows as fit into this size, at least one. An embedding wastes half a page on average."""
LARGEST = 10
"""How many of the largest embeddings the store names."""
_MAX_SLEEP_S = 0.05
"""Longest sleep of a waiting thread: a pin that the garbage collector releases does not wake it."""
LOW_WATER = 0.1
"""Share of the device tier that the migrator keeps free. New embeddings go to the host while the device has no room."""
HOST_LOW_WATER = 0.05
"""The same of the host tier, with a disk; at least the largest embedding, up to a quarter of the tier."""
WRITE_CHANCE = 0.1
"""Embeddings with a lower chance of another use are not written to the disk, but for every `SAMPLED`th, whose later use
shows that their like should be."""
SAMPLED = 16
PROMOTE_READERS = 3
"""Of an embedding's readers that prefer the device tier and find it on the host, every third has it copied there."""
_MAX_PROMOTIONS = 64
"""Most pending promotions. When more arrive, the oldest are dropped, and later readers suggest them again."""
_IDLE_S = 0.02
"""Pause of the migrator when there is nothing to move: far shorter than encoding takes to fill the free share."""


class Store:
    """Embeddings by address. Thread-safe.

    Rows are written in three steps: `reserve` pages, fill them, `commit`. The first to commit an address wins.

    `pin`, `reserve`, `commit` and `Pin.release` take microseconds: an event loop may call them. `copy` and
    `Pin.to_host` copy megabytes and may wait for other threads: call them from worker threads.
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
        on_evict: Callable[[bytes, AnyTier], None] | None = None,
        prefault: bool = False,
        disk_folder: Path | None = None,
        disk_bytes: int = 0,
        disk_key: FleetKey | None = None,
    ) -> None:
        """Allocate all memory. Raises `StoreSizeError`, which names the setting to change, if that fails; `DiskError`.

        A row has `width` elements of `dtype`. A writer waits for up to `wait_s` while everything is pinned. The thread
        that drops an embedding from a tier calls `on_evict(address, tier)`, without the lock. By then another tier
        may hold the address, or the same tier may hold it again: ask `contains`. `prefault` touches the host tier's
        pages in the background. With `disk_folder`, embeddings leave the host for files of `disk_bytes` in all,
        signed with `disk_key`.
        """
        self.width, self.dtype = width, dtype
        row_bytes = width * dtype.itemsize
        self.layout = PageLayout(row_bytes, max(1, PAGE_BYTES // row_bytes))
        self.wait_s = wait_s
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
        """Memory without rows, which other processes try to open; None without a device tier that they can read."""
        self._device = None if on_device is None else self._device_tier(on_device, device)
        # In the order in which `pin` looks.
        self._tiers = (self._host,) if self._device is None else (self._host, self._device)
        on_gpu = on_device is not None and device.startswith("cuda")
        self._registration = CudaRegistration(memory, device) if on_gpu else None
        if prefault and not on_gpu:
            threading.Thread(target=self.segment.prefault, name="store-prefault", daemon=True).start()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for `_freed`
        self._moving: set[bytes] = set()  # addresses that a thread copies to another tier
        self._collected: deque[Entry] = deque()  # one per pin that was garbage-collected and is still counted
        self.on_freed: list[Callable[[], None]] = []
        """Called once when there may be pages for whom `reserve` found none; on any thread, with the lock held."""
        self._is_awaited = False  # whether to call them
        self._low_host_pages = max(
            1, int(self._host.arena.pages * HOST_LOW_WATER)
        )  # grows with the largest embedding
        self._unlikely = 0  # embeddings that were dropped because another use is unlikely
        self._low_pages = 0 if self._device is None else max(1, int(self._device.arena.pages * LOW_WATER))
        self._promotions_due: deque[bytes] = deque(maxlen=_MAX_PROMOTIONS)
        self._misses = self._waits = self._refusals = self._demotions = self._promotions = 0
        self._loaders = ThreadPoolExecutor(THREADS, "disk-load")
        self._disk: Disk | None = None
        if disk_folder is not None:
            try:
                self._disk = Disk(disk_folder, disk_bytes, row_bytes, key=disk_key, on_drop=self._left_disk)
            except BaseException:
                self.segment.close()
                raise

    def pin(self, address: bytes) -> Pin | None:
        """Pin the embedding, its host copy if there is one; return None if it is not in memory: see `load_later`.

        Counts a hit or a miss. A second copy, in another tier, counts as used.
        """
        found = None
        with self._lock:
            self._unpin_collected()
            for tier in self._tiers:
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
                self._misses += not self._is_on_disk(address)
                return None
        return Pin(self, found)

    def load_later(self, address: bytes, holder: str = "") -> "Future[Pin | None] | None":
        """Read an embedding from the disk into the host tier; return None if it is not there.

        The future's result is a pin, or None if the file was damaged. It raises
        `OverloadedError` if everything stays in use for `wait_s`.
        """
        if self._disk is None or address not in self._disk:
            return None
        return self._loaders.submit(self._load, address, holder)

    def to_device(self, pin: Pin) -> None:
        """Move a pin to the copy in the device tier, for a reader on the device; without one, leave the pin unchanged.

        If such readers keep finding an embedding only on the host, the migrator copies it to the device. Takes
        microseconds. Call it from one thread.
        """
        entry = pin.entry
        if self._device is None or entry.tier is self._device:
            return
        with self._lock:
            copy = self._pin_first([self._device], entry.address)
        if copy is not None:
            pin.move_to(copy)
            return
        entry.device_readers += 1
        if entry.device_readers % PROMOTE_READERS == 0:
            self._promotions_due.append(entry.address)

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
        into = [self._host] if on_host else [tier for tier in reversed(self._tiers) if tier.is_shared]
        dropped: list[Entry] = []
        try:
            with self._lock:
                self._unpin_collected()
                if (held := self._pin_first(self._tiers, address)) is not None:
                    return Pin(self, held)
                entry = self._place(address, tokens, grid, holder, into, dropped)
                if entry is None:
                    self._is_awaited = True
                    self._waits += 1
                return entry
        finally:
            self._report_dropped(dropped)

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
        with self._lock:
            pins = [Pin(self, self._committed(entry)) for entry in entries]
            self._wake()
        return pins

    def abandon(self, entry: Entry) -> None:
        """Free the pages of a reserved entry that is not committed, once nobody can write to them any more."""
        with self._lock:
            entry.tier.release(entry)
            self._wake()

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
        with self._lock:
            self._unpin_collected()
            needed = self.layout.pages(tokens)
            fits = any(tier.arena.free_pages >= needed for tier in self._tiers) or (
                self._host.arena.free_pages + self._host.evictable_pages >= needed
            )
            self._is_awaited |= not fits
            return fits

    def full_error(self) -> OverloadedError:
        """Return the error for rows that found no space for `wait_s`, and count it."""
        self._refusals += 1
        return OverloadedError(
            "the store is full, and all its embeddings are in use: retry", retry_after_ms=1000
        )

    @property
    def device_memory(self) -> tuple[bytes, int] | None:
        """The name by which other processes open the device tier, and its size in bytes; None if they cannot."""
        if self._device is None or not self._device.shared_as:
            return None
        return self._device.shared_as, self._device.memory.numel()

    def contains(self, address: bytes) -> bool:
        """Whether any tier holds the embedding. Takes no pin and counts no hit."""
        with self._lock:
            return any(address in tier.entries for tier in self._tiers) or self._is_on_disk(address)

    def grid(self, address: bytes) -> Grid | None:
        """Return the grid of an embedding that any tier holds, else None. Counts no hit."""
        with self._lock:
            for tier in self._tiers:
                if (entry := tier.entries.get(address)) is not None:
                    return entry.grid
        file = self._disk.find(address) if self._disk is not None else None
        return file.grid if file is not None else None

    def grids(self) -> dict[bytes, Grid]:
        """Return the grid of every embedding held, by address."""
        files = self._disk.files() if self._disk is not None else []
        with self._lock:
            held = [list(tier.entries.values()) for tier in self._tiers]
        return {file.address: file.grid for file in files} | {
            entry.address: entry.grid for entries in held for entry in entries
        }

    def evict(self, address: bytes) -> bool:
        """Drop the embedding from all tiers. If it is absent, pinned or being written, do nothing and return False."""
        with self._lock:
            self._unpin_collected()
            entries = [tier.entries[address] for tier in self._tiers if address in tier.entries]
            is_on_disk = self._is_on_disk(address)
            if not (entries or is_on_disk) or any(entry.pins for entry in entries) or address in self._moving:
                return False
            for entry in entries:
                entry.tier.drop(entry)
            self._wake()
        self._report_dropped(entries)
        if self._disk is not None:
            self._disk.drop(address)
        return True

    def flush(self) -> int:
        """Drop every embedding that is not pinned; return how many copies were dropped."""
        with self._lock:
            self._unpin_collected()
            entries = [entry for tier in self._tiers for entry in tier.entries.values() if not entry.pins]
            for entry in entries:
                entry.tier.drop(entry)
            self._wake()
        self._report_dropped(entries)
        files = self._disk.clear() if self._disk is not None else 0
        return len(entries) + files

    def keep_moving(self) -> None:
        """Move embeddings until the store is closed (a thread's target). With a single tier, return at once."""
        while (self._device is not None or self._disk is not None) and not self._closed.is_set():
            if not (self._may_move and self.move_once()):
                self._closed.wait(_IDLE_S)

    @property
    def _may_move(self) -> bool:
        """Whether `move_once` may find work. Without the lock: an old answer costs one more wait."""
        if self._device is not None and self._device.arena.free_pages < self._low_pages:
            return True
        return bool(self._promotions_due) or (self._disk is not None and self.is_host_low)

    def move_once(self) -> bool:
        """Move one embedding between tiers; return False if none is due or possible. Copies, so takes milliseconds.

        Demotion copies an embedding from the device to the host, or from the host to the disk, then drops it there.
        Promotion copies an embedding that `to_device` found on the host to the device.
        """
        return self._move_on_device() or self._demote_to_disk()

    def _move_on_device(self) -> bool:
        if (device := self._device) is None:
            return False
        with self._lock:
            self._unpin_collected()
            is_due = device.arena.free_pages < self._low_pages
            victim = device.order.victim(time.monotonic()) if is_due else None
            if victim is not None:
                device.pin(victim)
        if victim is not None:
            return self._demote(victim)
        return bool(self._promotions_due) and self._promote(self._promotions_due.popleft(), device)

    def stats(self) -> StoreStats:
        """Return statistics. Takes microseconds, however many embeddings are held."""
        with self._lock:
            self._unpin_collected()
            memory = map(_tier_stats, reversed(self._tiers))
            return StoreStats(
                tiers=(*memory, *([] if self._disk is None else [_disk_stats(self._disk)])),
                damaged_files=0 if self._disk is None else self._disk.damaged,
                is_disk_off=self._disk is not None and self._disk.is_off,
                pins=sum(tier.pins for tier in self._tiers),
                misses=self._misses,
                waits=self._waits,
                refusals=self._refusals,
                demotions=self._demotions,
                promotions=self._promotions,
            )

    def largest(self) -> list[EntryStats]:
        """Return the largest embeddings. Walks all of them, without the lock."""
        with self._lock:
            held = [list(tier.entries.values()) for tier in reversed(self._tiers)]
        entries = nlargest(LARGEST, chain.from_iterable(held), key=lambda entry: entry.tokens)
        return list(map(_entry_stats, entries))

    def close(self) -> None:
        """Remove the segment's file and stop the migrator. Views of rows stay valid. Write nothing afterwards."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._loaders.shutdown()
        if self._disk is not None:
            self._disk.close()
        if self._registration is not None:
            self._registration.close()
        self.segment.close()

    # For pins: the contract is in `EntryStore`

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.tier.unpin(entry)
            self._wake()

    def unpin_later(self, entry: Entry) -> None:
        self._collected.append(entry)
        self._tell_freed()

    def copy_to_host(self, entry: Entry, wait_s: float) -> Entry:
        copy, is_new = self._pin_or_reserve(entry, entry.holder, [self._host], wait_s)
        if is_new:
            self._move(entry, copy)
        return copy

    def _device_tier(self, memory: DeviceMemory, device: str) -> Tier:
        """Return the device tier over `memory`. Set `device_probe` if other processes can open that memory."""
        if memory.name:
            self.device_probe = _allocate(device, CUDA_SHARED_BYTES)
        else:
            log.warning(
                "store: other processes cannot read the device tier, so they get its rows through the host tier: %s",
                memory.private_because,
            )
        generations = self.segment.device_generations
        return Tier("device", tensor_over(memory, device), self.layout, generations, memory.name)

    # Writing and moving

    def _pin_or_reserve(
        self, source: Entry | DiskFile, holder: str, held_in: Sequence[Tier], wait_s: float
    ) -> tuple[Entry, bool]:
        """Return a pinned entry of the host tier, and whether it is newly reserved: no tier in `held_in` held it.

        Then the caller is the only thread that moves the address, until `_moving_ends`. Waits for another thread that
        moves it, and for space. Raises `OverloadedError` after `wait_s`.
        """
        address, deadline = source.address, time.monotonic() + wait_s
        dropped: list[Entry] = []
        try:
            with self._lock:
                while True:
                    self._unpin_collected()
                    if (held := self._pin_first(held_in, address)) is not None:
                        return held, False
                    if address not in self._moving:
                        entry = self._place(
                            address, source.tokens, source.grid, holder, (self._host,), dropped
                        )
                        if entry is not None:
                            self._moving.add(address)
                            return entry, True
                    self._wait(deadline)
        finally:
            self._report_dropped(dropped)

    def _place(
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
        self._low_host_pages = max(
            self._low_host_pages, min(self.layout.pages(tokens), host.arena.pages // 4)
        )
        for victim in host.make_room(address, tokens, holder):
            dropped.append(victim)
            if (entry := host.reserve(address, tokens, grid, holder)) is not None:
                return entry
        return None

    def _move(self, source: Entry, copy: Entry) -> None:
        """Copy a pinned entry into pages of another tier, reserved with `_moving`, and make it visible, pinned once."""
        copy.continue_from(source)
        with self._moving_ends(copy.address):
            with self.filling(copy):
                copy_bytes(copy.tier.pieces(copy), source.tier.pieces(source))
            with self._lock:
                copy.tier.commit(copy)

    @contextmanager
    def _moving_ends(self, address: bytes) -> Iterator[None]:
        """Let others move the address after the block."""
        try:
            yield
        finally:
            with self._lock:
                self._moving.discard(address)
                self._wake()

    def _demote(self, victim: Entry) -> bool:
        """Copy a pinned entry to the host unless the host holds it, then drop it. Do nothing while the host is full."""
        try:
            copy = self.copy_to_host(victim, wait_s=0.0)
        except OverloadedError:
            self.unpin(victim)
            return False
        self.unpin(copy)
        return self._drop_demoted(victim)

    def _drop_demoted(self, victim: Entry) -> bool:
        """Drop a pinned entry, unless a reader has pinned it too."""
        with self._lock:
            victim.tier.unpin(victim)
            is_unused = not victim.pins
            if is_unused:
                victim.tier.order.dropped(victim)
                victim.tier.drop(victim)
                self._demotions += 1
            self._wake()
        if is_unused:
            self._report_dropped([victim])
        return is_unused

    def _demote_to_disk(self) -> bool:
        """Write the host's next victim to the disk ahead of need, so that no writer of rows waits for the disk."""
        if (disk := self._disk) is None or disk.is_off:
            return False
        host = self._host
        with self._lock:
            self._unpin_collected()
            is_due = self.is_host_low
            victim = host.order.victim(time.monotonic()) if is_due else None
            if victim is None:
                return False
            is_likely = victim.reuse.chance >= WRITE_CHANCE
            self._unlikely += not is_likely
            host.pin(victim)
        if victim.address not in disk and (is_likely or self._unlikely % SAMPLED == 0):
            rows = self.rows(victim)
            if victim.checksum is None:
                victim.checksum = checksum(rows)
            disk.write(victim.address, victim.tokens, victim.grid, rows, victim.checksum, victim.holder)
        return self._drop_demoted(victim)

    @property
    def is_host_low(self) -> bool:
        """Whether the host tier has so little room that embeddings should move to the disk."""
        return self._host.arena.free_pages < self._low_host_pages

    def _load(self, address: bytes, holder: str) -> Pin | None:
        """Return a pin on an embedding of the disk, in memory by now; None if its file is gone or damaged."""
        disk = self._disk
        assert disk is not None
        if (file := disk.find(address)) is None:
            return self.pin(address)
        if self.layout.pages(file.tokens) > self._host.arena.pages:
            disk.drop(address)
            return None
        entry, is_new = self._pin_or_reserve(file, holder, self._tiers, self.wait_s)
        if not is_new:
            return Pin(self, entry)
        with self._moving_ends(address):
            with self.filling(entry):
                entry.checksum = disk.read(file, self.rows(entry))
            if entry.checksum is None:
                self.abandon(entry)
                return None
            with self._lock:
                return Pin(self, self._recalled(entry))

    def _promote(self, address: bytes, device: Tier) -> bool:
        """Copy a host entry into free pages of the device. Demotion keeps some pages free."""
        with self._lock:
            source = self._pin_first([self._host], address)
        if source is None:
            return False
        try:
            with self._lock:
                if address in self._moving or address in device.entries:
                    return False
                copy = device.reserve(address, source.tokens, source.grid, source.holder)
                if copy is None:
                    return False
                self._moving.add(address)
            self._move(source, copy)
        finally:
            self.unpin(source)
        self.unpin(copy)
        self._promotions += 1
        return True

    # With the lock held

    def _pin_first(self, tiers: Iterable[Tier], address: bytes) -> Entry | None:
        """Pin and return the copy in the first of `tiers` that holds the embedding. Counts no hit."""
        for tier in tiers:
            if (held := tier.entries.get(address)) is not None:
                tier.pin(held)
                return held
        return None

    def _committed(self, entry: Entry) -> Entry:
        """Make an entry visible and return it; if its address is held by now, free its pages and pin what is held."""
        if (held := self._pin_first(self._tiers, entry.address)) is not None:
            entry.tier.release(entry)
            return held
        entry.tier.commit(entry)
        return entry

    def _recalled(self, entry: Entry) -> Entry:
        """Commit an entry that was read from the disk. That it was there counts for its chance of another use."""
        now = time.monotonic()
        if not self._host.order.recall(entry, now):
            entry.uses = 1  # before it went to the disk: this is another use
        committed = self._committed(entry)
        committed.tier.order.use(committed, now)
        return committed

    def _wait(self, deadline: float) -> None:
        """Wait until a thread frees pages or has moved an address. Raises `OverloadedError` at the deadline."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise self.full_error()
        self._waits += 1
        self._waiting += 1
        try:
            self._freed.wait(min(left_s, _MAX_SLEEP_S))
        finally:
            self._waiting -= 1

    def _wake(self) -> None:
        """Wake the waiting threads: there may be free pages, or an address without a writer."""
        if self._waiting:
            self._freed.notify_all()
        self._tell_freed()

    def _tell_freed(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            for call in self.on_freed:
                call()

    def _unpin_collected(self) -> None:
        """Undo the pins that were garbage-collected."""
        while self._collected:
            entry = self._collected.popleft()
            entry.tier.unpin(entry)
            self._wake()

    # Without the lock

    def _left_disk(self, address: bytes) -> None:
        if self._on_evict is not None:
            self._on_evict(address, "disk")

    def _is_on_disk(self, address: bytes) -> bool:
        return self._disk is not None and address in self._disk

    def _report_dropped(self, dropped: Iterable[Entry]) -> None:
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
    """Copy flat uint8 tensors into others of equal total length, possibly split elsewhere, and wait for completion.

    Between a GPU and registered host memory, all pieces are copied asynchronously, with one wait at the end. The
    sources must be ready on the calling thread's current stream.
    """
    devices = set()
    for target, source in pairs(cut(targets, within_piece), cut(sources, within_piece)):
        target.copy_(source, non_blocking=True)
        devices |= {piece.device for piece in (source, target) if piece.is_cuda}
    for device in devices:
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()  # a blocking event uses no core while it waits; waiting for the stream would


def flat(rows: Tensor) -> Tensor:
    """Return the bytes of rows as uint8 [bytes]."""
    return rows.contiguous().view(torch.uint8).view(-1)


def _allocate(device: str, size_bytes: int) -> DeviceMemory:
    try:
        return allocate(device, size_bytes)
    except DeviceMemoryError as error:
        raise device_error(device, size_bytes, str(error)) from error


def tensor_over(memory: DeviceMemory, device: str) -> Tensor:
    """Return device memory as a tensor, uint8 [bytes], without a copy."""
    content = memory.content
    if isinstance(content, memoryview):
        return torch.frombuffer(content, dtype=torch.uint8)
    tensor = torch.as_tensor(content, device=device)
    assert tensor.data_ptr() == content.address, (
        "torch copied the memory: other processes would not see the rows"
    )
    return tensor


def _tier_stats(tier: Tier) -> TierStats:
    page_bytes, arena = tier.layout.page_bytes, tier.arena
    return TierStats(
        name=tier.name,
        size_bytes=arena.pages * page_bytes,
        used_bytes=(arena.pages - arena.free_pages) * page_bytes,
        pinned_bytes=tier.pinned_pages * page_bytes,
        entries=len(tier.entries),
        hits=tier.hits,
        evictions=tier.evictions,
        writes=tier.writes,
        largest_free_bytes=arena.largest_free_run * page_bytes,
    )


def _disk_stats(disk: Disk) -> TierStats:
    return TierStats(
        name="disk",
        size_bytes=0 if disk.is_off else disk.max_bytes,
        used_bytes=disk.used_bytes,
        pinned_bytes=0,
        entries=len(disk),
        hits=disk.hits,
        evictions=disk.evictions,
        writes=disk.writes,
        largest_free_bytes=max(0, disk.max_bytes - disk.used_bytes),
    )


def _entry_stats(entry: Entry) -> EntryStats:
    return EntryStats(entry.address, entry.tier.name, entry.row_bytes, entry.tokens, entry.pins, entry.hits)
