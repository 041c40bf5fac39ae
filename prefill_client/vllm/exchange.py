"""One request at vLLM while its images are kept: vLLM answers it, or the middleware if images are lost or broken."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from encoder_contract.errors import EncoderError, InvalidImageError, UnknownImageError
from prefill_client.client import EncoderClient
from prefill_client.fleet.submission import KeptImages
from prefill_client.images import RowRequest, Submitted

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
FindFailed = Callable[[], Awaitable[EncoderError | None]]


class Exchange:
    """Passes vLLM's answer to the caller, except an error that comes from a lost or broken image."""

    def __init__(
        self, body: bytes, kept: KeptImages, failed: FindFailed, receive: Receive, send: Send
    ) -> None:
        """Show vLLM `body` as the caller's body. `failed` finds the broken image when vLLM could not answer."""
        self._kept = kept
        self._failed = failed
        self._tell = replay(body, self._receive_more)
        self._receive = receive
        self._send = send
        self._start: Message | None = None  # held back until the answer begins
        self._begun = False
        self._given_up = asyncio.Event()
        self._error: EncoderError | None = None

    async def run(self, app: App, scope: MutableMapping[str, Any]) -> EncoderError | None:
        """Let vLLM answer. Return the error of an image if it kept vLLM from answering and no answer has begun."""
        serving = asyncio.ensure_future(app(scope, self._tell, self._answer))
        losing = asyncio.ensure_future(self._kept.lost())
        try:
            await asyncio.wait({serving, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not self._begun:
                self._give_up(losing.result())
            await serving
        finally:
            losing.cancel()
            serving.cancel()
        return self._error

    async def _receive_more(self) -> Message:
        """Return the caller's next message, or a disconnect to end a request whose images are lost."""
        receiving = asyncio.ensure_future(self._receive())
        giving_up = asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({receiving, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else {"type": "http.disconnect"}
        finally:
            receiving.cancel()
            giving_up.cancel()

    async def _answer(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= 500:
                await self._look_for_the_image()
            self._start = message
            return
        if self._given_up.is_set():
            return
        if self._start is not None:
            start, self._start, self._begun = self._start, None, True
            await self._send(start)
        await self._send(message)

    async def _look_for_the_image(self) -> None:
        """Check whether an image is lost or broken: vLLM's answer says only that the request failed."""
        if (error := self._kept.error or await self._failed()) is not None:
            self._give_up(error)

    def _give_up(self, error: EncoderError) -> None:
        self._error = error
        self._given_up.set()


async def failed_image(
    client: EncoderClient,
    answers: Sequence[Submitted],
    names: Sequence[str],
    *,
    request_id: str,
    timeout_s: float,
) -> EncoderError | None:
    """Ask the service for one row of each image; return the error of an image that is broken or lost.

    `answers` has one answer for each image of the prompt, and `names` what the message calls each. An answer without
    an endpoint is of an image that was not submitted for this request.
    """
    named = list(zip(names, answers, strict=True))
    kept = [(name, answer) for name, answer in named if answer.endpoint]
    requests = [
        RowRequest(each.digest, row_end=1, submitted_to=each.endpoint, frames=each.frames) for _, each in kept
    ]
    with suppress(EncoderError):  # then vLLM's own answer stands
        async with client.fetch(requests, request_id=request_id, timeout_s=timeout_s, kept=True) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome.error, InvalidImageError):
                    return InvalidImageError(f"{kept[outcome.index][0]}: {outcome.error.message}")
    others = [(name, answer) for name, answer in named if not answer.endpoint]
    requests = [RowRequest(each.digest, row_end=1) for _, each in others]
    with suppress(EncoderError):
        async with client.fetch(requests, request_id=request_id, timeout_s=timeout_s, grace_ms=0) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome.error, UnknownImageError):
                    return UnknownImageError(
                        f"{others[outcome.index][0]}, of an earlier response, is no longer kept: send the "
                        "conversation with its images, without previous_response_id"
                    )
    return None


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns `body` first, and then the caller's further messages, such as a disconnect."""
    told = False

    async def replayed() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
