"""One GET of one URL: the lookup of its host, the request, and how long the response may be reused."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import h11
from aiohappyeyeballs import AddrInfoType, start_connection

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.version import __version__
from prefill_client.media.destinations import ImageUrl
from prefill_client.media.proxy import Proxy, open_tunnel

# A lookup blocks its thread until the system's resolver gives up: after 10 s by default if the name server is down.
THREADS = 32
# A server that allows a longer time may be misconfigured.
MAX_FRESH_S = 7 * 24 * 3600.0
# Bytes per read: few enough to parse within a few milliseconds, even if all of them are headers.
_PIECE_BYTES = 16 << 10
# Events parsed before the event loop runs other tasks: about 0.3 ms.
_EVENTS_AT_A_TIME = 16
# A host may send this many events for one image, and one more for each 256 bytes. Network packets are larger than that.
_EVENTS, _BYTES_PER_EVENT = 1000, 256
_INTERIM_RESPONSES = 8
# "Non-Authoritative" is an answer that a proxy has changed. "Partial" answers no request for a part: some hosts send it
# for whole files.
SUCCESS = frozenset({200, 203, 206})
# Other tokens of Content-Encoding change no byte, for example S3's `aws-chunked`, or `utf-8`, `binary`, `none`.
_COMPRESSIONS = frozenset({"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd", "dcb", "dcz"})
# When to try a host's next address beside those that have not answered yet, and how many addresses to try.
_NEXT_ADDRESS_S, _ADDRESSES = 0.25, 8
# Some hosts refuse requests without a user agent.
USER_AGENT = f"encoder-service/{__version__}"


@dataclass(eq=False, slots=True)
class _Lookup:
    """A queued or running lookup, and the number of callers that wait for it."""

    future: "Future[list[Any]]"
    waiting: int = 0


class Resolver:
    """Resolves host names in a bounded number of threads. Concurrent callers share a lookup.

    Not thread-safe: use from one event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="resolve")
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host as text; of an address, itself. Raises `OSError`."""
        if _is_address(host):
            return [host]
        lookup = self._lookups.get((host, port)) or self._begin(host, port)
        lookup.waiting += 1
        try:
            found = await asyncio.shield(asyncio.wrap_future(lookup.future))
        finally:
            lookup.waiting -= 1
            if not lookup.waiting and lookup.future.cancel():  # no thread had begun it
                self._end(host, port, lookup)
        return [str(address[0]) for *_, address in found]

    def _begin(self, host: str, port: int) -> _Lookup:
        loop = asyncio.get_running_loop()
        future = self._threads.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        lookup = self._lookups[host, port] = _Lookup(future)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed while the thread was blocked
                loop.call_soon_threadsafe(self._end, host, port, lookup)

        future.add_done_callback(ended)
        return lookup

    def _end(self, host: str, port: int, lookup: _Lookup) -> None:
        if self._lookups.get((host, port)) is lookup:
            del self._lookups[host, port]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def fresh_s(headers: Mapping[str, str], default_s: float) -> float:
    """Return for how many seconds a response may be reused, by its Cache-Control; 0 if not at all.

    `headers` has lower-case names. `default_s` applies to responses without a lifetime.
    """
    control = _directives(headers.get("cache-control", ""))
    if control.keys() & {"no-store", "private", "no-cache"} or headers.get("vary", "").strip() == "*":
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in control:
            return min(_seconds(control[name]), MAX_FRESH_S)
    return default_s


def _directives(header: str) -> dict[str, str]:
    pairs = (part.strip().lower().partition("=") for part in header.split(","))
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs if name}


def _seconds(text: str) -> float:
    """Return the seconds of a directive; 0, which means stale, if it is invalid."""
    text = text.strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0.0


class ImageHostError(InvalidImageError):
    """The host of an image URL cannot be reached, is too slow, or does not answer with an image."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response: status, headers by lower-case name, and the body if the status is a success."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def get(
    url: ImageUrl,
    addresses: Sequence[str],
    *,
    max_bytes: int,
    tls: ssl.SSLContext,
    proxy: Proxy | None = None,
) -> Response:
    """GET a URL from the first of its addresses that answers. The body is read only if the status is a success.

    With a `proxy`, the addresses are the proxy's. It follows no redirect and reuses no connection. It sets no time
    limit, and never blocks the event loop for more than a few milliseconds.

    Raises `ImageLimitError` for a body over `max_bytes`, `ImageHostError` for a compressed body or one in tiny pieces,
    `OSError` if no address answers, and `h11.RemoteProtocolError` for invalid HTTP.
    """
    http = h11.Connection(h11.CLIENT)
    sent = [("Host", url.authority), ("User-Agent", USER_AGENT), ("Accept", "image/*")]
    sent += [("Accept-Encoding", "identity"), ("Connection", "close")]
    target = url.target
    if proxy is not None and url.scheme == "http":  # the proxy answers; for https it only passes bytes on
        target, sent = str(url), [*sent, *proxy.credentials]
    head = h11.Request(method="GET", target=target.encode(), headers=sent)
    data, response = bytearray(), Response(0, {}, b"")
    async with _connection(url, addresses, tls, proxy) as (reader, writer):
        writer.write((http.send(head) or b"") + (http.send(h11.EndOfMessage()) or b""))
        async for event in _events(url, http, reader):
            if isinstance(event, h11.Response):
                response = _check_head(url, event, max_bytes)
                if response.status not in SUCCESS:
                    return response
            elif isinstance(event, h11.Data):
                data += event.data
                if len(data) > max_bytes:
                    raise _too_large(url, max_bytes)
    return Response(response.status, response.headers, bytes(data))


async def _events(
    url: ImageUrl, http: h11.Connection, reader: asyncio.StreamReader
) -> AsyncIterator[h11.Response | h11.Data]:
    """Yield the events of a response, bounded in number. Let the event loop run other tasks after every few."""
    events = size = interim = 0
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        events += 1
        if events > _EVENTS + size // _BYTES_PER_EVENT:
            raise ImageHostError(
                f"{url}: its host sends pieces of less than {_BYTES_PER_EVENT} bytes on average"
            )
        if events % _EVENTS_AT_A_TIME == 0:
            await asyncio.sleep(0)  # `read` does not yield while data is buffered
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(_PIECE_BYTES))
        elif isinstance(event, h11.InformationalResponse):
            interim += 1
            if interim > _INTERIM_RESPONSES:
                raise ImageHostError(f"{url}: its host sent more than {_INTERIM_RESPONSES} interim responses")
        elif isinstance(event, h11.Response | h11.Data):
            size += len(event.data) if isinstance(event, h11.Data) else 0
            yield event


def _check_head(url: ImageUrl, event: h11.Response, max_bytes: int) -> Response:
    headers = {name.decode("latin-1").lower(): _text(value) for name, value in event.headers}
    if event.status_code in SUCCESS:
        if _COMPRESSIONS & {each.strip() for each in headers.get("content-encoding", "").lower().split(",")}:
            raise ImageHostError(f"{url} answered with a compressed body, which the client did not request")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > max_bytes:
            raise _too_large(url, max_bytes)
    return Response(event.status_code, headers, b"")


def _text(value: bytes) -> str:
    """Return a header's text: hosts send UTF-8, or Latin-1 as the standard says."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _too_large(url: ImageUrl, max_bytes: int) -> ImageLimitError:
    return ImageLimitError(f"the image at {url} has more than {max_bytes} bytes")


@asynccontextmanager
async def _connection(
    url: ImageUrl, addresses: Sequence[str], tls: ssl.SSLContext, proxy: Proxy | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to the first address that answers, which need not be the first. The connection is aborted at the end."""
    if not addresses:
        raise OSError("the name has no address")
    found = [_address(each, proxy.port if proxy else url.port) for each in addresses[:_ADDRESSES]]
    connected = await start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS_S)
    at_once = url.scheme == "https" and proxy is None
    reader, writer = await asyncio.open_connection(
        sock=connected, ssl=tls if at_once else None, server_hostname=url.host if at_once else None
    )
    try:
        if url.scheme == "https" and proxy is not None:
            await open_tunnel(url, proxy, reader, writer)
            await writer.start_tls(tls, server_hostname=url.host)
        yield reader, writer
    finally:
        writer.transport.abort()


def _address(text: str, port: int) -> AddrInfoType:
    if ipaddress.ip_address(text).version == 6:
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (text, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (text, port)
