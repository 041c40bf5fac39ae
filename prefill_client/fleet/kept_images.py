"""Images that the client has sent: those it remembers, and those it keeps submitted for one request."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from cachetools import LRUCache

from encoder_contract.errors import EncoderError, InternalError, UnavailableError
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.images import Image, Submitted
from prefill_client.transport.connection import Connection
from prefill_client.transport.submit_stream import SubmitStream

log = logging.getLogger(__name__)

# Bytes that may have to be sent once more when a server is lost. They are references to what the caller sent.
MAX_BYTES = 256 << 20
# What one takes besides its file.
ENTRY_BYTES = 1024
MAX_ROUTES = 65536  # some 10 MB


class SentImages:
    """Bounded, least recently used out first. Not for several threads."""

    def __init__(self) -> None:
        self._images: LRUCache[bytes, Image] = LRUCache(MAX_BYTES, getsizeof=_size)
        self._routes: LRUCache[bytes, str] = LRUCache(MAX_ROUTES)

    def sent(self, image: Image, endpoint: str) -> None:
        """Remember an image that `endpoint` has taken over."""
        self._routes[image.digest] = endpoint
        if _size(image) <= MAX_BYTES:
            self._images[image.digest] = image

    def image(self, digest: bytes) -> Image | None:
        """Return an image sent not long ago, as it was sent."""
        return self._images.get(digest)

    def route(self, digest: bytes) -> str | None:
        """Return where an image was sent to."""
        return self._routes.get(digest)

    def lost(self, digest: bytes) -> None:
        """Forget where an image was sent to: it is not there."""
        self._routes.pop(digest, None)


def _size(image: Image) -> int:
    return ENTRY_BYTES + len(image.data)


class KeptImages:
    """Holds their files and an open Submit call at each server that has some of them, until `close`.

    A server that needs a file again is sent it. When a server goes, its images are submitted to another.
    """

    def __init__(
        self, submit: Callable[[Sequence[Image]], Awaitable[list[Submitted]]], failed: Callable[[str], None]
    ) -> None:
        """`submit` submits images once more, and `failed` is told of a server that is gone."""
        self.answers: list[Submitted] = []
        """The servers' answer to each image, in order, when they were first submitted."""
        self._submit = submit
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._nowhere: dict[SubmitStream, EncoderError] = {}
        self._lost: asyncio.Future[EncoderError] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def error(self) -> EncoderError | None:
        """Why some of the images are at no server at this moment; None while all are at one."""
        if self._lost.done():
            return self._lost.result()
        return next(iter(self._nowhere.values()), None)

    async def lost(self) -> EncoderError:
        """Return why, once no server has taken some of the images for as long as was asked for."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Let go of the images: servers drop those that nobody else wants."""
        while tasks := list(self._tasks):  # one that ends may have begun another
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    async def submit_to(
        self, connection: Connection, images: Sequence[Image], caller: pb.Caller
    ) -> list[Submitted]:
        """Make one attempt at images of one server, and keep those that it takes. Raises the error of the call."""
        stream = connection.submit_stream(images, caller)
        taken: list[Image] = []
        try:
            answers = await stream.answers(kept=True)
            pairs = zip(images, answers, strict=True)
            taken = [image for image, answer in pairs if answer.error is None]
        finally:
            if not taken:
                stream.close()
        if taken:
            task = asyncio.create_task(self._keep(stream, connection.endpoint, taken))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        return answers

    async def _keep(self, stream: SubmitStream, endpoint: str, images: Sequence[Image]) -> None:
        try:
            error = await stream.send_again()
        finally:
            stream.close()
        log.info("%d images are submitted again: %s", len(images), error.message)
        if isinstance(error, UnavailableError):
            self._failed(endpoint)
        self._nowhere[stream] = error
        for answer in await self._submit(images):
            if answer.error is not None:
                self._lose(answer.error)
        del self._nowhere[stream]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kept images were lost in a way that they never should", exc_info=error)
            self._lose(error if isinstance(error, EncoderError) else InternalError(f"{error!r}"))

    def _lose(self, error: EncoderError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)
