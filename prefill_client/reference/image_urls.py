"""Image URLs of a chat request to bytes: data URLs always, http URLs only from hosts that are allowed."""

import asyncio
import base64
import binascii
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from http.client import HTTPException
from urllib.parse import urlsplit

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidImageError, UnavailableError

_PIECE_BYTES = 64 << 10  # read between two looks at the clock


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An allowed host must not send us to one that is not."""

    def redirect_request(self, *_: object) -> None:
        return None


class ImageUrls:
    """Loads the bytes behind image URLs, each within `max_bytes` and, over http, within `timeout_s`."""

    def __init__(self, allowed_hosts: Collection[str], *, max_bytes: int, timeout_s: float) -> None:
        """`allowed_hosts` are host or host:port as they stand in URLs; none allows data URLs only."""
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        # No proxies: what is fetched is what the allow-list names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    async def load(self, url: str) -> bytes:
        """Return the bytes.

        Raises `InvalidImageError` for a URL that holds or names no image, `ImageLimitError` over the limit,
        `ForbiddenError` for a host that is not allowed, `UnavailableError` when a host does not answer.
        """
        if url.startswith("data:"):
            return await asyncio.to_thread(self._decode, url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidImageError(f"not a URL: {error}") from error
        if parts.scheme not in ("http", "https"):
            raise InvalidImageError("an image URL is a data:, http: or https: URL")
        if parts.netloc.lower() not in self._allowed_hosts:
            raise ForbiddenError(f"images from {parts.netloc} are not allowed here")
        return await asyncio.to_thread(self._download, url)

    def _decode(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidImageError("an image's data URL is data:image/...;base64,...")
        if len(body) // 4 * 3 > self._max_bytes + 2:
            raise ImageLimitError(f"the data URL holds more than {self._max_bytes} bytes")
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidImageError(f"the data URL is not base64: {error}") from error

    def _download(self, url: str) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        data = bytearray()
        try:
            with self._opener.open(url, timeout=self._timeout_s) as response:
                while piece := response.read1(_PIECE_BYTES):
                    data += piece
                    if len(data) > self._max_bytes:
                        raise ImageLimitError(f"the image at {url} has more than {self._max_bytes} bytes")
                    if time.monotonic() > deadline:
                        raise UnavailableError(f"{url} took more than {self._timeout_s:g} s")
        except urllib.error.HTTPError as error:
            raise InvalidImageError(f"{url} answered {error.code}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise UnavailableError(f"{url}: {error}") from error
        return bytes(data)
