"""Submitted image files, kept for a while so that an evicted embedding can be recomputed without the client."""

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

from encoder_service.image.source import Source


class SourceCache:
    """A bounded, least-recently-used map from a key to its source. Used from the event loop only.

    The key is derived from content digest and tenant salt: a tenant must not learn what another sent.

    An entry lives for `ttl_s` seconds after its last use, or less if `max_bytes` is reached: a dropped image
    costs its sender another upload, never a wrong answer.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._images: OrderedDict[bytes, tuple[float, Source]] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._images)

    def put(self, source: Source) -> None:
        """Keep `source`, evicting the least recently used. One larger than `max_bytes` is not kept."""
        self.drop(source.key)
        if len(source.data) > self.max_bytes:
            return
        self._images[source.key] = (self._clock() + self._ttl_s, source)
        self.held_bytes += len(source.data)
        self._expire()
        while self.held_bytes > self.max_bytes:
            self.drop(next(iter(self._images)))

    def get(self, key: bytes) -> Source | None:
        """Return the source of `key` and renew its lifetime, or None."""
        self._expire()
        entry = self._images.get(key)
        if entry is None:
            return None
        self._images[key] = (self._clock() + self._ttl_s, entry[1])
        self._images.move_to_end(key)
        return entry[1]

    def drop(self, key: bytes) -> None:
        """Drop the source of `key`, if there is one."""
        entry = self._images.pop(key, None)
        if entry is not None:
            self.held_bytes -= len(entry[1].data)

    def clear(self) -> None:
        """Drop everything."""
        self._images.clear()
        self.held_bytes = 0

    def _expire(self) -> None:
        # The order of use is the order of expiry, since every use renews by the same time.
        now = self._clock()
        while self._images:
            key, (expires, _) = next(iter(self._images.items()))
            if expires > now:
                return
            self.drop(key)
