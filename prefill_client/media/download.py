"""One GET of one URL, at addresses that were checked: no proxy, no redirect, no connection that is used twice."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.version import __version__
from prefill_client.media.image_url import ImageUrl

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
