"""Eviction: which entry is dropped when a tier is full. Least recently used, and never one that is pinned."""

from collections import OrderedDict
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class LeastRecentlyUsed(Generic[Entry]):
    """The eviction order of the entries that may be evicted.

    An entry leaves the order while it is pinned, and returns as the most recently used when its last pin is
    released, so finding a victim takes constant time however much is pinned.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._order: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, address: bytes, entry: Entry) -> None:
        """Make an entry evictable, as the most recently used one."""
        assert address not in self._order
        self._order[address] = entry

    def remove(self, address: bytes) -> None:
        """Remove an entry from the order: it is pinned or dropped."""
        del self._order[address]

    def victim(self) -> Entry | None:
        """Return the entry to evict next, or None if there is none."""
        return next(iter(self._order.values()), None)
