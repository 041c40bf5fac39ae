"""Submitted image files, kept for a while so that an evicted embedding can be recomputed without the client."""

import threading
from collections.abc import Callable
from time import monotonic

from cachetools import TTLCache

from encoder_service.image.source import Source


class SourceCache:
    """A bounded, least-recently-used map from a key to its source. Thread-safe: even asking its size drops entries.

    The key is derived from content digest and tenant salt: a tenant must not learn what another sent.

    An entry lives for `ttl_s` seconds after its last use, or less if `max_bytes` is reached: a dropped image
    costs its sender another upload, never a wrong answer.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.max_bytes = max_bytes
        self._turn = threading.Lock()
        self._images: TTLCache[bytes, Source] = TTLCache(max_bytes, ttl_s, clock, lambda each: len(each.data))

    def __len__(self) -> int:
        with self._turn:
            return len(self._images)

    @property
    def held_bytes(self) -> int:
        """Bytes of all files kept."""
        with self._turn:
            return int(self._images.currsize)

    def put(self, source: Source) -> None:
        """Keep `source`, evicting the least recently used. One larger than `max_bytes` is not kept."""
        with self._turn:
            self._images.pop(source.key, None)
            if len(source.data) <= self.max_bytes:
                self._images[source.key] = source

    def get(self, key: bytes) -> Source | None:
        """Return the source of `key` and renew its lifetime, or None."""
        with self._turn:
            source = self._images.get(key)
            if source is not None:
                self._images[key] = source
            return source

    def drop(self, key: bytes) -> None:
        """Drop the source of `key`, if there is one."""
        with self._turn:
            self._images.pop(key, None)

    def clear(self) -> None:
        """Drop everything."""
        with self._turn:
            self._images.clear()
