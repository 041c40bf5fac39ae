"""Eviction: which entry has to go when a tier is full. Least recently used, and never one that is pinned."""

from collections import OrderedDict
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class LeastRecentlyUsed(Generic[Entry]):
    """Order of the entries that may be evicted, and of those only.

    An entry leaves the order while it is pinned and returns as the most recent when its last pin goes, so a
    victim is found in constant time however much is pinned.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._order: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, address: bytes, entry: Entry) -> None:
        """Make an entry evictable, as the most recently used one."""
        assert address not in self._order
        self._order[address] = entry

    def remove(self, address: bytes) -> None:
        """Take an entry out of the order: it is pinned or gone."""
        del self._order[address]

    def victim(self) -> Entry | None:
        """Return the entry that has to go next, or None when none may."""
        return next(iter(self._order.values()), None)
