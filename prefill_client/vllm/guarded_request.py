"""One HTTP request to vLLM while its images stay submitted, and the answer if an image is lost or broken."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic_core import from_json

from encoder_contract.errors import (
    EncoderError,
    InvalidImageError,
    LostImageError,
    Status,
    UnknownImageError,
)
from encoder_contract.video import Frames
from prefill_client.client import EncoderClient
from prefill_client.fleet.submission import KeptImages
from prefill_client.images import RowRequest, Submitted
from prefill_client.media.download import ImageHostError
from prefill_client.vllm.row_fetcher import when_needed
from prefill_client.vllm.videos import VideoTokenCounts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
FindFailed = Callable[[], Awaitable[EncoderError | None]]
"""Returns the error of an image, or None."""

_HTTP = {
    Status.INVALID_ARGUMENT: (400, "BadRequestError"),
    Status.PERMISSION_DENIED: (403, "PermissionDeniedError"),
    Status.NOT_FOUND: (404, "NotFoundError"),
    Status.INTERNAL: (500, "InternalServerError"),
}
# vLLM's answer if the host of a URL has no image.
_IMAGE_HOST = (422, "UnprocessableEntityError")
_DOWN = (503, "ServiceUnavailableError")
# No engine can do better: only whoever has the file.
_LOST = (410, "ImageLostError")
LOST = "the encoder service has lost an image of this request: render the request again, or send its images again"


class GuardedRequest:
    """Passes vLLM's answer to the caller, except an error whose cause is a lost or broken image."""

    def __init__(
        self,
        body: bytes,
        kept: KeptImages,
        failed: FindFailed,
        receive: Receive,
        send: Send,
        *,
        first_encoded: FindFailed | None = None,
        videos: VideoTokenCounts | None = None,
    ) -> None:
        """Pass `body` to vLLM as the caller's body. `failed` finds the broken image when vLLM could not answer.

        `first_encoded` waits until the first image is encoded, and returns its error; vLLM gets the request then.
        `videos` has the tokens that the answer's usage shall show as those of videos.
        """
        self._kept = kept
        self._first_encoded = first_encoded
        self._caller = receive
        self._videos = videos
        self._find_failed = failed
        self._receive = replay(body, partial(self._receive_or_disconnect, receive))
        self._send = send
        self._start: Message | None = None  # held back until the body begins
        self._has_begun = False
        self._aborted = asyncio.Event()
        self._error: EncoderError | None = None
        self.status = 0
        """The HTTP status of vLLM's answer; 0 before it has one."""

    async def run(self, app: App, scope: MutableMapping[str, Any]) -> EncoderError | None:
        """Let vLLM answer. Return the error of an image if it kept vLLM from answering and no answer has begun."""
        serving = asyncio.ensure_future(self._serve(app, scope))
        losing = asyncio.ensure_future(self._kept.lost())
        try:
            await asyncio.wait({serving, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not self._has_begun:
                self._abort(losing.result())
            await serving
        finally:
            losing.cancel()
            serving.cancel()
        return self._error

    async def _serve(self, app: App, scope: MutableMapping[str, Any]) -> None:
        if self._first_encoded is None or await self._may_begin(self._first_encoded):
            await app(scope, self._receive, self._forward)

    async def _may_begin(self, first_encoded: FindFailed) -> bool:
        """Wait for the first image; return False if it failed, the request was aborted, or the caller has left."""
        encoding = asyncio.ensure_future(first_encoded())
        # The body has been received, so the caller's next message is a disconnect.
        ending = asyncio.ensure_future(self._receive_or_disconnect(self._caller))
        try:
            await asyncio.wait({encoding, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not encoding.done():
                return False
            if (error := encoding.result()) is not None:
                self._abort(error)
            return error is None
        finally:
            encoding.cancel()
            ending.cancel()

    async def _receive_or_disconnect(self, receive: Receive) -> Message:
        """Return the caller's next message, or a disconnect once the request is aborted."""
        receiving = asyncio.ensure_future(receive())
        aborting = asyncio.ensure_future(self._aborted.wait())
        try:
            await asyncio.wait({receiving, aborting}, return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else {"type": "http.disconnect"}
        finally:
            receiving.cancel()
            aborting.cancel()

    async def _forward(self, message: Message) -> None:
        """Send a message of vLLM's answer to the caller, unless the request is aborted."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if message["status"] >= 500:
                await self._abort_if_image_failed()
            self._start = message
            return
        if self._aborted.is_set():
            return
        added = 0
        if self._videos is not None and (body := message.get("body")):
            message = {**message, "body": self._videos.in_usage(body)}
            added = len(message["body"]) - len(body)
        if self._start is not None:
            start, self._start, self._has_begun = self._start, None, True
            await self._send(_longer(start, added) if added else start)
        await self._send(message)

    async def _abort_if_image_failed(self) -> None:
        """Find out whether an image is lost or broken: vLLM's answer says only that the request failed."""
        if (error := self._kept.error or await self._find_failed()) is not None:
            self._abort(error)

    def _abort(self, error: EncoderError) -> None:
        self._error = error
        self._aborted.set()


async def failed_image(
    client: EncoderClient,
    answers: Sequence[Submitted],
    names: Sequence[str],
    *,
    request_id: str,
    timeout_s: float,
    continues: bool = False,
) -> EncoderError | None:
    """Ask the service for one row of each image; return the error of an image that is broken or lost.

    `answers` and `names` have one entry for each image of the prompt: the answer to its Submit, and what the error
    message calls it. An answer without an endpoint belongs to an image that was not submitted for this request, but for
    an earlier one that this `continues`, or by another process.
    """
    named: dict[tuple[bytes, Frames | None], tuple[str, Submitted]] = {}
    for name, answer in zip(names, answers, strict=True):
        named.setdefault((answer.digest, answer.frames), (name, answer))
    submitted = [(name, answer) for name, answer in named.values() if answer.endpoint]
    requests = [
        RowRequest(each.digest, row_end=1, submitted_to=each.endpoint, frames=each.frames)
        for _, each in submitted
    ]
    with suppress(EncoderError):  # then vLLM's own answer stands
        async with client.fetch(requests, request_id=request_id, timeout_s=timeout_s, kept=True) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome.error, InvalidImageError):
                    return InvalidImageError(f"{submitted[outcome.index][0]}: {outcome.error.message}")
    others = [(name, answer) for name, answer in named.values() if not answer.endpoint]
    requests = [RowRequest(each.digest, row_end=1, frames=each.frames) for _, each in others]
    with suppress(EncoderError):
        async with client.fetch(requests, request_id=request_id, timeout_s=timeout_s, grace_ms=0) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome.error, UnknownImageError):
                    if not continues:
                        return LostImageError(LOST)
                    return UnknownImageError(
                        f"{others[outcome.index][0]}, of an earlier response, is no longer kept: send the "
                        "conversation with its images, without previous_response_id"
                    )
    return None


async def first_encoded(
    client: EncoderClient,
    answers: Sequence[Submitted],
    name: str,
    window_tokens: int,
    *,
    request_id: str,
    priority: int,
    timeout_s: float,
) -> EncoderError | None:
    """Wait until the first image of a request is encoded; return its error, which calls it `name`, if it is broken.

    Meanwhile all images are requested as the engine will request them, so that the service encodes them in its order.
    """
    requests: dict[bytes, RowRequest] = {}
    tokens = 0
    for answer in answers:
        chunk, needed_in_ms = when_needed(tokens, window_tokens)
        request = RowRequest(
            answer.digest,
            row_end=1,
            chunk=chunk,
            needed_in_ms=needed_in_ms,
            submitted_to=answer.endpoint,
            frames=answer.frames,
        )
        requests.setdefault(request.name, request)
        tokens += answer.tokens
    with suppress(EncoderError):  # the engine waits instead
        async with client.fetch(
            [*requests.values()], request_id=request_id, priority=priority, timeout_s=timeout_s, kept=True
        ) as outcomes:
            async for outcome in outcomes:
                if outcome.index == 0:
                    error = outcome.error
                    return error.about(name, 0) if isinstance(error, InvalidImageError) else None
    return None


async def read_body(receive: Receive) -> bytes | None:
    """Return the body of a request, or None if the caller left before its end."""
    pieces = []
    while (message := await receive())["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)
    return None


def parsed_json(body: bytes) -> Any:
    """Return the JSON of a body, as vLLM's `json.loads` reads it; None if it is invalid.

    The other parser is ten times as fast, and refuses more: UTF-16, lone surrogates, deep nesting.
    """
    with suppress(ValueError):
        return from_json(body)
    with suppress(ValueError, RecursionError):
        return json.loads(body)
    return None


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns `body` first, and then the caller's further messages, such as a disconnect."""
    first = True

    async def replayed() -> Message:
        nonlocal first
        if not first:
            return await receive()
        first = False
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def with_length(scope: MutableMapping[str, Any], length: int) -> MutableMapping[str, Any]:
    """Return the scope of a request with another content length."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _longer(start: Message, added: int) -> Message:
    """Return the start of an answer whose only message of its body has got so many bytes more."""
    headers = [
        (name, str(int(value) + added).encode() if name.lower() == b"content-length" else value)
        for name, value in start["headers"]
    ]
    return {**start, "headers": headers}


def http_status(error: EncoderError) -> tuple[int, str]:
    """Return the HTTP status of an error, and vLLM's name for it."""
    if isinstance(error, LostImageError):
        return _LOST
    return _IMAGE_HOST if isinstance(error, ImageHostError) else _HTTP.get(error.status, _DOWN)


async def send_error(send: Send, error: EncoderError, request_id: str) -> None:
    """Answer with the error's text, in the form of vLLM's own errors."""
    code, kind = http_status(error)
    body = json.dumps(
        {"error": {"message": error.message, "type": kind, "param": None, "code": code}}
    ).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode("latin-1")),
    ]
    if code == _DOWN[0]:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_ms / 1000))).encode()))
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
