"""Submitted image files, kept for a while so that an evicted embedding can be recomputed without the client."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from encoder_service.image.source import Source


@dataclass(slots=True)
class _Kept:
    source: Source
    holder: str
    used_s: float


class SourceCache:
    """A bounded, least-recently-used map from a key to its source. Thread-safe: even asking its size drops entries.

    The key is derived from content digest and tenant salt: a tenant must not learn what another sent.

    An entry lives for `ttl_s` seconds after its last use, or less if `max_bytes` is reached: a dropped image
    costs its sender another upload, never a wrong answer. Entries count against the holder that sent them first. While
    there is space, a holder may take all of it; then the holder with the most bytes makes room, so that holders that
    always want more have equal shares.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._turn = threading.Lock()
        self._held_bytes = 0
        self._images: OrderedDict[bytes, _Kept] = (
            OrderedDict()
        )  # the least recently used first, as in the next
        self._of: dict[str, OrderedDict[bytes, None]] = {}  # by holder
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        with self._turn:
            self._expire()
            return len(self._images)

    @property
    def held_bytes(self) -> int:
        """Bytes of all files kept."""
        with self._turn:
            self._expire()
            return self._held_bytes

    def put(self, source: Source, holder: str = "") -> None:
        """Keep `source`, evicting others while there is no space. One larger than `max_bytes` is not kept."""
        with self._turn:
            self._expire()
            if (kept := self._images.get(source.key)) is not None:
                holder = kept.holder
                self._remove(source.key)
            size = len(source.data)
            if size > self.max_bytes:
                return
            self._images[source.key] = _Kept(source, holder, self._clock())
            self._of.setdefault(holder, OrderedDict())[source.key] = None
            self._bytes_of[holder] = self._bytes_of.get(holder, 0) + size
            self._held_bytes += size
            while self._held_bytes > self.max_bytes:
                self._remove(self._victim(source.key))

    def get(self, key: bytes) -> Source | None:
        """Return the source of `key` and renew its lifetime, or None."""
        with self._turn:
            self._expire()
            kept = self._images.get(key)
            if kept is None:
                return None
            kept.used_s = self._clock()
            self._images.move_to_end(key)
            self._of[kept.holder].move_to_end(key)
            return kept.source

    def drop(self, key: bytes) -> None:
        """Drop the source of `key`, if there is one."""
        with self._turn:
            if key in self._images:
                self._remove(key)

    def clear(self) -> None:
        """Drop everything."""
        with self._turn:
            self._images.clear()
            self._of.clear()
            self._bytes_of.clear()
            self._held_bytes = 0

    def _victim(self, newest: bytes) -> bytes:
        """Return the oldest entry of the holder with the most bytes, but for the one that was just put."""
        oldest = {holder: next(iter(keys)) for holder, keys in self._of.items()}
        return oldest[max((h for h in oldest if oldest[h] != newest), key=self._bytes_of.__getitem__)]

    def _expire(self) -> None:
        now = self._clock()
        while self._images:
            key, kept = next(iter(self._images.items()))
            if kept.used_s + self._ttl_s > now:
                return
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        kept = self._images.pop(key)
        size = len(kept.source.data)
        self._held_bytes -= size
        self._bytes_of[kept.holder] -= size
        del self._of[kept.holder][key]
        if not self._of[kept.holder]:
            del self._of[kept.holder], self._bytes_of[kept.holder]
