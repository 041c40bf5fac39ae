"""One request at vLLM while its images are kept: it is answered by vLLM, or by us if its images are lost."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from encoder_contract.errors import EncoderError
from prefill_client.fleet.kept_images import KeptImages

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Exchange:
    """Between vLLM and the caller. What vLLM says goes out, but for what it says once the images are lost."""

    def __init__(self, body: bytes, kept: KeptImages, receive: Receive, send: Send) -> None:
        """`body` is what vLLM is told that the caller sent."""
        self._kept = kept
        self._tell = replay(body, self._receive_more)
        self._receive = receive
        self._send = send
        self._start: Message | None = None  # held back until the answer begins
        self._begun = False
        self._given_up = asyncio.Event()
        self._error: EncoderError | None = None

    async def run(self, app: App, scope: MutableMapping[str, Any]) -> EncoderError | None:
        """Let vLLM answer. Return why it could not, if images were lost before the caller had heard anything."""
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
            self._start = message
            if message["status"] >= 500 and (error := self._kept.error) is not None:
                self._give_up(error)
            return
        if self._given_up.is_set():
            return
        if self._start is not None:
            start, self._start, self._begun = self._start, None, True
            await self._send(start)
        await self._send(message)

    def _give_up(self, error: EncoderError) -> None:
        self._error = error
        self._given_up.set()


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
