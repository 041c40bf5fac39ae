"""Image URLs to bytes: data URLs always, http and https URLs from allowed destinations, each fetched once."""

import asyncio
import base64
import binascii
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic
from weakref import WeakValueDictionary

import h11
from cachetools import LRUCache

from encoder_contract.errors import ForbiddenError, ImageLimitError, InvalidImageError, UnavailableError
from prefill_client.media.destinations import Destinations
from prefill_client.media.download import NOT_MODIFIED, OK, Response, get
from prefill_client.media.freshness import MAX_FRESH_S, fresh_s
from prefill_client.media.image_url import ImageUrl
from prefill_client.media.single_flight import SingleFlight

log = logging.getLogger(__name__)

# At once from one host: more would only share its bandwidth, and a host that is slow delays only its own images.
_DOWNLOADS_OF_A_HOST = 16
# At once in all: this many images may lie in memory, half received.
_DOWNLOADS = 64
# Looking up a name blocks a thread for as long as the resolver likes; these are for nothing else.
_RESOLVERS = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 3

# Host and port to addresses, as text. May raise `OSError`.
Resolve = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An image, and how to ask whether it has changed: which URL answered with it, and the headers that ask it."""

    data: bytes
    answered_by: str
    asks: tuple[tuple[str, str], ...]
    fresh_until: float | None  # on `monotonic`'s clock, until when it needs no asking; None: not to be kept


class ImageLoader:
    """Loads the bytes behind image URLs; one download of a URL serves all who ask meanwhile. Belongs to one event loop.

    What a server allows to be kept is kept, in `cache_bytes` of memory, for as long as it says or, if it says nothing,
    for `unsaid_fresh_s`; after that the server is asked whether it has changed. No credentials are ever sent.
    """

    def __init__(
        self,
        destinations: Destinations,
        *,
        max_bytes: int,
        timeout_s: float,
        cache_bytes: int = 256 << 20,
        unsaid_fresh_s: float = 60.0,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Bound an image by `max_bytes`, and its download, redirects and waiting for its turn, by `timeout_s`."""
        self._destinations = destinations
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._unsaid_fresh_s = unsaid_fresh_s
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")
        self._resolve = resolve or self._look_up
        self._tls = tls or ssl.create_default_context()
        self._turns = asyncio.Semaphore(_DOWNLOADS)
        self._host_turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._kept: LRUCache[str, _Loaded] = LRUCache(cache_bytes, getsizeof=lambda each: len(each.data))
        self._downloads: SingleFlight[_Loaded] = SingleFlight()

    async def load(self, url: str) -> bytes:
        """Return the bytes.

        Raises `InvalidImageError` for a URL that holds or names no image, `ImageLimitError` over the limit,
        `ForbiddenError` for a destination that is not allowed, `UnavailableError` when a host does not answer.
        """
        if url[:5].lower() == "data:":
            return await asyncio.to_thread(self._decode, url)
        parsed = ImageUrl.parse(url)
        self._destinations.check(parsed)
        kept = self._kept.get(str(parsed))
        if kept is None or kept.fresh_until is None or monotonic() >= kept.fresh_until:
            kept = await self._downloads.run(str(parsed), partial(self._in_time, parsed))
        return kept.data

    async def _in_time(self, url: ImageUrl) -> _Loaded:
        try:
            async with asyncio.timeout(self._timeout_s):
                loaded = await self._follow(url)
        except TimeoutError as error:
            raise UnavailableError(f"{url} took more than {self._timeout_s:g} s") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise UnavailableError(f"{url} could not be loaded: {error}") from error
        except (ValueError, h11.LocalProtocolError) as error:
            raise InvalidImageError(f"not a URL: {error}") from error
        if loaded.fresh_until is None:
            self._kept.pop(str(url), None)
        elif len(loaded.data) <= self._kept.maxsize:
            self._kept[str(url)] = loaded
        return loaded

    async def _follow(self, url: ImageUrl) -> _Loaded:
        before, fresh, may_be_kept = self._kept.get(str(url)), MAX_FRESH_S, True
        for _ in range(1 + MAX_REDIRECTS):
            here = str(url)
            known = before if before is not None and before.answered_by == here else None
            response = await self._hop(url, known.asks if known else ())
            lasts = fresh_s(response.headers, self._unsaid_fresh_s)
            may_be_kept &= lasts is not None
            fresh = min(fresh, lasts or 0.0)
            fresh_until = monotonic() + fresh if may_be_kept else None
            if response.status == OK:
                return _Loaded(response.body, here, _validators(response), fresh_until)
            if response.status == NOT_MODIFIED and known is not None:
                return _Loaded(known.data, here, _validators(response) or known.asks, fresh_until)
            if response.status not in _REDIRECTS or "location" not in response.headers:
                raise _refusal(url, response.status)
            url = self._redirected(url, response.headers["location"])
        raise InvalidImageError(f"more than {MAX_REDIRECTS} redirects, the last to {url}")

    def _redirected(self, url: ImageUrl, location: str) -> ImageUrl:
        following = url.joined(location)
        if (url.scheme, following.scheme) == ("https", "http"):
            raise ForbiddenError(f"{url} redirects from https to http")
        self._destinations.check(following)
        return following

    async def _hop(self, url: ImageUrl, headers: Sequence[tuple[str, str]]) -> Response:
        turns = self._host_turns.get(url.authority) or asyncio.Semaphore(_DOWNLOADS_OF_A_HOST)
        self._host_turns[url.authority] = turns
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(turns)
            await stack.enter_async_context(self._turns)
            # Looked up here, checked, and connected to as checked: a name that changes its mind gains nothing.
            found = await self._resolve(url.host, url.port)
            addresses = self._destinations.permitted(found)
            if found and not addresses:
                log.info(
                    "an image URL was refused: no address of its host is allowed",
                    extra={"fields": {"host": url.host}},
                )
                raise ForbiddenError(f"the addresses of {url.host} are not allowed here")
            return await get(url, addresses, max_bytes=self._max_bytes, tls=self._tls, headers=headers)

    async def _look_up(self, host: str, port: int) -> list[str]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]

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


def _validators(response: Response) -> tuple[tuple[str, str], ...]:
    asked = (("If-None-Match", "etag"), ("If-Modified-Since", "last-modified"))
    return tuple((ours, response.headers[theirs]) for ours, theirs in asked if theirs in response.headers)


def _refusal(url: ImageUrl, status: int) -> InvalidImageError | UnavailableError:
    if status == 429 or status >= 500:
        return UnavailableError(f"{url} answered {status}")
    return InvalidImageError(f"{url} answered {status}")
