"""A fetch from any number of servers: every request gets one outcome, after the retries that can help."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Self

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    StaleHandleError,
    UnavailableError,
    UnknownImageError,
)
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.retries import Attempts
from prefill_client.fleet.submission import SentImages, Submission
from prefill_client.images import FetchedRows, Image, RowRequest
from prefill_client.transport import INLINE
from prefill_client.transport.row_stream import RowStream


class FetchStream:
    """A running fetch. Iterate it for one `FetchedRows` per request, in the order in which they become ready.

    Shared rows are held until `close` or the end of `async with`; `timeout_s` bounds only the wait for the outcomes.
    Rows that are lost before, because their server went away, are fetched again by `prefill_client.read`.
    """

    def __init__(
        self,
        pool: Pool,
        recent: SentImages,
        requests: Sequence[RowRequest],
        caller: pb.Caller,
        *,
        grace_ms: int,
        transports: Sequence[str],
        timeout_s: float,
        producer: Producer | None = None,
        kept: bool = False,
    ) -> None:
        self._pool = pool
        self._recent = recent
        self._requests = requests
        self._caller = caller
        self._grace_ms = grace_ms
        self._transports = transports
        self._timeout_s = timeout_s
        self._producer = producer
        self._kept = kept
        self._submitted_to = {each.routed_by: each.submitted_to for each in requests if each.submitted_to}
        # Servers that did not know the image.
        self._unknown_at: defaultdict[bytes, set[str]] = defaultdict(set)  # by image, in this round
        deadline = monotonic() + timeout_s
        self._attempts = [Attempts(deadline, kept=kept) for _ in requests]
        # None: closed. An exception: the client was closed, or a bug; the caller must not wait forever.
        self._outcomes: asyncio.Queue[FetchedRows | BaseException | None] = asyncio.Queue()
        self._streams: list[RowStream] = []
        self._tasks: set[asyncio.Future[None]] = set()

    def close(self) -> None:
        """End all calls and release all rows that they hold."""
        self._outcomes.put_nowait(None)
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[FetchedRows]:
        self._fetch_all(range(len(self._requests)))
        for _ in self._requests:
            outcome = await self._outcomes.get()
            if outcome is None:
                return
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome

    def _fetch_all(self, indexes: Sequence[int]) -> None:
        if not indexes:
            return
        names = [self._requests[index].routed_by for index in indexes]
        groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        # Only the server that has such an image can answer: load does not move it.
        bounded = self._producer is None and not self._kept
        placed = self._pool.router.place(names, self._route, bounded=bounded)
        for index, endpoint in zip(indexes, placed, strict=True):
            # No grace for images that this client sent: a server that does not know one has lost it.
            grace_ms = self._grace_ms if self._sent(index) is None else 0
            groups[endpoint, grace_ms].append(index)
        for (endpoint, grace_ms), group in groups.items():
            left = dict(enumerate(group))
            task = self._start(self._fetch_from(endpoint, left, grace_ms))
            task.add_done_callback(partial(self._leave, endpoint, left))

    def _sent(self, index: int) -> Image | None:
        """Return the image to submit again if its rows are lost; None if rows were put, or another client keeps it."""
        request = self._requests[index]
        if self._producer or self._kept or (image := self._recent.image(request.digest)) is None:
            return None
        if request.frames is None:
            return image
        # What was sent last of a video are other frames of it, or the video itself.
        return replace(image, frames=request.frames, grid=request.frames.grid, is_video=False)

    def _route(self, name: bytes) -> str | None:
        if self._producer:
            return None
        if self._kept:
            return self._turn(name)
        return self._recent.route(name) or self._submitted_to.get(name)

    def _turn(self, name: bytes) -> str | None:
        """Return where to ask next for a kept image: the server it was submitted to, then each of the others."""
        router, unknown_at = self._pool.router, self._unknown_at[name]
        order = [
            each for each in (self._submitted_to.get(name, ""), *router.order(name)) if router.is_up(each)
        ]
        if all(each in unknown_at for each in order):
            unknown_at.clear()
        return next((each for each in order if each not in unknown_at), None)

    def _leave(self, endpoint: str, left: dict[int, int], _: object) -> None:
        self._pool.router.end(endpoint, len(left))

    def _start(self, work: Awaitable[None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        # Tasks are cancelled by closing this, when no one waits, and by closing the client, when someone may.
        gone = UnavailableError("the client was closed")
        if (error := gone if task.cancelled() else task.exception()) is not None:
            self._outcomes.put_nowait(error)

    async def _fetch_from(self, endpoint: str, left: dict[int, int], grace_ms: int) -> None:
        """Make one attempt at the images of one server. Those that fail are tried again or get their outcome.

        `left` maps the index of an image in the call to its index among the requests, for all without an outcome.
        """
        indexes = list(left.values())
        try:
            async with asyncio.timeout(self._attempts[indexes[0]].left_s()):
                connection = await self._pool.connection(endpoint)
            stream = connection.fetch(
                [self._requests[index] for index in indexes],
                self._caller,
                grace_ms=grace_ms,
                transports=self._transports,
                timeout_s=self._attempts[indexes[0]].left_s(),
                producer=self._producer,
            )
            self._streams.append(stream)
            async for outcome in stream:
                index = left.pop(outcome.index)
                self._pool.router.end(endpoint)
                if outcome.error is None:
                    self._pool.router.succeeded(endpoint)
                    again = partial(self._fetch_again, index)
                    self._outcomes.put_nowait(replace(outcome, index=index, again=again))
                else:
                    if isinstance(outcome.error, UnknownImageError):
                        self._unknown_at[self._requests[index].routed_by].add(endpoint)
                    self._start(self._again([index], outcome.error))
        except EncoderError as error:
            if isinstance(error, UnavailableError) and not isinstance(error, StaleHandleError):
                self._pool.router.failed(endpoint)
            self._start(self._again(list(left.values()), error))
        except TimeoutError:
            late = DeadlineError(f"{endpoint} could not be reached before the deadline")
            self._start(self._again(list(left.values()), late))

    async def _fetch_again(self, index: int) -> FetchedRows:
        """Fetch lost rows again, inline, so that they cannot be lost a second time. Raises the error of the image."""
        request = replace(self._requests[index], needed_in_ms=0)
        stream = FetchStream(
            self._pool,
            self._recent,
            [request],
            self._caller,
            grace_ms=self._grace_ms,
            transports=[INLINE],
            timeout_s=self._timeout_s,
            producer=self._producer,
            kept=self._kept,
        )
        async with stream:
            outcome = await anext(aiter(stream))
        if outcome.error is not None:
            raise outcome.error
        return replace(outcome, index=index)

    async def _again(self, indexes: list[int], error: EncoderError) -> None:
        """Retry images that failed with `error` if that can help; else make it their outcome."""
        again: list[int] = []
        pause_s = 0.0
        for index in indexes:
            digest = self._requests[index].digest
            can_resubmit = self._sent(index) is not None
            pause = self._attempts[index].pause_s(error, can_resubmit=can_resubmit)
            if pause is None:
                self._outcomes.put_nowait(
                    FetchedRows(index, digest, error=self._attempts[index].outcome(error))
                )
            else:
                again.append(index)
                pause_s = max(pause_s, pause)
        await asyncio.sleep(pause_s)
        if isinstance(error, UnknownImageError) and not self._kept:
            again = await self._submit_again(again)
        self._fetch_all(again)

    async def _submit_again(self, indexes: list[int]) -> list[int]:
        """Submit images that a server does not know. Return those to fetch; the others get their outcome."""
        for index in indexes:
            self._recent.lost(self._requests[index].digest)
        images = {index: image for index in indexes if (image := self._sent(index)) is not None}
        known: list[int] = []
        left_s = min(self._attempts[index].left_s() for index in indexes) if indexes else 0.0
        submission = Submission(self._pool, self._recent, self._caller)
        answers = dict(zip(images, await submission.submit(list(images.values()), left_s), strict=True))
        for index in indexes:
            answer = answers.get(index)
            if answer is not None and answer.error is not None:
                digest = self._requests[index].digest
                self._outcomes.put_nowait(FetchedRows(index, digest, error=answer.error))
            else:
                known.append(index)
        return known
