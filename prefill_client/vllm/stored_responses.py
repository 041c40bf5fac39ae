"""The images of responses that vLLM stores: a request that continues one needs them, but does not send them."""

from collections.abc import Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from prefill_client.images import File

# Bytes of files that are kept in case the service loses them. The least recently used are dropped first.
MAX_BYTES = 256 << 20
MAX_RESPONSES = 65536  # vLLM itself keeps every response for the life of its process


@dataclass(frozen=True, slots=True)
class Earlier:
    """The images of a conversation up to a response, in the order of its prompt, by their digests."""

    digests: tuple[bytes, ...] = ()
    tenant_salt: str = ""


class StoredResponses:
    """The stored responses of one API server. vLLM, too, stores them for each API server."""

    def __init__(self) -> None:
        self._responses: LRUCache[str, Earlier] = LRUCache(MAX_RESPONSES)
        self._files: LRUCache[bytes, bytes] = LRUCache(MAX_BYTES, getsizeof=len)

    def add(self, response_id: str, earlier: Earlier, files: Sequence[File | None]) -> None:
        """Remember a response with its images; a file that is no longer kept is None."""
        self._responses[response_id] = earlier
        for digest, file in zip(earlier.digests, files, strict=True):
            if isinstance(file, bytes) and len(file) <= MAX_BYTES:
                self._files[digest] = file

    def earlier(self, response_id: str) -> Earlier:
        """Return the images of a response; no images for an unknown one."""
        return self._responses.get(response_id, Earlier())

    def file(self, digest: bytes) -> bytes | None:
        """Return an image's file; None if it has been dropped."""
        return self._files.get(digest)
