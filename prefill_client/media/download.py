"""One GET of one URL, at addresses that were checked: no proxy, no redirect, no connection that is used twice."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11

from encoder_contract.errors import ImageLimitError, InvalidImageError
from prefill_client.media.image_url import ImageUrl

_PIECE_BYTES = 64 << 10
OK, NOT_MODIFIED = 200, 304


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

    Raises `ImageLimitError` for a body over `max_bytes`, `InvalidImageError` for a compressed one, `OSError` when no
    address answers, `h11.RemoteProtocolError` for what is no HTTP. It has no time limit of its own.
    """
    http = h11.Connection(h11.CLIENT)
    ours = [("Host", url.authority), ("Accept", "image/*"), ("Accept-Encoding", "identity")]
    head = h11.Request(
        method="GET", target=url.target.encode(), headers=[*ours, ("Connection", "close"), *headers]
    )
    data, response = bytearray(), Response(0, {}, b"")
    async with _connection(url, addresses, tls) as (reader, writer):
        writer.write((http.send(head) or b"") + (http.send(h11.EndOfMessage()) or b""))
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(_PIECE_BYTES))
            elif isinstance(event, h11.Response):
                response = _begun(url, event, max_bytes)
                if response.status != OK:
                    return response
            elif isinstance(event, h11.Data):
                data += event.data
                if len(data) > max_bytes:
                    raise _too_large(url, max_bytes)
    return Response(response.status, response.headers, bytes(data))


def _begun(url: ImageUrl, event: h11.Response, max_bytes: int) -> Response:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
    if event.status_code == OK:
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidImageError(f"{url} answered with a compressed body, which was not asked for")
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
