"""Submits images to a fleet with retries, keeps them submitted, and remembers them in case a server loses them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Self

from cachetools import LRUCache

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InternalError,
    LostImageError,
    OverloadedError,
    UnavailableError,
    UnknownImageError,
)
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.retries import Attempts
from prefill_client.images import Image, Submitted
from prefill_client.transport.submit_stream import LEAVE_S, SubmitStream

log = logging.getLogger(__name__)

# Bytes of files that are kept in case a server is lost. These are references to the caller's buffers, not copies.
MAX_BYTES = 256 << 20
ENTRY_BYTES = 1024  # memory of one entry besides its file
MAX_ROUTES = 65536  # some 10 MB
_NO_ROOM = (OverloadedError, DeadlineError)
LOST = "no server has the image any more: submit its file again"


class SentImages:
    """LRU cache of the images that a client sent recently, and of the servers that have them. Not thread-safe."""

    def __init__(self) -> None:
        self._images: LRUCache[bytes, Image] = LRUCache(MAX_BYTES, getsizeof=_size)
        self._routes: LRUCache[bytes, str] = LRUCache(MAX_ROUTES)

    def remember(self, image: Image, endpoint: str, *, with_file: bool) -> None:
        """Remember that `endpoint` accepted an image; `with_file`, also the image."""
        self._routes[image.digest] = endpoint
        if with_file and image.data and _size(image) <= MAX_BYTES:
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


@dataclass(slots=True)
class _Unanswered:
    """An image without a final answer. The next attempt at it is due at `due_s`, in seconds of `time.monotonic`."""

    image: Image
    attempts: Attempts
    due_s: float = 0.0
    unknown_at: set[str] = field(default_factory=set)
    """The servers that do not have the image, if it was named without its file."""

    def final(self, answer: Submitted) -> Submitted | None:
        """Return the final answer, after a server's; None if the image will be tried again."""
        if answer.error is None:
            return answer
        pause_s = self.attempts.pause_s(answer.error, can_resubmit=False)
        if pause_s is None:
            return replace(answer, error=self.attempts.outcome(answer.error))
        self.due_s = monotonic() + pause_s
        return None


class Submission:
    """Submits the images of one request, each to the server that the router prefers, and retries."""

    _kept = False
    """Whether the calls stay open, to keep the images submitted."""
    _known_only = False
    """Whether the client has no files of the images."""

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
        deadline = monotonic() + timeout_s
        answers: dict[int, Submitted] = {}
        waiting: dict[int, _Unanswered] = {}
        for index, file in enumerate(files):
            if isinstance(file, EncoderError):
                answers[index] = Submitted(b"", error=file)
            else:
                waiting[index] = _Unanswered(file, Attempts(deadline, kept=persistent, sends=True))
        now_s = 0.0
        while waiting:
            due = {index: each for index, each in waiting.items() if each.due_s <= now_s}
            for index, answer in (await self._submit_once(due)).items():
                if (final := self._final(due[index], answer)) is not None:
                    answers[index] = final
                    del waiting[index]
            # What is refused together is tried again together.
            choose = min if self._together is None else max
            next_s = choose((each.due_s for each in waiting.values()), default=0.0)
            await asyncio.sleep(next_s - monotonic())
            now_s = max(next_s, monotonic())
        return [answers[index] for index in range(len(files))]

    async def _submit_once(self, due: dict[int, _Unanswered]) -> dict[int, Submitted]:
        """Make one attempt at every image. Images that go to the same server share a call."""
        indexes, max_images = list(due), self._pool.description.max_images_per_call
        by_digest = {each.image.digest: each for each in due.values()}
        digests = [each.image.digest for each in due.values()]
        # Images that are at a server already stay there: the history of a chat is not dealt again as it grows.
        with self._pool.router.placed(
            digests, lambda digest: self._route(by_digest[digest]), bounded=not self._known_only
        ) as groups:
            batches = [
                (endpoint, [indexes[place] for place in places[begin : begin + max_images]])
                for endpoint, places in groups.items()
                for begin in range(0, len(places), max_images)
            ]
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(
                        self._submit_to(
                            endpoint, [due[index].image for index in batch], due[batch[0]].attempts.left_s()
                        )
                    )
                    for endpoint, batch in batches
                ]
        return {
            index: answer
            for (_, batch), call in zip(batches, calls, strict=True)
            for index, answer in zip(batch, call.result(), strict=True)
        }

    def _route(self, each: _Unanswered) -> str | None:
        """Return the server that has an image, as far as the client knows."""
        return self._recent.route(each.image.digest)

    def _final(self, each: _Unanswered, answer: Submitted) -> Submitted | None:
        """Return the final answer, after a server's; None if the image will be tried again."""
        return each.final(answer)

    async def _submit_to(self, endpoint: str, images: Sequence[Image], timeout_s: float) -> list[Submitted]:
        """Return the answers of one server."""
        is_together = self._together is not None
        stream: SubmitStream | None = None
        try:
            async with self._pool.attempt(endpoint, timeout_s) as connection:
                stream = connection.submit(images, self._caller, self._new(images))
                answers = await stream.answers(
                    kept=self._kept, all_or_nothing=is_together, known_only=self._known_only
                )
                self._pool.router.set_rate(endpoint, stream.patches_per_s)
        except EncoderError as error:
            answers = self._answers_until(error, stream, endpoint, images)
        except BaseException:  # cancelled: the caller no longer wants the images
            if stream is not None:
                stream.close()
            raise
        if stream is not None:
            self._accept(stream, endpoint, images, answers)
        return answers

    def _new(self, images: Sequence[Image]) -> list[int]:
        """Return the indexes of the images whose files come with their names. None do before there is room for all."""
        if self._together is not None or self._known_only:
            return []
        return [index for index, image in enumerate(images) if self._recent.route(image.digest) is None]

    def _answers_until(
        self, error: EncoderError, stream: SubmitStream | None, endpoint: str, images: Sequence[Image]
    ) -> list[Submitted]:
        """Return the answers of a call that failed. What the server has taken when the time is up stays submitted."""
        answered: dict[int, Submitted] = {}
        if stream is not None:
            if isinstance(error, DeadlineError) and stream.is_open() and not self._kept:
                answered = stream.answered
            if not answered:
                stream.close()
        return [
            answered.get(index, Submitted(image.digest, error=error, endpoint=endpoint))
            for index, image in enumerate(images)
        ]

    def _accept(
        self, stream: SubmitStream, endpoint: str, images: Sequence[Image], answers: Sequence[Submitted]
    ) -> None:
        accepted = {index: image for index, image in enumerate(images) if answers[index].error is None}
        for image in accepted.values():
            # An open call sends the file again, and a Fetch of kept images does not.
            self._recent.remember(image, endpoint, with_file=not self._kept)
        if stream.is_open():
            self._leave(stream, endpoint, accepted)

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
        self._calls: dict[SubmitStream, asyncio.Task[None]] = {}
        """The open calls, and the task that serves each."""
        self._leaves = False
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
        """Wait until some images are lost, because no server accepted them within `again_s`, and return the reason.

        It waits for ever if none is lost, also after `close`: cancel it. Any number of callers may wait. All get the
        first reason, and so do later callers; other images may still be submitted.
        """
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Release the images: servers drop those that no other caller wants."""
        while tasks := list(self._tasks):  # a task that ends may have started another one
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    async def leave(self) -> None:
        """End keeping: the images stay submitted, as after `EncoderClient.submit`. This client forgets their files."""
        self._leaves = True
        calls = dict(self._calls)
        await asyncio.gather(*(stream.leave_kept() for stream in calls))
        if calls:
            await asyncio.wait(calls.values(), timeout=LEAVE_S)
        await self.close()

    async def _withdraw(self) -> None:
        await self.close()

    def _leave(self, stream: SubmitStream, endpoint: str, accepted: dict[int, Image]) -> None:
        """Keep the call open for the images that it has accepted."""
        if not accepted:
            stream.close()
            return
        task = self._calls[stream] = asyncio.create_task(self._keep(stream, endpoint, accepted))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _keep(self, stream: SubmitStream, endpoint: str, images: dict[int, Image]) -> None:
        """Serve the call until it ends, then submit its images to other servers."""
        try:
            error = await stream.resend()
        finally:
            del self._calls[stream]
            stream.close()
        if self._leaves:
            return
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


class KnownImages(KeptImages):
    """Images that another process has submitted, kept by their names: this client has no files of them.

    It asks the servers one after the other, beginning with the one to which an image was submitted. An image that none
    of them has ends in `LostImageError`.
    """

    _known_only = True

    def _route(self, each: _Unanswered) -> str | None:
        """Return the server to ask next; None if all that are up have been asked."""
        image, router = each.image, self._pool.router
        order = (image.submitted_to, self._recent.route(image.digest), *router.order(image.digest))
        return next((server for server in order if server and self._may_have(each, server)), None)

    def _may_have(self, each: _Unanswered, server: str) -> bool:
        return server not in each.unknown_at and self._pool.router.is_up(server)

    def _final(self, each: _Unanswered, answer: Submitted) -> Submitted | None:
        if not isinstance(answer.error, UnknownImageError):
            return each.final(answer)
        each.unknown_at.add(answer.endpoint)
        if self._route(each) is not None:
            each.due_s = 0.0
            return None
        return replace(answer, error=LostImageError(LOST))


def _size(image: Image) -> int:
    return ENTRY_BYTES + len(image.data)
