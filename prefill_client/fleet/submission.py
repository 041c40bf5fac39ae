"""Submits images to a fleet with retries, keeps them submitted, and remembers them in case a server loses them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Self

from cachetools import LRUCache

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InternalError,
    OverloadedError,
    UnavailableError,
)
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.retries import Attempts
from prefill_client.images import Image, Submitted
from prefill_client.transport.submit_stream import SubmitStream

log = logging.getLogger(__name__)

# Bytes of files that are kept in case a server is lost. These are references to the caller's buffers, not copies.
MAX_BYTES = 256 << 20
ENTRY_BYTES = 1024  # memory of one entry besides its file
MAX_ROUTES = 65536  # some 10 MB
_NO_ROOM = (OverloadedError, DeadlineError)


class SentImages:
    """LRU cache of the images that a client sent recently, and of the servers that have them. Not thread-safe."""

    def __init__(self) -> None:
        self._images: LRUCache[bytes, Image] = LRUCache(MAX_BYTES, getsizeof=_size)
        self._routes: LRUCache[bytes, str] = LRUCache(MAX_ROUTES)

    def remember(self, image: Image, endpoint: str) -> None:
        """Remember that `endpoint` accepted an image."""
        self._routes[image.digest] = endpoint
        if _size(image) <= MAX_BYTES:
            self._images[image.digest] = image

    def image(self, digest: bytes) -> Image | None:
        """Return an image that was sent recently; None if it is unknown."""
        return self._images.get(digest)

    def route(self, digest: bytes) -> str | None:
        """Return the endpoint that an image was sent to; None if it is unknown."""
        return self._routes.get(digest)

    def forget_route(self, digest: bytes) -> None:
        """Forget the endpoint of an image, because the server there lost it."""
        self._routes.pop(digest, None)


class Submission:
    """Submits the images of one request, each to the server that the router prefers, and retries."""

    _kept = False
    """Whether the calls stay open, to keep the images submitted."""

    def __init__(self, pool: Pool, recent: SentImages, caller: pb.Caller) -> None:
        """`recent` records the images that servers accept."""
        self._pool = pool
        self._recent = recent
        self._caller = caller
        self._together: list[SubmitStream] | None = None
        """In `submit_together`, the calls that have accepted images and are still open."""

    async def submit_together(
        self, files: Sequence[Image | EncoderError], timeout_s: float
    ) -> list[Submitted]:
        """Submit images as `submit` does, or none of them, if the servers have no room for all until `timeout_s`.

        A server that has no room for all of its images takes none. Each answer is then an error.
        """
        self._together = []
        try:
            answers = await self.submit(files, timeout_s)
            refusal = next((each.error for each in answers if isinstance(each.error, _NO_ROOM)), None)
            if refusal is None:
                await asyncio.gather(*(stream.complete() for stream in self._together))
            else:
                await self._withdraw()
        except BaseException:
            await self._withdraw()
            raise
        finally:
            self._together = None
        return [
            answer if refusal is None or answer.error is not None else Submitted(answer.digest, error=refusal)
            for answer in answers
        ]

    async def submit(
        self, files: Sequence[Image | EncoderError], timeout_s: float, *, persistent: bool = False
    ) -> list[Submitted]:
        """Return one answer per file, in order. `files` has an error in place of a file that could not be read.

        Retries end after `timeout_s`, or earlier after too many failures, unless they are `persistent`.
        """
        images = {index: image for index, image in enumerate(files) if isinstance(image, Image)}
        answers = {
            index: Submitted(b"", error=error)
            for index, error in enumerate(files)
            if isinstance(error, EncoderError)
        }
        deadline = monotonic() + timeout_s
        attempts = {index: Attempts(deadline, kept=persistent, sends=True) for index in images}
        due_s = dict.fromkeys(images, 0.0)
        while images:
            now_s = monotonic()
            due = {index: image for index, image in images.items() if due_s[index] <= now_s}
            answered = await self._submit_once(due, attempts)
            for index, answer in answered.items():
                pause_s = None
                if answer.error is not None:
                    pause_s = attempts[index].pause_s(answer.error, can_resubmit=False)
                if pause_s is None:
                    error = answer.error and attempts[index].outcome(answer.error)
                    answers[index] = replace(answer, error=error)
                    del images[index]
                else:
                    due_s[index] = monotonic() + pause_s
            if self._together is not None and images:  # what is refused together is tried again together
                due_s = dict.fromkeys(images, max(due_s[index] for index in images))
            await asyncio.sleep(min((due_s[index] for index in images), default=0.0) - monotonic())
        return [answers[index] for index in range(len(files))]

    async def _submit_once(
        self, images: dict[int, Image], attempts: dict[int, Attempts]
    ) -> dict[int, Submitted]:
        """Make one attempt at every image. Images that go to the same server share a call."""
        indexes, max_images = list(images), self._pool.description.max_images_per_call
        digests = [image.digest for image in images.values()]
        # Images that are at a server already stay there: the history of a chat is not dealt again as it grows.
        with self._pool.router.placed(digests, self._recent.route) as groups:
            batches = [
                (endpoint, [indexes[place] for place in places[begin : begin + max_images]])
                for endpoint, places in groups.items()
                for begin in range(0, len(places), max_images)
            ]
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(
                        self._submit_to(
                            endpoint, [images[index] for index in batch], attempts[batch[0]].left_s()
                        )
                    )
                    for endpoint, batch in batches
                ]
        return {
            index: answer
            for (_, batch), call in zip(batches, calls, strict=True)
            for index, answer in zip(batch, call.result(), strict=True)
        }

    async def _submit_to(self, endpoint: str, images: Sequence[Image], timeout_s: float) -> list[Submitted]:
        """Return the answers of one server. What it has taken when the time is up stays submitted."""
        is_together = self._together is not None  # then no bytes travel before there is room
        new = [
            index
            for index, image in enumerate(images)
            if not is_together and self._recent.route(image.digest) is None
        ]
        stream: SubmitStream | None = None
        try:
            async with self._pool.attempt(endpoint, timeout_s) as connection:
                stream = connection.submit(images, self._caller, new)
                answers = await stream.answers(kept=self._kept, all_or_nothing=is_together)
                self._pool.router.set_rate(endpoint, stream.patches_per_s)
        except EncoderError as error:
            is_late = isinstance(error, DeadlineError) and stream is not None and stream.is_open()
            answered = stream.answered if stream is not None and is_late and not self._kept else {}
            if stream is not None and not answered:
                stream.close()
            answers = [
                answered.get(index, Submitted(image.digest, error=error))
                for index, image in enumerate(images)
            ]
        except BaseException:  # cancelled: the caller no longer wants the images
            if stream is not None:
                stream.close()
            raise
        accepted = {index: image for index, image in enumerate(images) if answers[index].error is None}
        for image in accepted.values():
            self._recent.remember(image, endpoint)
        if stream is not None and stream.is_open():
            self._leave(stream, endpoint, accepted)
        return answers

    def _leave(self, stream: SubmitStream, _endpoint: str, _accepted: dict[int, Image]) -> None:
        """End a call that has accepted some of its images, and is still open."""
        if self._together is None:
            stream.leave()
        else:
            self._together.append(stream)

    async def _withdraw(self) -> None:
        """Withdraw the images that were accepted."""
        for stream in self._together or ():
            stream.close()


class KeptImages(Submission):
    """Images that stay submitted until `close`: holds their files, and an open Submit call to each of their servers.

    It uploads a file again when a server needs it, and submits the images of a lost server to another one.
    """

    _kept = True

    def __init__(self, pool: Pool, recent: SentImages, caller: pb.Caller, again_s: float) -> None:
        """`again_s` is how long to look for another server for the images of a lost one."""
        super().__init__(pool, recent, caller)
        self.answers: list[Submitted] = []
        """The servers' first answer to each image, in order."""
        self._again_s = again_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._resubmitting: dict[SubmitStream, EncoderError] = {}  # by the call that ended, why it ended
        self._lost: asyncio.Future[EncoderError] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def error(self) -> EncoderError | None:
        """Why some of the images are not at any server now; None if all are."""
        if self._lost.done():
            return self._lost.result()
        return next(iter(self._resubmitting.values()), None)

    async def lost(self) -> EncoderError:
        """Wait until some images are lost, because no server accepted them within `again_s`, and return the reason."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Release the images: servers drop those that no other caller wants."""
        while tasks := list(self._tasks):  # a task that ends may have started another one
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    async def _withdraw(self) -> None:
        await self.close()

    def _leave(self, stream: SubmitStream, endpoint: str, accepted: dict[int, Image]) -> None:
        """Keep the call open for the images that it has accepted."""
        if not accepted:
            stream.close()
            return
        task = asyncio.create_task(self._keep(stream, endpoint, accepted))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _keep(self, stream: SubmitStream, endpoint: str, images: dict[int, Image]) -> None:
        """Serve the call until it ends, then submit its images to other servers."""
        try:
            error = await stream.resend()
        finally:
            stream.close()
        log.info("%d images are submitted again: %s", len(images), error.message)
        if isinstance(error, UnavailableError):
            self._pool.router.failed(endpoint)
        self._resubmitting[stream] = error
        for answer in await self.submit(list(images.values()), self._again_s, persistent=True):
            if answer.error is not None:
                self._set_lost(answer.error)
        del self._resubmitting[stream]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("keeping images submitted failed unexpectedly", exc_info=error)
            self._set_lost(error if isinstance(error, EncoderError) else InternalError(f"{error!r}"))

    def _set_lost(self, error: EncoderError) -> None:
        if not self._lost.done():
            self._lost.set_result(error)


def _size(image: Image) -> int:
    return ENTRY_BYTES + len(image.data)
