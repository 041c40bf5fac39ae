"""One GET of one URL: the lookup of its host, the request, and how long the response may be reused."""

import asyncio
import ipaddress
import math
import re
import socket
import ssl
from calendar import timegm
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate
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
# A response may have headers of so many bytes and lines. h11 takes a few milliseconds for so many lines.
_HEAD_BYTES, _HEAD_LINES = 128 << 10, 1000
# Events parsed before the event loop runs other tasks: about 0.3 ms.
_EVENTS_AT_A_TIME = 16
# A host may send this many events for one image, and one more for each 256 bytes. Network packets are larger than that.
_EVENTS, _BYTES_PER_EVENT = 1000, 256
_INTERIM_RESPONSES = 8
# "Partial" answers no request for a part: some hosts send it for whole files.
SUCCESS = range(200, 300)
# Headers that are lists, so that a response may have several of each.
_LISTS = frozenset({"cache-control", "content-encoding", "vary"})
# The end of a head, as h11 recognises it, and a header that says that a body is not encoded. HTTP/1.1 no longer has it.
_BLANK_LINE = re.compile(rb"\n\r?\n")
_IDENTITY = re.compile(rb"\nTransfer-Encoding:[ \t]*identity[ \t]*\r?(?=\n)", re.IGNORECASE)
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
    """Return for how many seconds a response may be reused; 0 if not at all. These are the rules of RFC 9111, 4.2.

    `headers` has lower-case names. `default_s` applies to responses without a lifetime. Without a `Date`, `Expires`
    counts as past: the clocks of the two hosts may differ.
    """
    control = _directives(headers.get("cache-control", ""))
    if control.keys() & {"no-store", "private", "no-cache"} or "*" in headers.get("vary", ""):
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in control:
            lifetime_s = _seconds(control[name])
            break
    else:
        if "expires" not in headers:
            return default_s
        lifetime_s = _date_s(headers["expires"], 0.0) - _date_s(headers.get("date", ""), math.inf)
    return min(max(lifetime_s - _seconds(headers.get("age", "")), 0.0), MAX_FRESH_S)


def _date_s(text: str, otherwise: float) -> float:
    """Return the seconds since 1970 of a header's date, which is in GMT; `otherwise` if it is invalid."""
    with suppress(ValueError, OverflowError):  # the parser accepts any number of hours
        if parsed := parsedate(text):
            return float(timegm(parsed))
    return otherwise


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
    sent = [("Host", url.authority), ("User-Agent", USER_AGENT), ("Accept", "*/*")]
    sent += [("Accept-Encoding", "identity"), ("Connection", "close")]
    target = url.target
    if proxy is not None and url.scheme == "http":  # the proxy answers; for https it only passes bytes on
        target, sent = str(url), [*sent, *proxy.credentials]
    head = h11.Request(method="GET", target=target.encode(), headers=sent)
    data = bytearray()
    async with _connection(url, addresses, tls, proxy) as (reader, writer):
        writer.write((http.send(head) or b"") + (http.send(h11.EndOfMessage()) or b""))
        response = _check_head(url, await _final_head(url, http, reader), max_bytes)
        if response.status in SUCCESS:
            async for piece in _body(url, http, reader):
                data += piece
                if len(data) > max_bytes:
                    raise _too_large(url, max_bytes)
    return Response(response.status, response.headers, bytes(data))


async def _final_head(url: ImageUrl, http: h11.Connection, reader: asyncio.StreamReader) -> h11.Response:
    """Pass a response up to the end of its headers to h11; return them."""
    rest = b""
    for _ in range(1 + _INTERIM_RESPONSES):
        head, rest = await _read_head(url, reader, rest)
        http.receive_data(head)
        event = http.next_event()
        if isinstance(event, h11.Response):
            if rest:
                http.receive_data(rest)
            return event
    raise ImageHostError(f"{url}: its host sent more than {_INTERIM_RESPONSES} interim responses")


async def _read_head(url: ImageUrl, reader: asyncio.StreamReader, rest: bytes) -> tuple[bytes, bytes]:
    """Return the next head of a response, and what follows it; `rest` followed the head before it.

    The head lacks what h11 refuses and other clients accept: empty lines before it, and the coding `identity`.
    """
    data, size, end = bytearray(), 0, None
    piece = rest or await reader.read(_PIECE_BYTES)
    while end is None:
        if not piece:
            raise ImageHostError(f"{url}: its host closed the connection before the end of the headers")
        if size > _HEAD_BYTES:
            raise ImageHostError(f"{url}: its host sent headers of more than {_HEAD_BYTES} bytes")
        size += len(piece)
        seen = max(0, len(data) - 2)
        data += piece if data else piece.lstrip(b"\r\n")
        end = _BLANK_LINE.search(data, seen)
        if end is None:
            piece = await reader.read(_PIECE_BYTES)
    head = bytes(data[: end.end()])
    if head.count(b"\n") > _HEAD_LINES:
        raise ImageHostError(f"{url}: its host sent headers of more than {_HEAD_LINES} lines")
    return _IDENTITY.sub(b"", head), bytes(data[end.end() :])


async def _body(url: ImageUrl, http: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the pieces of a body, bounded in number. Let the event loop run other tasks after every few."""
    events = size = 0
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
        elif isinstance(event, h11.Data):
            size += len(event.data)
            yield event.data


def _check_head(url: ImageUrl, event: h11.Response, max_bytes: int) -> Response:
    found: dict[str, list[str]] = {}
    for name, value in event.headers:
        found.setdefault(name.decode("latin-1").lower(), []).append(_text(value))
    headers = {name: ", ".join(each) if name in _LISTS else each[0] for name, each in found.items()}
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
