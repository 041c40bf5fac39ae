"""Loads the bytes behind URLs of images or videos: data, http and https URLs, and file URLs, as far as allowed."""

import asyncio
import binascii
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

import h11
import pybase64
from cachetools import LRUCache

from encoder_contract.errors import (
    EncoderError,
    ForbiddenError,
    ImageLimitError,
    InvalidImageError,
    OverloadedError,
)
from encoder_contract.turns import Room, at_most
from prefill_client.media.destinations import Destinations, ImageUrl
from prefill_client.media.download import (
    MAX_FRESH_S,
    SUCCESS,
    ImageHostError,
    Resolver,
    Response,
    fresh_s,
    get,
)
from prefill_client.media.local_files import LocalFolder, is_file_url
from prefill_client.media.proxy import Proxy, proxy_for

log = logging.getLogger(__name__)

# Concurrent downloads from one host: more would only share its bandwidth. A slow host then delays only its own images.
_DOWNLOADS_PER_HOST = 16
# Concurrent downloads in total: this bounds the memory of partly received images.
_DOWNLOADS = 64
# Concurrent lookups of one request, so that slow names delay their own request before they delay others.
_LOOKUPS_PER_REQUEST = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Length up to which sources are compared by value. The text of a longer one is mostly the image itself.
_SHORT = 1 << 12
# Length up to which the event loop decodes a data URL, in 0.1 ms. The way to a thread and back takes as long.
_BRIEF = 1 << 20
MAX_REDIRECTS = 10  # as browsers and other clients allow at least

# Resolves a host and port to addresses, as text. May raise `OSError`.
Resolve = Callable[[str, int], Awaitable[list[str]]]

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Flight(Generic[Result]):
    """A running task and the number of callers that wait for it."""

    task: "asyncio.Task[Result]"
    waiting: int = 0


class SingleFlight(Generic[Result]):
    """Runs one task per key, shared by all callers; a task without waiting callers is cancelled.

    Not thread-safe: use from one event loop.
    """

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight[Result]] = {}

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run `work`, or wait for the task that already runs it. Raises the errors of `work`."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.task.done() or not flight.waiting:
                flight.task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An image, and until when it may be reused, on the steady clock."""

    data: bytes
    fresh_until: float


class ImageLoader:
    """Loads the bytes behind image URLs. Concurrent callers of one URL share a download.

    Images are cached in `cache_bytes` of memory for as long as their host allows, or for `default_fresh_s` seconds if
    the response has no lifetime. No credentials are sent. Not thread-safe: use from one event loop.
    """

    def __init__(
        self,
        destinations: Destinations,
        *,
        max_bytes: int,
        timeout_s: float,
        cache_bytes: int = 256 << 20,
        default_fresh_s: float = 60.0,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        files: LocalFolder | None = None,
        what: str = "image",
    ) -> None:
        """`max_bytes` bounds an image. `timeout_s` bounds its download with redirects and the wait for a free slot.

        Without `files`, a file URL is invalid. `what` names the medium in error messages.
        """
        self.what = what
        self._destinations = destinations
        self._max_bytes = max_bytes
        self._files = files
        self._timeout_s = timeout_s
        self._default_fresh_s = default_fresh_s
        self._resolve = resolve or Resolver().addresses
        self._tls = tls
        self._contexts: SingleFlight[ssl.SSLContext] = SingleFlight()
        self._slots = Room(_DOWNLOADS, share=at_most(_DOWNLOADS_PER_HOST))
        self._cache: LRUCache[str, _Loaded] = LRUCache(cache_bytes, getsizeof=lambda each: len(each.data))
        self._downloads: SingleFlight[bytes] = SingleFlight()

    async def load_all(self, sources: Sequence[str | bytes]) -> list[bytes]:
        """Return the bytes of all images of a request, in order. A source is a URL, or the bytes themselves.

        Equal sources are loaded once and share their bytes: a request can name one image many times in few bytes.
        Raises the error of the first that fails, as `load` does, with the image's number, after it has cancelled the
        others.
        """
        lookups = Room(_LOOKUPS_PER_REQUEST)

        async def load(index: int, source: str | bytes) -> bytes:
            try:
                return source if isinstance(source, bytes) else await self.load(source, lookups)
            except EncoderError as error:
                raise error.about(f"{self.what} {index}", index) from error

        try:
            async with asyncio.TaskGroup() as group:
                loading: dict[Hashable, asyncio.Task[bytes]] = {}
                for index, source in enumerate(sources):
                    if _key(source) not in loading:
                        loading[_key(source)] = group.create_task(load(index, source))
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return [loading[_key(source)].result() for source in sources]
        raise first  # outside of the group's handler: the group is not its context

    async def load(self, url: str, lookups: Room | None = None) -> bytes:
        """Return the bytes of an image. `lookups` bounds the concurrent name lookups of its request.

        Raises `InvalidImageError` for an invalid URL, its subclass `ImageHostError` if the host fails,
        `ImageLimitError` for more than `max_bytes`, `ForbiddenError` for a destination that is not allowed, and
        `OverloadedError` if too many other images are being loaded; for a file URL, the errors of `LocalFolder.read`.
        """
        if url[:5].lower() == "data:":
            brief = len(url) <= _BRIEF
            return self._decode(url) if brief else await asyncio.to_thread(self._decode, url)
        if self._files is not None and is_file_url(url):
            return await asyncio.to_thread(self._files.read, url, self._max_bytes)
        parsed = ImageUrl.parse(url)
        self._destinations.check(parsed)
        loaded = self._cache.get(str(parsed))
        if loaded is not None and monotonic() < loaded.fresh_until:
            return loaded.data
        return await self._download(parsed, lookups or Room(_LOOKUPS_PER_REQUEST))

    async def _download(self, url: ImageUrl, lookups: Room) -> bytes:
        """Resolve the host for this request, then share the download with other requests.

        Requests do not share lookups: one that resolves slowly would delay others that name the same image.
        """
        until = asyncio.get_running_loop().time() + self._timeout_s
        try:
            addresses = await self._addresses(url, lookups, until)
            download = partial(self._follow, url, addresses, lookups, until)
            return await self._downloads.run(str(url), download)
        except (OSError, h11.RemoteProtocolError) as error:
            raise ImageHostError(f"{url} could not be loaded: {error}") from error
        except (ValueError, h11.LocalProtocolError) as error:
            raise InvalidImageError(f"not a URL: {error}") from error

    async def _follow(self, url: ImageUrl, addresses: list[str], lookups: Room, until: float) -> bytes:
        """Download a URL from `addresses`, follow redirects, and cache the image for as long as all hosts allow."""
        first, fresh = str(url), MAX_FRESH_S
        for hop in range(1 + MAX_REDIRECTS):
            if hop:
                addresses = await self._addresses(url, lookups, until)
            response = await self._get(url, addresses, until)
            fresh = min(fresh, fresh_s(response.headers, self._default_fresh_s))
            if response.status in SUCCESS:
                self._store(first, response.body, fresh)
                return response.body
            if response.status not in _REDIRECTS or "location" not in response.headers:
                raise ImageHostError(f"{url} answered {response.status}")
            url = self._redirected(url, response.headers["location"])
        raise ImageHostError(f"more than {MAX_REDIRECTS} redirects, the last to {url}")

    def _store(self, url: str, data: bytes, fresh: float) -> None:
        self._cache.pop(url, None)
        if fresh and len(data) <= self._cache.maxsize:
            self._cache[url] = _Loaded(data, monotonic() + fresh)

    def _redirected(self, url: ImageUrl, location: str) -> ImageUrl:
        target = url.joined(location)
        if (url.scheme, target.scheme) == ("https", "http"):
            raise ForbiddenError(f"{url} redirects from https to http")
        self._destinations.check(target)
        return target

    async def _addresses(self, url: ImageUrl, lookups: Room, until: float) -> list[str]:
        """Return the allowed addresses of a URL's host.

        Connections go to these addresses and not to the name, so a name that resolves differently the second time has
        no effect. No download slot is held here.
        """
        proxy = self._proxy(url)
        host, port = (proxy.host, proxy.port) if proxy else (url.host, url.port)
        late = ImageHostError(f"{url}: its host name was not resolved within {self._timeout_s:g} s")
        async with _until(until, late), lookups.taken():
            found = await self._resolve(host, port)
        if proxy:
            self._destinations.check_written(url)
            return found
        addresses = self._destinations.permitted(found)
        if found and not addresses:
            log.info(
                "an image URL was refused: no address of its host is allowed",
                extra={"fields": {"host": url.host}},
            )
            raise ForbiddenError(f"the addresses of {url.host} are not allowed here")
        return addresses

    def _proxy(self, url: ImageUrl) -> Proxy | None:
        return proxy_for(url) if self._destinations.uses_proxy else None

    async def _get(self, url: ImageUrl, addresses: list[str], until: float) -> Response:
        """GET a URL once a download slot is free."""
        host = url.authority
        slow = ImageHostError(f"{url} took more than {self._timeout_s:g} s")
        busy = OverloadedError(
            f"{url}: {_DOWNLOADS} other images have been loading for {self._timeout_s:g} s"
        )
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(until):
                    await stack.enter_async_context(self._slots.taken(host))
            except TimeoutError as late:
                raise (slow if self._slots.held_by(host) >= _DOWNLOADS_PER_HOST else busy) from late
            async with _until(until, slow):
                tls = await self._context()
                return await get(url, addresses, max_bytes=self._max_bytes, tls=tls, proxy=self._proxy(url))
        raise AssertionError("unreachable")

    async def _context(self) -> ssl.SSLContext:
        """Return the TLS context. A thread makes it at the first download: it parses all of the host's authorities."""
        if self._tls is None:
            make = partial(asyncio.to_thread, ssl.create_default_context)
            self._tls = await self._contexts.run("default", make)
        return self._tls

    def _decode(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidImageError(f"a data URL must have the form data:{self.what}/...;base64,...")
        if len(body) // 4 * 3 > self._max_bytes + 2:
            raise ImageLimitError(f"the data URL holds more than {self._max_bytes} bytes")
        try:
            return pybase64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidImageError(
                "the data URL is not base64: a character is not of its alphabet, or padding is missing"
            ) from error


def _key(source: str | bytes) -> Hashable:
    """Return what equal sources share. Long ones are told apart by identity: a hash takes the event loop 1 ms a MiB."""
    return source if len(source) <= _SHORT else id(source)


@asynccontextmanager
async def _until(until: float, late: EncoderError) -> AsyncIterator[None]:
    """Raise `late` if the block runs past `until`, a time of the event loop's clock."""
    try:
        async with asyncio.timeout_at(until):
            yield
    except TimeoutError as error:
        raise late from error
