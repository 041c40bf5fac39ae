"""Calls an encoder as SGLang 0.5.20 to 0.5.23 does, over real sockets, and reads the answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx2
import zmq
import zmq.asyncio

from tests.sglang_messages import Message, body_of
from tests.waiting import START_S


@dataclass
class Answer:
    """The answer to a request: the messages of each rank in the order of parts, and the refusals."""

    messages: list[list[Message]] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)

    @property
    def parts(self) -> list[Message]:
        """The messages of the first rank."""
        return self.messages[0]


class LanguageServer:
    """The receiving side of an SGLang with `ranks` tensor-parallel ranks."""

    def __init__(self, url: str, ranks: int = 1) -> None:
        self._url = url
        self._ranks = ranks
        self._context = zmq.asyncio.Context()
        self._http = httpx2.AsyncClient(timeout=START_S)

    async def __aenter__(self) -> "LanguageServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        self._context.destroy(linger=0)

    async def to_tokenizer(self, *parts: Sequence[Any], **other: Any) -> Answer:
        """Make a request of the back end zmq_to_tokenizer: one socket for the request, bound before it is sent."""
        rid, (socket, port) = uuid4().hex, self._bound()
        bodies = [
            body_of(items, rid=rid, part=part, parts=len(parts), port=port, **other)
            for part, items in enumerate(parts)
        ]
        return await self._answer(bodies, [socket])

    async def to_scheduler(self, *parts: Sequence[Any], **other: Any) -> Answer:
        """Make a request of the back end zmq_to_scheduler: every rank names its socket for every part."""
        rid, bound = uuid4().hex, [self._bound() for _ in range(self._ranks)]
        bodies = [
            body_of(items, rid=rid, part=part, parts=len(parts), **other) for part, items in enumerate(parts)
        ]
        naming = [
            self._http.post(
                f"{self._url}/v{part}/scheduler_receive_url",
                json={
                    "req_id": body["req_id"],
                    "receive_count": self._ranks,
                    "receive_url": f"127.0.0.1:{port}",
                    "modality": "IMAGE",
                },
            )
            for part, body in enumerate(bodies)
            for _, port in bound
        ]
        named = asyncio.gather(*naming)
        answer = await self._answer(bodies, [socket for socket, _ in bound])
        assert [each.status_code for each in await named] == [200] * len(naming)
        return answer

    def _bound(self) -> tuple[zmq.asyncio.Socket, int]:
        socket = self._context.socket(zmq.PULL)
        return socket, socket.bind_to_random_port("tcp://127.0.0.1")

    async def _answer(self, bodies: list[dict[str, Any]], sockets: list[zmq.asyncio.Socket]) -> Answer:
        """Send all parts at once. As SGLang does, return when all have arrived or one has failed."""
        posting = [
            asyncio.create_task(self._http.post(f"{self._url}/v{part}/encode", json=body))
            for part, body in enumerate(bodies)
        ]
        receiving = asyncio.ensure_future(self._all_receive(sockets, len(bodies)))
        try:
            while not receiving.done():
                running: list[asyncio.Future[Any]] = [each for each in posting if not each.done()]
                await asyncio.wait([receiving, *running], return_when=asyncio.FIRST_COMPLETED)
                failed = [
                    each.result() for each in posting if each.done() and each.result().status_code != 200
                ]
                if failed:
                    return Answer(refusals=[(each.status_code, each.json()["message"]) for each in failed])
            assert [(await each).status_code for each in posting] == [200] * len(bodies)
            return Answer(messages=await receiving)
        finally:
            for each in (*posting, receiving):
                each.cancel()
            await asyncio.gather(*posting, receiving, return_exceptions=True)
            for socket in sockets:
                socket.close(linger=0)

    async def _all_receive(self, sockets: list[zmq.asyncio.Socket], parts: int) -> list[list[Message]]:
        return await asyncio.gather(*(self._receive(socket, parts) for socket in sockets))

    async def _receive(self, socket: zmq.asyncio.Socket, parts: int) -> list[Message]:
        found: dict[int, Message] = {}
        while len(found) < parts:
            message = Message.of(await socket.recv_multipart())
            assert message.data.part_idx not in found, "a part came twice: SGLang fails the request"
            assert message.data.num_parts == parts
            assert message.data.error_msg is None
            found[message.data.part_idx] = message
        return [found[part] for part in range(parts)]
