"""What a client remembers of images it sent: their bytes, and where they went."""

from cachetools import LRUCache

from prefill_client.images import Image

# Bytes that may have to be sent once more when a server is lost. They are references to what the caller sent.
MAX_BYTES = 256 << 20
# What one takes besides its file.
ENTRY_BYTES = 1024
MAX_ROUTES = 65536  # some 10 MB


class SentImages:
    """Bounded, least recently used out first. Not for several threads."""

    def __init__(self) -> None:
        self._images: LRUCache[bytes, Image] = LRUCache(MAX_BYTES, getsizeof=_size)
        self._routes: LRUCache[bytes, str] = LRUCache(MAX_ROUTES)

    def sent(self, image: Image, endpoint: str) -> None:
        """Remember an image that `endpoint` has taken over."""
        self._routes[image.digest] = endpoint
        if _size(image) <= MAX_BYTES:
            self._images[image.digest] = image

    def image(self, digest: bytes) -> Image | None:
        """Return an image sent not long ago, as it was sent."""
        return self._images.get(digest)

    def route(self, digest: bytes) -> str | None:
        """Return where an image was sent to."""
        return self._routes.get(digest)

    def lost(self, digest: bytes) -> None:
        """Forget where an image was sent to: it is not there."""
        self._routes.pop(digest, None)


def _size(image: Image) -> int:
    return ENTRY_BYTES + len(image.data)
