"""What a client remembers of images it sent: their bytes, and where they went."""

from collections import OrderedDict

# Bytes that may have to be sent once more when a server is lost. They are references to what the caller sent.
MAX_BYTES = 256 << 20
MAX_ROUTES = 65536  # some 10 MB


class SentImages:
    """Bounded, least recently used out first. Not for several threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._files: OrderedDict[bytes, bytes] = OrderedDict()
        self._routes: OrderedDict[bytes, str] = OrderedDict()

    def sent(self, digest: bytes, data: bytes, endpoint: str) -> None:
        """Remember an image that `endpoint` has taken over."""
        self._routes[digest] = endpoint
        self._routes.move_to_end(digest)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)
        if digest not in self._files and len(data) <= self._max_bytes:
            self._files[digest] = data
            self._held_bytes += len(data)
        while self._held_bytes > self._max_bytes:
            _, dropped = self._files.popitem(last=False)
            self._held_bytes -= len(dropped)

    def file(self, digest: bytes) -> bytes | None:
        """Return the bytes of an image sent not long ago."""
        if digest in self._files:
            self._files.move_to_end(digest)
        return self._files.get(digest)

    def route(self, digest: bytes) -> str | None:
        """Return where an image was sent to."""
        return self._routes.get(digest)

    def lost(self, digest: bytes) -> None:
        """Forget where an image was sent to: it is not there."""
        self._routes.pop(digest, None)
