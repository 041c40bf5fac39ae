"""The tier migrator: moves embeddings between the device and the host tier, in its own thread."""

import threading
import time
from collections import deque

from encoder_contract.errors import OverloadedError
from encoder_service.store.entry_table import EntryTable
from encoder_service.store.tiers import Entry, Tier

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
