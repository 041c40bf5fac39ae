"""Mover: carries embeddings between the device and the host tier, in a thread of its own."""

import threading
import time
from collections import deque

from encoder_contract.errors import OverloadedError
from encoder_service.store.entry_table import EntryTable
from encoder_service.store.tiers import Entry, Tier

LOW_WATER = 0.1
"""Share of the device tier kept free: a new embedding that finds no room there goes to the host at once."""
PROMOTE_HITS = 3
"""An embedding is copied to the device tier at every third hit on its host copy."""
_SUGGESTIONS = 64
"""Promotions that may wait; what is forgotten comes again with the next hits."""
_NAP_S = 0.02
"""Pause when nothing is due: far shorter than encoding fills the tenth that is kept free."""


class TierMigrator:
    """Demotion (device to host, then off the device); promotion (host to device, on both) of what `note_hit` names."""

    def __init__(self, ledger: EntryTable, device: Tier, host: Tier) -> None:
        """Move between these two tiers of `ledger`."""
        self.demotions = 0
        self.promotions = 0
        self._entries = ledger
        self._device = device
        self._host = host
        self._low_pages = max(1, int(device.arena.pages * LOW_WATER))
        self._suggested: deque[bytes] = deque(maxlen=_SUGGESTIONS)

    def note_hit(self, slot: Entry) -> None:
        """Consider the embedding for promotion: microseconds, from any thread."""
        if slot.tier is self._host and slot.hits % PROMOTE_HITS == 0:
            self._suggested.append(slot.address)

    def run(self, closed: threading.Event) -> None:
        """Move what is due until `closed` is set: the target of a thread."""
        while not closed.is_set():
            if not self.move_once():
                closed.wait(_NAP_S)

    def move_once(self) -> bool:
        """Make one movement; False when none is due or possible. Milliseconds: it copies."""
        victim = self._entries.pin_victim(self._device, self._low_pages)
        if victim is not None:
            return self._demote(victim)
        try:
            address = self._suggested.popleft()
        except IndexError:
            return False
        return self._promote(address)

    def _demote(self, victim: Entry) -> bool:
        """Drop from the device what the host holds or now gets; no move while the host is full of pins."""
        try:
            copy = self._entries.copy(victim, self._host, deadline=time.monotonic())
        except OverloadedError:
            self._entries.unpin(victim)
            return False
        self._entries.unpin(copy)
        gone = self._entries.unpin_and_drop(victim)
        self.demotions += gone
        return gone

    def _promote(self, address: bytes) -> bool:
        """Copy a host entry into pages of the device that are free; demotion sees to it that some are."""
        ledger = self._entries
        source = ledger.pin_in(self._host, address)
        if source is None:
            return False
        try:
            copy = ledger.copy_if_free(source, self._device)
        finally:
            ledger.unpin(source)
        if copy is None:
            return False
        ledger.unpin(copy)
        self.promotions += 1
        return True
