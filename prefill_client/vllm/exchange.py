"""One request at vLLM while its images are kept: vLLM answers it, or we do if its images are lost or broken."""

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
    """Between vLLM and the caller. What vLLM says goes out, but for what it says of images that are lost or broken."""

    def __init__(
        self, body: bytes, kept: KeptImages, failed: FindFailed, receive: Receive, send: Send
    ) -> None:
        """`body` is what vLLM is told that the caller sent; `failed` is asked when vLLM could not answer."""
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
        """Let vLLM answer. Return why it could not, if that is an image's fault and the caller has heard nothing."""
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
        """Return what the caller says next; to end a request whose images are lost, that the caller has left."""
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
        """Find out whether an image is lost or broken: vLLM's answer says only that the request failed."""
        if (error := self._kept.error or await self._failed()) is not None:
            self._give_up(error)

    def _give_up(self, error: EncoderError) -> None:
        self._error = error
        self._given_up.set()


async def failed_image(
    client: EncoderClient, answers: Sequence[Submitted], *, request_id: str, timeout_s: float
) -> EncoderError | None:
    """Ask the service for a row of each image; return the error of one that cannot be decoded, or that it has lost.

    `answers` are those to the images of the prompt; one without an endpoint was not submitted for this request.
    """
    kept = {index: answer for index, answer in enumerate(answers) if answer.endpoint}
    requests = [RowRequest(each.digest, row_end=1, submitted_to=each.endpoint) for each in kept.values()]
    with suppress(EncoderError):  # then vLLM's answer is as good as ours
        async with client.fetch(requests, request_id=request_id, timeout_s=timeout_s, kept=True) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome.error, InvalidImageError):
                    return InvalidImageError(f"image {[*kept][outcome.index]}: {outcome.error.message}")
    others = {index: answer for index, answer in enumerate(answers) if not answer.endpoint}
    requests = [RowRequest(each.digest, row_end=1) for each in others.values()]
    with suppress(EncoderError):
        async with client.fetch(requests, request_id=request_id, timeout_s=timeout_s, grace_ms=0) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome.error, UnknownImageError):
                    return UnknownImageError(
                        f"image {[*others][outcome.index]}, of an earlier response, is no longer kept: send the "
                        "conversation with its images, without previous_response_id"
                    )
    return None


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that tells of `body`, then whatever comes, such as that the caller left."""
    told = False

    async def replayed() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
