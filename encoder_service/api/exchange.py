"""The conversation of Submit and of Put: names are answered in turn, and what is wanted of them arrives in pieces.

The caller names images, and each name is answered at once: held, wanted, under way elsewhere, or failed. Pieces follow
for images that are wanted; each of these has one more answer, when it is complete or has failed. An image fails alone;
only a caller that breaks the contract, or may no longer call, fails its call.

`Exchange` is this conversation. `SubmitCall` and `PutCall` say what a name means, where pieces go, and how much space
and time the caller has for them.
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
    """The state of one call. Iterate over `answers` once; `close` it in any case."""

    right: ClassVar[Right]
    """What the caller must still be allowed to do at each list of names."""

    def __init__(self, requests: Requests[Request], caller: Caller, info: ServerInfo, turns: Turns) -> None:
        """`requests` are those after the first; `turns` keeps a call of hundreds of names from delaying others."""
        self._requests = requests
        self._caller = caller
        self._info = info
        self._turns = turns
        self._wanted: dict[int, Wanted] = {}  # by the caller's index
        # Indexes of which pieces are ignored unless they are wanted: they were on their way when the image failed.
        self._over: set[int] = set()
        self._has_refused = False  # an image, and its answer was not given yet

    async def answers(self) -> AsyncIterator[Answer]:
        """Yield an answer for every name, and one more for every image that was wanted."""
        while True:
            for answer in self._due():
                yield answer
            try:
                request = await self._next()
            except TimeoutError:
                continue
            except StopAsyncIteration:
                break
            async for answer in self._answers_to(request):
                yield answer

    def close(self) -> None:
        """Drop images that are not complete."""
        for index in tuple(self._wanted):
            self._drop(index)

    async def _names(self, names: Sequence[Name]) -> AsyncIterator[Answer]:
        """Yield the answers to a list of names, of a few at a time."""
        self._info.identity.check_again(self.right, self._caller)
        indexes: set[int] = set()
        for some, pieces in name_turns(names):
            await self._turns.take(self._caller.holder, pieces)
            for answer in await self._some_names(some, indexes):
                yield answer

    async def _some_names(self, names: Sequence[Name], indexes: set[int]) -> list[Answer]:
        answers: list[Answer] = []
        images: list[Image] = []
        for name in names:
            if name.index in indexes:
                raise InvalidRequestError(f"index {name.index} is used twice in one message")
            self._take_index(name.index)
            indexes.add(name.index)
            try:
                images.append(self._image(name))
            except InvalidRequestError as error:
                answers.append(self._failure(name.index, error))
        answers += await self._look_up(images)
        await self._pause()
        return answers

    async def _piece(self, index: int, take: Callable[[Wanted], Awaitable[Answer | None]]) -> list[Answer]:
        """`take` a piece of an image; return the image's last answer, if that was the last piece or it failed."""
        if (wanted := self._wanted.get(index)) is None:
            if index in self._over:
                return []
            raise InvalidRequestError(f"image {index}: the server did not ask for it in this call")
        try:
            answer = await take(wanted)
        except Exception as error:  # noqa: BLE001 - one image's failure is that image's answer
            answer = self._fail(index, error)
        else:
            if answer is None:
                return []
            del self._wanted[index]
            self._over.add(index)
        await self._pause()
        return [answer]

    async def _pause(self) -> None:
        """Let time pass before a refusal is answered; see `REFUSAL_S`."""
        if self._has_refused:
            self._has_refused = False
            await asyncio.sleep(REFUSAL_S)

    def _fail(self, index: int, error: Exception) -> Answer:
        """Drop an image that was wanted; return its last answer."""
        self._drop(index)
        return self._failure(index, known_error(error))

    def _drop(self, index: int) -> None:
        self._over.add(index)
        self._dropped(self._wanted.pop(index))

    def _failure(self, index: int, error: EncoderError) -> Answer:
        """Note that an image failed; return the answer."""
        self._has_refused = True
        return self._failed(index, error)

    # What Submit and Put each say

    @abstractmethod
    def _due(self) -> list[Answer]:
        """Return answers that no message asked for: to images out of time, or wanted again.

        Raises the error with which the server ends the call.
        """

    @abstractmethod
    async def _next(self) -> Request:
        """Return the next message; raises `TimeoutError` once something may be `_due` before it."""

    @abstractmethod
    def _answers_to(self, request: Request) -> AsyncIterator[Answer]:
        """Yield the answers to a message, by `_names` and `_piece`."""

    @abstractmethod
    def _take_index(self, index: int) -> None:
        """Note that a name has this index. Raises `InvalidRequestError`."""

    @abstractmethod
    def _image(self, name: Name) -> Image:
        """Return what a name means. Raises `InvalidRequestError`, which is the name's answer."""

    @abstractmethod
    async def _look_up(self, images: Sequence[Image]) -> list[Answer]:
        """Return the answers to images, and note which are wanted."""

    @abstractmethod
    def _dropped(self, wanted: Wanted) -> None:
        """Release what an image held that will not be complete."""

    @abstractmethod
    def _failed(self, index: int, error: EncoderError) -> Answer:
        """Count an image that failed; return the answer."""
