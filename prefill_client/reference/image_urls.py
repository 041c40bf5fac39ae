"""Image URLs of a chat request to bytes: data URLs always, http URLs only from hosts that are allowed."""

import asyncio
import base64
import binascii
import socket
import ssl
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from urllib.parse import SplitResult, urlsplit

import h11

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidImageError, UnavailableError

_PIECE_BYTES = 64 << 10
# At once from one host: more only share its line, and a host that drips holds up none but its own images.
_DOWNLOADS = 16
# Looking up a name blocks a thread for as long as the resolver likes; these are for nothing else.
_RESOLVERS = 4


class ImageUrls:
    """Loads the bytes behind image URLs, each within `max_bytes` and, over http, within `timeout_s`."""

    def __init__(self, allowed_hosts: Collection[str], *, max_bytes: int, timeout_s: float) -> None:
        """`allowed_hosts` are host or host:port as they stand in URLs; none allows data URLs only.

        `timeout_s` covers a download from its turn among those of its host to its last byte.
        """
        self._turns = {host.lower(): asyncio.Semaphore(_DOWNLOADS) for host in allowed_hosts}
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")
        self._tls = ssl.create_default_context()

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
        if parts.netloc.lower() not in self._turns:
            raise ForbiddenError(f"images from {parts.netloc} are not allowed here")
        try:
            async with asyncio.timeout(self._timeout_s), self._turns[parts.netloc.lower()]:
                return await self._download(parts)
        except TimeoutError as error:
            raise UnavailableError(f"{url} took more than {self._timeout_s:g} s") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise UnavailableError(f"{url}: {error}") from error
        except (ValueError, h11.LocalProtocolError) as error:
            raise InvalidImageError(f"not a URL: {error}") from error

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

    async def _download(self, url: SplitResult) -> bytes:
        """GET the URL: no proxy, no redirect, no connection that is used twice."""
        http = h11.Connection(h11.CLIENT)
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        headers = [("Host", url.netloc), ("Accept", "image/*"), ("Connection", "close")]
        request = http.send(h11.Request(method="GET", target=target.encode(), headers=headers))
        assert request is not None
        data = bytearray()
        async with self._connection(url) as (reader, writer):
            writer.write(request + (http.send(h11.EndOfMessage()) or b""))
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(_PIECE_BYTES))
                elif isinstance(event, h11.Response) and event.status_code != 200:
                    raise InvalidImageError(f"{url.geturl()} answered {event.status_code}")
                elif isinstance(event, h11.Data):
                    data += event.data
                    if len(data) > self._max_bytes:
                        raise ImageLimitError(
                            f"the image at {url.geturl()} has more than {self._max_bytes} bytes"
                        )
        return bytes(data)

    @asynccontextmanager
    async def _connection(
        self, url: SplitResult
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to the first of the host's addresses that answers; the connection ends at once with the block."""
        assert url.hostname is not None
        tls = self._tls if url.scheme == "https" else None
        port = url.port or (443 if tls else 80)
        found = await asyncio.get_running_loop().run_in_executor(
            self._resolvers, lambda: socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
        )
        failure: OSError | None = None
        for *_, address in found:
            try:
                reader, writer = await asyncio.open_connection(
                    str(address[0]), port, ssl=tls, server_hostname=url.hostname if tls else None
                )
                break
            except OSError as error:
                failure = error
        else:
            raise failure or OSError("the name has no address")
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
