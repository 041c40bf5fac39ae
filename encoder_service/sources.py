"""Submitted image bytes, kept for a while, so that an evicted embedding can be made again without the client."""

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic


class Sources:
    """A bounded, least-recently-used map from a key to image bytes. Used from the event loop only.

    The key is made of content digest and tenant salt: one tenant must not learn what another sent.

    An entry lives for `ttl_s` seconds after its last use, and less when `max_bytes` is reached: an image dropped
    here costs its sender one more upload, never a wrong answer.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = monotonic) -> None:
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._images: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._images)

    def put(self, key: bytes, image: bytes) -> None:
        """Keep `image`; the least recently used make room. An image larger than the whole bound is not kept."""
        self._discard(key)
        if len(image) > self.max_bytes:
            return
        self._images[key] = (self._clock() + self._ttl_s, image)
        self.held_bytes += len(image)
        self._expire()
        while self.held_bytes > self.max_bytes:
            self._discard(next(iter(self._images)))

    def get(self, key: bytes) -> bytes | None:
        """Return the bytes kept under `key` and renew their time, or None."""
        self._expire()
        entry = self._images.get(key)
        if entry is None:
            return None
        self._images[key] = (self._clock() + self._ttl_s, entry[1])
        self._images.move_to_end(key)
        return entry[1]

    def clear(self) -> None:
        """Forget everything."""
        self._images.clear()
        self.held_bytes = 0

    def _expire(self) -> None:
        # The order of use is the order of expiry, since every use renews by the same time.
        now = self._clock()
        while self._images:
            key, (expires, _) = next(iter(self._images.items()))
            if expires > now:
                return
            self._discard(key)

    def _discard(self, key: bytes) -> None:
        entry = self._images.pop(key, None)
        if entry is not None:
            self.held_bytes -= len(entry[1])
