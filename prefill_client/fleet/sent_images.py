"""What a client remembers of images it sent: their bytes, and where they went."""

from cachetools import LRUCache

# Bytes that may have to be sent once more when a server is lost. They are references to what the caller sent.
MAX_BYTES = 256 << 20
MAX_ROUTES = 65536  # some 10 MB


class SentImages:
    """Bounded, least recently used out first. Not for several threads."""

    def __init__(self) -> None:
        self._files: LRUCache[bytes, bytes] = LRUCache(MAX_BYTES, getsizeof=len)
        self._routes: LRUCache[bytes, str] = LRUCache(MAX_ROUTES)

    def sent(self, digest: bytes, data: bytes, endpoint: str) -> None:
        """Remember an image that `endpoint` has taken over."""
        self._routes[digest] = endpoint
        if len(data) <= MAX_BYTES:
            self._files[digest] = data

    def file(self, digest: bytes) -> bytes | None:
        """Return the bytes of an image sent not long ago."""
        return self._files.get(digest)

    def route(self, digest: bytes) -> str | None:
        """Return where an image was sent to."""
        return self._routes.get(digest)

    def lost(self, digest: bytes) -> None:
        """Forget where an image was sent to: it is not there."""
        self._routes.pop(digest, None)
