"""The message exchange that Submit and Put share: the caller names images, then sends pieces of those that are wanted.

The server answers each name at once: held, wanted, in progress elsewhere, or failed. The caller then sends the pieces
of the wanted images, and the server answers each of these once more, when it is complete or has failed. A failed image
fails alone. The call fails only if the caller violates the contract or loses its rights.

`Exchange` implements this sequence. `SubmitCall` and `PutCall` define what a name means, where the pieces go, and how
much space and time the caller has for them.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from encoder_contract.errors import EncoderError, InvalidRequestError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.describe import ServerInfo
from encoder_service.api.inbound import Requests
from encoder_service.api.tenants import Right
from encoder_service.limits import REFUSAL_S, Caller, Turns, name_turns
from encoder_service.logs import known_error

Request = TypeVar("Request")
Name = TypeVar("Name", pb.ImageName, pb.PutName)
Image = TypeVar("Image")
Wanted = TypeVar("Wanted")
Answer = TypeVar("Answer")


class Exchange(ABC, Generic[Request, Name, Image, Wanted, Answer]):
    """The state of one call. Iterate over `answers` once; always `close` it."""

    right: ClassVar[Right]
    """The right that is checked again at each list of names, as the call may stay open for long."""

    def __init__(self, requests: Requests[Request], caller: Caller, info: ServerInfo, turns: Turns) -> None:
        """`requests` are those after the first; `turns` keeps a call with hundreds of names from delaying others."""
        self._requests = requests
        self._caller = caller
        self._info = info
        self._turns = turns
        self._wanted: dict[int, Wanted] = {}  # by the caller's index
        # Indexes of ended images; in Submit, of all images named so far. Their pieces are ignored unless the image is
        # wanted: they were in transit when it failed.
        self._finished: set[int] = set()
        self._refused_any = False  # since the last `_pause`

    async def answers(self) -> AsyncIterator[Answer]:
        """Yield an answer for every name, and one more for every image that was wanted."""
        while True:
            for answer in self._unprompted_answers():
                yield answer
            try:
                request = await self._next_request()
            except TimeoutError:
                continue
            except StopAsyncIteration:
                break
            async for answer in self._handle(request):
                yield answer

    def close(self) -> None:
        """Drop images that are not complete."""
        for index in tuple(self._wanted):
            self._drop(index)

    async def _handle_names(self, names: Sequence[Name]) -> AsyncIterator[Answer]:
        """Yield the answers to a list of names, a few names at a time."""
        self._info.identity.check_again(self.right, self._caller)
        indexes: set[int] = set()
        for some, pieces in name_turns(names):
            await self._turns.take(self._caller.holder, pieces)
            for answer in await self._answer_names(some, indexes):
                yield answer

    async def _answer_names(self, names: Sequence[Name], indexes: set[int]) -> list[Answer]:
        """Return the answers to `names`; `indexes` are those used so far in the same message."""
        answers: list[Answer] = []
        images: list[Image] = []
        for name in names:
            if name.index in indexes:
                raise InvalidRequestError(
                    f"index {name.index} is used twice in one message: give each image its own index"
                )
            self._reserve_index(name.index)
            indexes.add(name.index)
            try:
                images.append(self._parse_name(name))
            except InvalidRequestError as error:
                answers.append(self._refuse(name.index, error))
        answers += await self._look_up(images)
        await self._pause()
        return answers

    async def _handle_piece(
        self, index: int, handle: Callable[[Wanted], Awaitable[Answer | None]]
    ) -> list[Answer]:
        """Pass a piece of an image to `handle`; return the image's last answer if it is complete or failed."""
        if (wanted := self._wanted.get(index)) is None:
            if index in self._finished:
                return []
            raise InvalidRequestError(
                f"image {index}: the server did not ask for its bytes or rows in this call: send only what it asks for"
            )
        try:
            answer = await handle(wanted)
        except Exception as error:  # noqa: BLE001 - only this image fails
            answer = self._fail(index, error)
        else:
            if answer is None:
                return []
            del self._wanted[index]
            self._finished.add(index)
        await self._pause()
        return [answer]

    async def _pause(self) -> None:
        """Delay the answers that contain a refusal; see `REFUSAL_S`."""
        if self._refused_any:
            self._refused_any = False
            await asyncio.sleep(REFUSAL_S)

    def _fail(self, index: int, error: Exception) -> Answer:
        """Drop a wanted image; return its last answer."""
        self._drop(index)
        return self._refuse(index, known_error(error))

    def _drop(self, index: int) -> None:
        self._finished.add(index)
        self._release(self._wanted.pop(index))

    def _refuse(self, index: int, error: EncoderError) -> Answer:
        self._refused_any = True
        return self._failure_answer(index, error)

    # What Submit and Put each define

    @abstractmethod
    def _unprompted_answers(self) -> list[Answer]:
        """Return the answers that no message asked for: an image timed out, or its bytes are wanted again.

        Raises the error with which the server ends the call.
        """

    @abstractmethod
    async def _next_request(self) -> Request:
        """Return the next message; raises `TimeoutError` when it is time to call `_unprompted_answers` first."""

    @abstractmethod
    def _handle(self, request: Request) -> AsyncIterator[Answer]:
        """Yield the answers to a message, by `_handle_names` and `_handle_piece`."""

    @abstractmethod
    def _reserve_index(self, index: int) -> None:
        """Assign this index to a new name. Raises `InvalidRequestError` if the index is not allowed."""

    @abstractmethod
    def _parse_name(self, name: Name) -> Image:
        """Return the image that is named. Raises `InvalidRequestError`, which becomes the answer to the name."""

    @abstractmethod
    async def _look_up(self, images: Sequence[Image]) -> list[Answer]:
        """Return the answers to images, and add those that are wanted to `_wanted`."""

    @abstractmethod
    def _release(self, wanted: Wanted) -> None:
        """Release what an incomplete image holds."""

    @abstractmethod
    def _failure_answer(self, index: int, error: EncoderError) -> Answer:
        """Count a failed image; return the answer."""
