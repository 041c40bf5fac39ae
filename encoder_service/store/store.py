"""Store: embeddings by address, in a device and a host tier, each with its bound in bytes."""

import threading
import time
from collections.abc import Callable, Sequence
from heapq import nlargest
from pathlib import Path

import torch
from torch import Tensor

from encoder_contract.errors import ImageLimitError
from encoder_service.store import pinned
from encoder_service.store.capacity import GIB, StoreSizeError, device_error
from encoder_service.store.entry_table import EntryTable
from encoder_service.store.pin import Pin
from encoder_service.store.segment import Segment
from encoder_service.store.stats import EntryStats, StoreStats, TierStats
from encoder_service.store.tier_migrator import TierMigrator
from encoder_service.store.tiers import Entry, Grid, Layout, Tier, TierName

PAGE_BYTES = 64 << 10
"""A page is as many rows as fit this, at least one: an embedding loses half a page on average."""
_LARGEST = 10


class Store:
    """Thread-safe. `pin`, `contains`, `tier_of` and `Pin.release` take microseconds and suit an event loop.

    `put` and `Pin.to_host` copy megabytes and may wait for others: they belong in worker threads.
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
        promotes: bool = False,
        prefault: bool = False,
    ) -> None:
        """Take all memory now. Raises `StoreSizeError`, which names what to set, when it is not to be had.

        A row is `width` elements of `dtype`. A writer waits `wait_s` while everything is pinned. `on_evict`
        is told each (address, tier) that was dropped, without the lock, by the thread that made it happen;
        the address may be on another tier still, or held again: ask `tier_of`. `promotes`
        says that hits bring embeddings to the device tier: for when rows are read there. `prefault` touches the
        host tier's pages in the background.
        """
        self.width, self.dtype = width, dtype
        row_bytes = width * dtype.itemsize
        self.layout = Layout(row_bytes, max(1, PAGE_BYTES // row_bytes))
        self._wait_s = wait_s
        self._promotes = promotes
        self._closed = threading.Event()
        self._device = (
            Tier("device", _allocate(device, self._whole_pages(device_bytes, "device")), self.layout)
            if device_bytes
            else None
        )
        self.segment = Segment(
            Path(segment_dir),
            self._whole_pages(host_bytes, "host") // self.layout.page_bytes,
            self.layout.page_bytes,
        )
        memory = torch.frombuffer(self.segment.view[self.segment.data_offset :], dtype=torch.uint8)
        self._host = Tier("host", memory, self.layout, self.segment.generations)
        self._entries = EntryTable(
            [self._host] if self._device is None else [self._host, self._device], on_evict
        )
        self._mover = None if self._device is None else TierMigrator(self._entries, self._device, self._host)
        self._registered = device.startswith("cuda") and pinned.register(memory)
        if prefault and not self._registered:
            threading.Thread(target=self.segment.prefault, name="store-prefault", daemon=True).start()

    def pin(self, address: bytes) -> Pin | None:
        """Return a hold on the embedding, on its host copy if there is one; None when it is not held."""
        slot = self._entries.lookup(address)
        if slot is None:
            return None
        if self._promotes and self._mover is not None:
            self._mover.note_hit(slot)
        return Pin(self._entries, self.segment, slot)

    def put(self, address: bytes, rows: Tensor, grid: Grid) -> Pin:
        """Keep `rows` ([tokens, width], any device) under `address`; return a hold on what is held there.

        First writer wins: when the address is held, or another thread is writing it, `rows` are not kept.
        With a device tier, rows go there while it has room. Raises `OverloadedError` when everything stays
        pinned for `wait_s`, `ImageLimitError` for an embedding larger than the host tier.
        """
        assert rows.ndim == 2, rows.shape
        assert (rows.shape[1], rows.dtype) == (self.width, self.dtype), (rows.shape, rows.dtype)
        tokens = len(rows)
        self._check_size(tokens)
        deadline = time.monotonic() + self._wait_s
        ledger = self._entries
        slot = ledger.claim(address, ledger.tiers, deadline)
        if slot is not None:
            return Pin(ledger, self.segment, slot)
        try:
            source = rows.contiguous().view(torch.uint8).view(-1)
            if self._device is not None:
                slot = ledger.reserve_free(self._device, address, tokens, grid)
            if slot is None:
                slot = ledger.reserve(self._host, address, tokens, grid, deadline)
            return Pin(ledger, self.segment, ledger.fill(slot, [source]))
        finally:
            ledger.unclaim(address)

    def set_aside(self, tokens: Sequence[int]) -> int:
        """Keep room for embeddings that are about to be made; return for how many, from the first on, there is some.

        Waits while too much is pinned for the first. Raises as `put` does, which it spares the work of making rows
        that it would not keep. Undo it with `give_back` for each, after `put` or instead of it.
        """
        self._check_size(tokens[0])
        return self._entries.promise([self.layout.pages(count) for count in tokens], self._wait_s)

    def give_back(self, tokens: int) -> None:
        """Undo `set_aside` for one embedding."""
        self._entries.unpromise(self.layout.pages(tokens))

    def contains(self, address: bytes) -> bool:
        """Whether any tier holds the embedding now."""
        return self.tier_of(address) is not None

    def tier_of(self, address: bytes) -> TierName | None:
        """Return the tier that `pin` would find, or None; neither holds nor counts."""
        return self._entries.tier_of(address)

    def grids(self) -> dict[bytes, Grid]:
        """Return address and grid of all embeddings held now."""
        return self._entries.grids()

    def evict(self, address: bytes) -> bool:
        """Drop the embedding from all tiers; False, and nothing done, if it is not held or in use."""
        return self._entries.evict(address)

    def flush(self) -> int:
        """Drop every embedding that nobody uses; return how many copies went."""
        return self._entries.flush()

    def keep_moving(self) -> None:
        """Demote and promote until the store is closed: a thread's target. Returns at once without one."""
        if self._mover is not None:
            self._mover.run(self._closed)

    def move_once(self) -> bool:
        """Make one movement between the tiers; False when none is due or possible."""
        return self._mover is not None and self._mover.move_once()

    def stats(self) -> StoreStats:
        """Return the numbers of now. Walks all entries: for people and scrapes, not for each request."""
        tiers = self._entries.snapshot()
        slots = [slot for _, held in tiers for slot in held]
        return StoreStats(
            tiers=tuple(_tier_stats(tier, held) for tier, held in reversed(tiers)),
            pins=sum(slot.pins for slot in slots),
            misses=self._entries.misses,
            waits=self._entries.waits,
            refusals=self._entries.refusals,
            demotions=0 if self._mover is None else self._mover.demotions,
            promotions=0 if self._mover is None else self._mover.promotions,
            largest=tuple(map(_entry_stats, nlargest(_LARGEST, slots, key=lambda slot: slot.tokens))),
        )

    def close(self) -> None:
        """Remove the segment's file and stop moving. Bytes that someone views stay; nothing may be put."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._registered:
            pinned.unregister(self._host.memory)
        self.segment.close()

    def _check_size(self, tokens: int) -> None:
        if self.layout.pages(tokens) > self._host.arena.pages:
            raise ImageLimitError(
                f"its embedding of {tokens * self.layout.row_bytes / GIB:.3f} GiB is larger than the whole "
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


def _allocate(device: str, size_bytes: int) -> Tensor:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch's out-of-memory errors, on any device, derive from it
        raise device_error(device, size_bytes, str(error).splitlines()[0]) from error


def _tier_stats(tier: Tier, slots: list[Entry]) -> TierStats:
    page_bytes, arena = tier.layout.page_bytes, tier.arena
    pinned_slots = [slot for slot in slots if slot.pins]
    return TierStats(
        name=tier.name,
        size_bytes=arena.pages * page_bytes,
        used_bytes=(arena.pages - arena.free_pages) * page_bytes,
        pinned_bytes=sum(tier.layout.pages(slot.tokens) for slot in pinned_slots) * page_bytes,
        entries=len(slots),
        pinned_entries=len(pinned_slots),
        hits=tier.hits,
        evictions=tier.evictions,
        writes=tier.writes,
        free_runs=arena.free_runs,
        largest_free_bytes=arena.largest_free_run * page_bytes,
    )


def _entry_stats(slot: Entry) -> EntryStats:
    return EntryStats(slot.address, slot.tier.name, slot.row_bytes, slot.tokens, slot.pins, slot.hits)
