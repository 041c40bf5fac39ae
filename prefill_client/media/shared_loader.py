"""Image URLs to what can be submitted: of the clients of a fleet one downloads a URL, the others get what it found."""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from time import monotonic

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Geometry
from encoder_contract.header import read_header
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.client import EncoderClient
from prefill_client.fleet.url_calls import UrlCalls
from prefill_client.images import Image
from prefill_client.media.image_loader import ImageLoader, Known, Loaded
from prefill_client.media.image_url import ImageUrl
from prefill_client.media.single_flight import SingleFlight
from prefill_client.media.url_digest import shared_digest

log = logging.getLogger(__name__)

# After a server refused or failed: each URL is downloaded here, as if nobody shared anything.
REST_S = 5.0
# Open at a time: a connection has 512 streams, for Submit and Fetch too. Over it URLs are downloaded here.
MAX_ASKED = 128
# Of a download's time, what is waited for somebody else's; then two are better than none.
WAIT_SHARE = 0.5
UNSHARED_MS = 60_000
# A download that failed: those who waited for it all try now, instead of one after the other.
FAILED_MS = 2000
MAX_VALIDATOR_BYTES = 256
_ASKED_BY = {"If-None-Match": "etag", "If-Modified-Since": "last_modified"}


@dataclass(frozen=True, slots=True)
class _Question:
    """A URL, under which digest it is shared, and through whom."""

    url: ImageUrl
    digest: bytes
    calls: UrlCalls
    geometry: Geometry


class SharedLoader:
    """An `ImageLoader` that shares what URLs hold with the clients of its servers. One event loop's; `close` it.

    It needs no server: whatever goes wrong with sharing, the URL is downloaded here.
    """

    def __init__(self, loader: ImageLoader) -> None:
        self._loader = loader
        self._flights: SingleFlight[bytes | Image] = SingleFlight()
        self._said: set[asyncio.Task[None]] = set()
        self._asked = 0
        self._rest_until = float("-inf")

    async def open(self, url: str, client: EncoderClient) -> bytes | Image:
        """Return what `client.submit` takes for a URL: its bytes, or an image of which a server has the bytes.

        Raises as `ImageLoader.load` does.
        """
        if url[:5].lower() == "data:" or monotonic() < self._rest_until:
            return await self._loader.load(url)
        allowed = self._loader.allowed(url)
        if (kept := self._loader.kept(allowed)) is not None:
            return kept
        question = _Question(
            allowed,
            shared_digest(allowed, self._loader.destinations),
            client.url_calls,
            client.description.geometry,
        )
        key = (question.digest, question.calls.tenant_salt)
        return await self._flights.run(key, partial(self._open, question))

    async def close(self) -> None:
        """End what is still being told to servers."""
        for task in self._said:
            task.cancel()
        await asyncio.gather(*self._said, return_exceptions=True)

    async def _open(self, question: _Question) -> bytes | Image:
        answer = await self._resolved(question)
        known = self._named(question, answer.record) if answer.HasField("record") else None
        if known is not None and answer.fresh:
            return known
        if not answer.claim:
            return await self._loader.load(str(question.url))
        return await self._find_out(question, answer, known)

    async def _resolved(self, question: _Question) -> pb.ResolveUrlResponse:
        """Ask what the URL holds; an answer that knows nothing where that fails."""
        if self._asked >= MAX_ASKED:
            return pb.ResolveUrlResponse()
        self._asked += 1
        try:
            longest_s = self._loader.timeout_s
            return await question.calls.resolve(
                question.digest, wait_s=WAIT_SHARE * longest_s, claim_s=longest_s
            )
        except EncoderError as error:
            self._rest(error)
            return pb.ResolveUrlResponse()
        finally:
            self._asked -= 1

    def _named(self, question: _Question, record: pb.UrlRecord) -> Image | None:
        """Return the image that a record names; None for one that makes no sense here."""
        if len(record.digest) != 32 or not 0 < record.size_bytes <= self._loader.max_bytes:
            return None
        try:
            grid = question.geometry.grid(record.width, record.height)
        except EncoderError:
            return None
        tokens = question.geometry.tokens(grid)
        return Image(b"", record.digest, grid, tokens, elsewhere=partial(self._bring, question))

    async def _bring(self, question: _Question) -> bytes:
        """Download what a server said to have, and has not got after all."""
        if (kept := self._loader.kept(question.url)) is not None:
            return kept
        loaded = await self._loader.download(question.url)
        assert loaded.data is not None, "nothing was known"
        self._say(question, await asyncio.to_thread(_found, loaded), b"")
        return loaded.data

    async def _find_out(
        self, question: _Question, answer: pb.ResolveUrlResponse, known: Image | None
    ) -> bytes | Image:
        """Download the URL, or ask whether it still holds what is known, and say what came of it."""
        said = pb.RecordUrlRequest(unshared=True, fresh_ms=FAILED_MS)
        try:
            loaded = await self._loader.download(question.url, _known(answer.record) if known else None)
            if loaded.data is not None:
                said = await asyncio.to_thread(_found, loaded)
                return loaded.data
            assert known is not None
            said = _recorded(loaded, answer.record)
            return known
        finally:
            self._say(question, said, answer.claim)

    def _say(self, question: _Question, said: pb.RecordUrlRequest, claim: bytes) -> None:
        """Tell the server, and wait for nothing."""
        said.url_digest, said.claim = question.digest, claim
        task = asyncio.create_task(self._tell(question.calls, said), name="record-url")
        self._said.add(task)
        task.add_done_callback(self._said.discard)

    async def _tell(self, calls: UrlCalls, said: pb.RecordUrlRequest) -> None:
        try:
            await calls.record(said)
        except EncoderError as error:
            self._rest(error)

    def _rest(self, error: EncoderError) -> None:
        if monotonic() >= self._rest_until:
            log.info("image URLs are not shared for %g s: %s", REST_S, error.message)
        self._rest_until = monotonic() + REST_S


def _known(record: pb.UrlRecord) -> Known | None:
    """Return what to ask the host; None if it gave nothing to ask by, or what no header can hold."""
    headers = [(header, str(getattr(record, field))) for header, field in _ASKED_BY.items()]
    usable = tuple((header, value) for header, value in headers if value and _fits(value))
    return Known(record.answered_by, usable) if usable else None


def _found(loaded: Loaded) -> pb.RecordUrlRequest:
    """Return what to say of a download: what it holds, if its host allows that to be kept and it is an image."""
    assert loaded.data is not None
    try:
        width, height = read_header(loaded.data).upright
    except EncoderError:
        return pb.RecordUrlRequest(unshared=True, fresh_ms=FAILED_MS)
    record = pb.UrlRecord(
        digest=content_digest(loaded.data), size_bytes=len(loaded.data), width=width, height=height
    )
    return _recorded(loaded, record)


def _recorded(loaded: Loaded, record: pb.UrlRecord) -> pb.RecordUrlRequest:
    """Return what to say of what a URL holds; what may not be kept is not said."""
    if loaded.fresh_until is None:
        return pb.RecordUrlRequest(unshared=True, fresh_ms=UNSHARED_MS)
    given = dict(loaded.known.headers)
    etag, last_modified = (_sendable(given.get(header, "")) for header in _ASKED_BY)
    said = pb.UrlRecord(
        digest=record.digest,
        size_bytes=record.size_bytes,
        width=record.width,
        height=record.height,
        etag=etag,
        last_modified=last_modified,
        answered_by=loaded.known.answered_by,
    )
    fresh_s = max(0.0, loaded.fresh_until - monotonic())
    return pb.RecordUrlRequest(record=said, fresh_ms=round(fresh_s * 1000))


def _sendable(value: str) -> str:
    return value if _fits(value) else ""


def _fits(value: str) -> bool:
    return len(value) <= MAX_VALIDATOR_BYTES and value.isascii() and value.isprintable()
