"""One GET of one URL: its host's addresses, the request, and how long the response may be used again."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import h11

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.version import __version__
from prefill_client.media.destinations import ImageUrl

# A lookup blocks its thread for as long as the system's resolver likes: 10 s by default for a name server that is down.
THREADS = 32
# A server that says "for ever" may still have been wrong.
MAX_FRESH_S = 7 * 24 * 3600.0
# Read at a time: small enough for all headers in one to be parsed in a few milliseconds.
_PIECE_BYTES = 16 << 10
# Parsed at a time, before the event loop has its turn: some 0.3 ms of an event loop that other requests share.
_EVENTS_AT_A_TIME = 16
# What a host may send for one image: these, and one more for so many bytes of it. A network's packet is larger.
_EVENTS, _BYTES_OF_AN_EVENT = 1000, 256
_INTERIM_ANSWERS = 8
OK, NOT_MODIFIED = 200, 304
# Some hosts refuse callers that do not say what they are.
USER_AGENT = f"encoder-service/{__version__}"


@dataclass(eq=False, slots=True)
class _Lookup:
    """A lookup that waits for a thread or has one, and how many wait for it."""

    future: "Future[list[Any]]"
    waiting: int = 0


class Resolver:
    """Looks names up. Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="resolve")
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, as text; those of an address at once. Raises `OSError`."""
        if _is_address(host):
            return [host]
        lookup = self._lookups.get((host, port)) or self._begin(host, port)
        lookup.waiting += 1
        try:
            found = await asyncio.shield(asyncio.wrap_future(lookup.future))
        finally:
            lookup.waiting -= 1
            if not lookup.waiting and lookup.future.cancel():  # it had no thread yet
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


def fresh_s(headers: Mapping[str, str], unsaid_s: float) -> float | None:
    """Return for how many seconds, from now, a response is fresh; None: it must not be kept at all.

    `headers` has lower-case names. `unsaid_s` is for responses that say nothing of it.
    """
    control = _directives(headers.get("cache-control", ""))
    if control.keys() & {"no-store", "private"} or headers.get("vary", "").strip() == "*":
        return None
    if "no-cache" in control:
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in control:
            return _bounded(_seconds(control[name]) - _seconds(headers.get("age", "0")))
    if "expires" in headers:
        return _bounded(_until(headers["expires"], headers.get("date")))
    return unsaid_s


def _directives(header: str) -> dict[str, str]:
    pairs = (part.strip().lower().partition("=") for part in header.split(","))
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs if name}


def _seconds(text: str) -> float:
    """Return a count of seconds; 0, which is stale, for what is none."""
    text = text.strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0.0


def _until(expires: str, date: str | None) -> float:
    try:
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        return (parsedate_to_datetime(expires) - now).total_seconds()
    except (ValueError, TypeError):  # no date; one without a time zone beside one with
        return 0.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_FRESH_S)


class ImageHostError(InvalidImageError):
    """The host of an image URL cannot be reached, is too slow, or answers something else than an image."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a server answered: its headers by lower-case name, and the body of a 200."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def get(
    url: ImageUrl,
    addresses: Sequence[str],
    *,
    max_bytes: int,
    tls: ssl.SSLContext,
    headers: Sequence[tuple[str, str]] = (),
) -> Response:
    """GET a URL from the first of its addresses that answers; the body only of a 200.

    Raises `ImageLimitError` for a body over `max_bytes`, `ImageHostError` for a compressed one and one in tiny pieces,
    `OSError` when no address answers, `h11.RemoteProtocolError` for what is no HTTP. It has no time limit of its own,
    and never holds the event loop for more than a few milliseconds, whatever the host sends.
    """
    http = h11.Connection(h11.CLIENT)
    ours = [("Host", url.authority), ("User-Agent", USER_AGENT), ("Accept", "image/*")]
    ours += [("Accept-Encoding", "identity"), ("Connection", "close")]
    head = h11.Request(method="GET", target=url.target.encode(), headers=[*ours, *headers])
    data, response = bytearray(), Response(0, {}, b"")
    async with _connection(url, addresses, tls) as (reader, writer):
        writer.write((http.send(head) or b"") + (http.send(h11.EndOfMessage()) or b""))
        async for event in _events(url, http, reader):
            if isinstance(event, h11.Response):
                response = _begun(url, event, max_bytes)
                if response.status != OK:
                    return response
            elif isinstance(event, h11.Data):
                data += event.data
                if len(data) > max_bytes:
                    raise _too_large(url, max_bytes)
    return Response(response.status, response.headers, bytes(data))


async def _events(
    url: ImageUrl, http: h11.Connection, reader: asyncio.StreamReader
) -> AsyncIterator[h11.Response | h11.Data]:
    """Yield what a host answers, in a bounded number of pieces, with a pass of the event loop after every few."""
    events = size = interim = 0
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        events += 1
        if events > _EVENTS + size // _BYTES_OF_AN_EVENT:
            raise ImageHostError(
                f"{url}: its host sends pieces of less than {_BYTES_OF_AN_EVENT} bytes on average"
            )
        if events % _EVENTS_AT_A_TIME == 0:
            await asyncio.sleep(0)  # `read` returns at once for as long as something has been received
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(_PIECE_BYTES))
        elif isinstance(event, h11.InformationalResponse):
            interim += 1
            if interim > _INTERIM_ANSWERS:
                raise ImageHostError(f"{url}: its host sent more than {_INTERIM_ANSWERS} interim responses")
        elif isinstance(event, h11.Response | h11.Data):
            size += len(event.data) if isinstance(event, h11.Data) else 0
            yield event


def _begun(url: ImageUrl, event: h11.Response, max_bytes: int) -> Response:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
    if event.status_code == OK:
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ImageHostError(f"{url} answered with a compressed body, which was not asked for")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > max_bytes:
            raise _too_large(url, max_bytes)
    return Response(event.status_code, headers, b"")


def _too_large(url: ImageUrl, max_bytes: int) -> ImageLimitError:
    return ImageLimitError(f"the image at {url} has more than {max_bytes} bytes")


@asynccontextmanager
async def _connection(
    url: ImageUrl, addresses: Sequence[str], tls: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to the first address that answers; the connection ends at once with the block."""
    failure = OSError("the name has no address")
    for address in addresses:
        try:
            reader, writer = await asyncio.open_connection(
                address,
                url.port,
                ssl=tls if url.scheme == "https" else None,
                server_hostname=url.host if url.scheme == "https" else None,
            )
            break
        except OSError as error:
            failure = error
    else:
        raise failure
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
