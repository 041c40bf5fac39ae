"""A fetch from any number of servers: every request gets exactly one outcome, after useful retries."""

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
    UnavailableError,
    UnknownImageError,
)
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.fleet.pool import Pool
from prefill_client.fleet.retries import Attempts
from prefill_client.fleet.submission import SentImages, Submission
from prefill_client.images import FetchedRows, Image, RowRequest
from prefill_client.transport import INLINE
from prefill_client.transport.row_stream import RowStream


class FetchStream:
    """A running fetch. Iterate it for one `FetchedRows` per request, in the order in which they become ready.

    The servers hold shared rows until `close` or the end of `async with`; the fetch's `timeout_s` bounds only the wait
    for the outcomes. If a server goes away earlier, `prefill_client.read` fetches its rows again.
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
        kept: bool = False,
    ) -> None:
        self._pool = pool
        self._recent = recent
        self._requests = requests
        self._caller = caller
        self._grace_ms = grace_ms
        self._transports = transports
        self._timeout_s = timeout_s
        self._kept = kept
        self._submitted_to = {each.digest: each.submitted_to for each in requests if each.submitted_to}
        # By image, the servers that do not know it, in this round over all servers.
        self._unknown_at: defaultdict[bytes, set[str]] = defaultdict(set)
        deadline = monotonic() + timeout_s
        self._attempts = [Attempts(deadline, kept=kept) for _ in requests]
        # None means that the stream was closed. An exception means that the client was closed, or a bug: it ends the
        # iteration, because the caller would wait forever.
        self._outcomes: asyncio.Queue[FetchedRows | BaseException | None] = asyncio.Queue()
        self._streams: list[RowStream] = []
        self._tasks: set[asyncio.Future[None]] = set()

    def close(self) -> None:
        """End all calls and release the rows that they hold."""
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
        names = [self._requests[index].digest for index in indexes]
        groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        # Kept images are only at one server: do not move them to balance load.
        placed = self._pool.router.place(names, self._route, bounded=not self._kept)
        for index, endpoint in zip(indexes, placed, strict=True):
            # No grace for images that this client sent: a server that does not know one has lost it.
            grace_ms = self._grace_ms if self._resubmittable(index) is None else 0
            groups[endpoint, grace_ms].append(index)
        for (endpoint, grace_ms), group in groups.items():
            pending = dict(enumerate(group))
            task = self._start(self._fetch_from(endpoint, pending, grace_ms))
            task.add_done_callback(partial(self._end_pending, endpoint, pending))

    def _resubmittable(self, index: int) -> Image | None:
        """Return the image to submit again if a server lost it; None if this client cannot submit it."""
        request = self._requests[index]
        if self._kept or (image := self._recent.image(request.digest)) is None:
            return None
        if request.frames is None:
            return image
        # The entry of a video's digest is what was sent last: other frames of the video, or the video itself.
        return replace(image, frames=request.frames, grid=request.frames.grid, is_video=False)

    def _route(self, name: bytes) -> str | None:
        if self._kept:
            return self._next_server(name)
        return self._recent.route(name) or self._submitted_to.get(name)

    def _next_server(self, name: bytes) -> str | None:
        """Return the server to try next for a kept image: the one it was submitted to, then each of the others."""
        router, unknown_at = self._pool.router, self._unknown_at[name]
        order = [
            server
            for server in (self._submitted_to.get(name, ""), *router.order(name))
            if router.is_up(server)
        ]
        if all(server in unknown_at for server in order):
            unknown_at.clear()
        return next((server for server in order if server not in unknown_at), None)

    def _end_pending(self, endpoint: str, pending: dict[int, int], _: object) -> None:
        self._pool.router.end(endpoint, len(pending))

    def _start(self, work: Awaitable[None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        # Closing the client cancels tasks while a caller may be waiting. After closing this stream, no caller waits.
        closed = UnavailableError("the client was closed")
        if (error := closed if task.cancelled() else task.exception()) is not None:
            self._outcomes.put_nowait(error)

    async def _fetch_from(self, endpoint: str, pending: dict[int, int], grace_ms: int) -> None:
        """Make one attempt at the images of one server. Retry an image that fails, or report its outcome.

        `pending` maps the index of each image in the call to the index of its request, and loses an entry with every
        outcome.
        """
        indexes = list(pending.values())
        try:
            async with asyncio.timeout(self._attempts[indexes[0]].left_s()):
                connection = await self._pool.connection(endpoint)
            stream = connection.fetch(
                [self._requests[index] for index in indexes],
                self._caller,
                grace_ms=grace_ms,
                transports=self._transports,
                timeout_s=self._attempts[indexes[0]].left_s(),
            )
            self._streams.append(stream)
            async for outcome in stream:
                index = pending.pop(outcome.index)
                self._pool.router.end(endpoint)
                if outcome.error is None:
                    self._pool.router.succeeded(endpoint)
                    again = partial(self._refetch, index)
                    self._outcomes.put_nowait(replace(outcome, index=index, again=again))
                else:
                    if isinstance(outcome.error, UnknownImageError):
                        self._unknown_at[self._requests[index].digest].add(endpoint)
                    self._start(self._retry_or_fail([index], outcome.error))
        except EncoderError as error:
            noted = self._pool.noted(endpoint, error)
            self._start(self._retry_or_fail(list(pending.values()), noted))
        except TimeoutError:
            timeout = DeadlineError(f"{endpoint} could not be reached before the deadline")
            self._start(self._retry_or_fail(list(pending.values()), timeout))

    async def _refetch(self, index: int) -> FetchedRows:
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
            kept=self._kept,
        )
        async with stream:
            outcome = await anext(aiter(stream))
        if outcome.error is not None:
            raise outcome.error
        return replace(outcome, index=index)

    async def _retry_or_fail(self, indexes: list[int], error: EncoderError) -> None:
        """Retry images that failed with `error` if a retry can help. Otherwise, report the error as their outcome."""
        retried: list[int] = []
        pause_s = 0.0
        for index in indexes:
            digest = self._requests[index].digest
            can_resubmit = self._resubmittable(index) is not None
            pause = self._attempts[index].pause_s(error, can_resubmit=can_resubmit)
            if pause is None:
                self._outcomes.put_nowait(
                    FetchedRows(index, digest, error=self._attempts[index].outcome(error))
                )
            else:
                retried.append(index)
                pause_s = max(pause_s, pause)
        await asyncio.sleep(pause_s)
        if isinstance(error, UnknownImageError) and not self._kept:
            retried = await self._resubmit(retried)
        self._fetch_all(retried)

    async def _resubmit(self, indexes: list[int]) -> list[int]:
        """Submit images that a server does not know. Return the indexes to fetch; report errors as outcomes."""
        for index in indexes:
            self._recent.forget_route(self._requests[index].digest)
        images = {index: image for index in indexes if (image := self._resubmittable(index)) is not None}
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
