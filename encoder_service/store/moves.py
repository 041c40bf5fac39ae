"""Moves of embeddings between the tiers of a store: device, host and disk. Every move copies, then drops.

An address is moved by one thread at a time; a second one waits, and finds it moved. Bytes are copied without the
store's lock.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from encoder_contract.errors import OverloadedError
from encoder_contract.framing import checksum
from encoder_service.store.copies import copy_bytes
from encoder_service.store.disk import THREADS, DiskFile
from encoder_service.store.pin import Pin
from encoder_service.store.tier import Entry, Tier
from encoder_service.store.tiers import Tiers

LOW_WATER = 0.1
"""Share of the device tier that the migrator keeps free. New embeddings go to the host while the device has no room."""
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


class Moves:
    """The moves of one store. Thread-safe, except where noted."""

    def __init__(self, store: Tiers, *, prefault: bool = False) -> None:
        """See `Store`."""
        self._store, self._lock = store, store.lock
        self._untouched = store.segment.prefault() if prefault else iter(())
        self._host, self._device, self._disk = store.host, store.device, store.disk
        self.demotions = self.promotions = 0
        self._unlikely = 0  # embeddings that were dropped because another use is unlikely
        self._low_pages = 0 if self._device is None else max(1, int(self._device.arena.pages * LOW_WATER))
        self._promotions_due: deque[bytes] = deque(maxlen=_MAX_PROMOTIONS)
        self._closed = threading.Event()
        self._loaders = ThreadPoolExecutor(THREADS, "disk-load")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Stop, once what is being read from the disk has arrived."""
        self._closed.set()
        self._loaders.shutdown()

    def load_later(self, address: bytes, holder: str = "") -> "Future[Pin | None] | None":
        """Read an embedding from the disk into the host tier; return None if it is not there.

        The future's result is a pin, or None if the file was damaged. It raises `OverloadedError` if everything stays
        in use for `wait_s`.
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
            copy = self._store.pin_first([self._device], entry.address)
        if copy is not None:
            pin.move_to(copy)
            return
        entry.device_readers += 1
        if entry.device_readers % PROMOTE_READERS == 0:
            self._promotions_due.append(entry.address)

    def keep_moving(self) -> None:
        """Move embeddings until the store is closed (a thread's target). While none is due, touch the host's pages.

        With a single tier, return once they are touched.
        """
        while not self._closed.is_set():
            if (self._may_move and self.move_once()) or next(self._untouched, None):
                continue
            if self._device is None and self._disk is None:
                return
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
            self._store.unpin_collected()
            is_due = device.arena.free_pages < self._low_pages
            victim = device.order.victim(time.monotonic()) if is_due else None
            if victim is not None:
                device.pin(victim)
        if victim is not None:
            return self._demote(victim)
        return bool(self._promotions_due) and self._promote(self._promotions_due.popleft(), device)

    def copy_to_host(self, entry: Entry, wait_s: float) -> Entry:
        """Return the pinned host copy of a pinned entry. If there is none, make one. Raises `OverloadedError`."""
        copy, is_new = self._pin_or_reserve(entry, entry.holder, [self._host], wait_s)
        if is_new:
            self._move(entry, copy)
        return copy

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
                    self._store.unpin_collected()
                    if (held := self._store.pin_first(held_in, address)) is not None:
                        return held, False
                    if address not in self._store.moving:
                        entry = self._store.place(
                            address, source.tokens, source.grid, holder, (self._host,), dropped
                        )
                        if entry is not None:
                            self._store.moving.add(address)
                            return entry, True
                    self._store.wait(deadline)
        finally:
            self._store.report_dropped(dropped)

    def _move(self, source: Entry, copy: Entry) -> None:
        """Copy a pinned entry into pages of another tier, reserved with `moving`, and make it visible, pinned once."""
        copy.continue_from(source)
        with self._moving_ends(copy.address):
            with self._store.filling(copy):
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
                self._store.moving.discard(address)
                self._store.wake()

    def _demote(self, victim: Entry) -> bool:
        """Copy a pinned entry to the host unless the host holds it, then drop it. Do nothing while the host is full."""
        try:
            copy = self.copy_to_host(victim, wait_s=0.0)
        except OverloadedError:
            self._store.unpin(victim)
            return False
        self._store.unpin(copy)
        return self._drop_demoted(victim)

    def _drop_demoted(self, victim: Entry) -> bool:
        """Drop a pinned entry, unless a reader has pinned it too."""
        with self._lock:
            victim.tier.unpin(victim)
            is_unused = not victim.pins
            if is_unused:
                victim.tier.order.dropped(victim)
                victim.tier.drop(victim)
                self.demotions += 1
            self._store.wake()
        if is_unused:
            self._store.report_dropped([victim])
        return is_unused

    def _demote_to_disk(self) -> bool:
        """Write the host's next victim to the disk ahead of need, so that no writer of rows waits for the disk."""
        if (disk := self._disk) is None or disk.is_off:
            return False
        host = self._host
        with self._lock:
            self._store.unpin_collected()
            is_due = self.is_host_low
            victim = host.order.victim(time.monotonic()) if is_due else None
            if victim is None:
                return False
            is_likely = victim.reuse.chance >= WRITE_CHANCE
            self._unlikely += not is_likely
            host.pin(victim)
        if victim.address not in disk and (is_likely or self._unlikely % SAMPLED == 0):
            rows = self._store.rows(victim)
            if victim.checksum is None:
                victim.checksum = checksum(rows)
            disk.write(victim.address, victim.tokens, victim.grid, rows, victim.checksum, victim.holder)
        return self._drop_demoted(victim)

    @property
    def is_host_low(self) -> bool:
        """Whether the host tier has so little room that embeddings should move to the disk."""
        return self._host.arena.free_pages < self._store.low_host_pages

    def _load(self, address: bytes, holder: str) -> Pin | None:
        """Return a pin on an embedding of the disk, in memory by now; None if its file is gone or damaged."""
        disk = self._disk
        assert disk is not None
        if (file := disk.find(address)) is None:
            return self._store.pin(address, again=True)
        if self._store.layout.pages(file.tokens) > self._host.arena.pages:
            disk.drop(address)
            return None
        entry, is_new = self._pin_or_reserve(file, holder, self._store.tiers, self._store.wait_s)
        if not is_new:
            return Pin(self._store, entry)
        with self._moving_ends(address):
            with self._store.filling(entry):
                entry.checksum = disk.read(file, self._store.rows(entry))
            if entry.checksum is None:
                self._store.abandon(entry)
                return None
            with self._lock:
                return Pin(self._store, self._recalled(entry))

    def _promote(self, address: bytes, device: Tier) -> bool:
        """Copy a host entry into free pages of the device. Demotion keeps some pages free."""
        with self._lock:
            source = self._store.pin_first([self._host], address)
        if source is None:
            return False
        try:
            with self._lock:
                if address in self._store.moving or address in device.entries:
                    return False
                copy = device.reserve(address, source.tokens, source.grid, source.holder)
                if copy is None:
                    return False
                self._store.moving.add(address)
            self._move(source, copy)
        finally:
            self._store.unpin(source)
        self._store.unpin(copy)
        self.promotions += 1
        return True

    def _recalled(self, entry: Entry) -> Entry:
        """Commit an entry that was read from the disk. That it was there counts for its chance of another use."""
        now = time.monotonic()
        if not self._host.order.recall(entry, now):
            entry.uses = 1  # before it went to the disk: this is another use
        committed = self._store.committed(entry)
        committed.tier.order.use(committed, now)
        return committed
