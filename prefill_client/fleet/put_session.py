"""Puts rows that the caller computes into the servers' stores: one Put call to each server that images go to."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import DeadlineError, EncoderError, UnavailableError
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.fleet.pool import Pool
from prefill_client.images import PutAnswer, PutImage
from prefill_client.transport.put_stream import PutStream


class PutSession:
    """Puts rows of any number of images. Use it with `async with`: its leases end with it.

    Nothing is retried, because a caller that cannot put still has its rows. If a server goes away, its images that are
    under way fail; later names go to another server, or to the same one once it is back.
    """

    def __init__(
        self, pool: Pool, producer: Producer, caller: pb.Caller, *, shared: bool, timeout_s: float
    ) -> None:
        """`shared`: rows may go through shared memory. `timeout_s` bounds each step."""
        self._pool = pool
        self._producer = producer
        self._caller = caller
        self._shared = shared
        self._timeout_s = timeout_s
        self._streams: dict[str, asyncio.Task[PutStream]] = {}
        self._giving_up: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the calls. Leases are released, and incomplete rows are dropped."""
        streams, self._streams = list(self._streams.values()), {}
        for opening in streams:
            opening.cancel()
        for opened in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(opened, PutStream):
                opened.close()

    async def name(self, images: Sequence[PutImage]) -> list[PutAnswer]:
        """Name images together; return the answer to each, in order.

        `yours`: compute the rows and `put` them within `lease_s`, or `abandon` the image. `wait`: fetch the rows with a
        grace of `lease_s`, and name the image again after `UnknownImageError`. `held`: fetch the rows. `failed`: the
        answer has the error. If the caller is cancelled, leases in the answers are given back.
        """
        try:
            with self._pool.router.placed([image.routed_by for image in images], bounded=False) as groups:
                named = await self._name_all(images, groups)
        except EncoderError as error:  # no endpoint is known
            return [PutAnswer(image, "failed", error=error) for image in images]
        answers = {
            position: answer
            for group, found in zip(groups.values(), named, strict=True)
            for position, answer in zip(group, found, strict=True)
        }
        return [answers[position] for position in range(len(images))]

    async def put(self, answer: PutAnswer, rows: NDArray[np.generic]) -> PutAnswer:
        """Send the rows [tokens, width] of an image that is `yours`; return its last answer, `held` or `failed`.

        bfloat16 rows are passed as uint16 bit patterns. Do not change the rows before this returns or raises.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await (await self._opened(answer)).put(answer, rows)
        except TimeoutError:
            return replace(
                answer,
                state="failed",
                error=DeadlineError("the server did not accept the rows before the deadline"),
            )
        except EncoderError as error:
            return replace(answer, state="failed", error=error)

    async def abandon(self, answer: PutAnswer) -> None:
        """Give up the lease of an image that is `yours`, so that another caller can compute it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await (await self._opened(answer)).abandon(answer)
        except (TimeoutError, EncoderError):
            pass  # the lease expires at the server

    async def _name_all(
        self, images: Sequence[PutImage], groups: dict[str, list[int]]
    ) -> list[list[PutAnswer]]:
        """Name each group of images at its server. A caller that is cancelled gives up what servers answer."""
        naming = [
            asyncio.create_task(self._name(endpoint, [images[position] for position in group]))
            for endpoint, group in groups.items()
        ]
        try:
            return await asyncio.gather(*naming)
        except BaseException:
            for asked in naming:
                asked.add_done_callback(self._give_up)
            raise

    async def _name(self, endpoint: str, images: Sequence[PutImage]) -> list[PutAnswer]:
        try:
            async with self._pool.attempt(endpoint, self._timeout_s) as connection:
                stream = await self._stream(endpoint)
                description = connection.description
                return await stream.name(images, description.width, description.dtype)
        except EncoderError as error:
            return [PutAnswer(image, "failed", error=error, endpoint=endpoint) for image in images]

    def _give_up(self, naming: "asyncio.Task[list[PutAnswer]]") -> None:
        """Give back the leases that one server has answered to a caller that was cancelled."""
        if naming.cancelled() or naming.exception() is not None:
            return
        for answer in naming.result():
            if answer.state == "yours":
                task = asyncio.create_task(self.abandon(answer), name="put-give-up")
                self._giving_up.add(task)
                task.add_done_callback(self._giving_up.discard)

    async def _opened(self, answer: PutAnswer) -> PutStream:
        """Return the call in which an image was named. Raises `UnavailableError` if the call has ended."""
        opening = self._streams.get(answer.endpoint)
        if opening is not None:
            stream = await asyncio.shield(opening)
            if stream.is_open() and stream.number == answer.call:
                return stream
        raise UnavailableError(f"{answer.endpoint}: the Put call and its leases have ended")

    async def _stream(self, endpoint: str) -> PutStream:
        """Return the open call to a server; begin one if there is none. Concurrent callers share one attempt."""
        opening = self._streams.get(endpoint)
        if opening is not None and opening.done() and not _is_open(opening):
            opening = None
        if opening is None:
            opening = self._streams[endpoint] = asyncio.create_task(self._open(endpoint), name="put-open")
        return await asyncio.shield(opening)

    async def _open(self, endpoint: str) -> PutStream:
        connection = await self._pool.connection(endpoint)
        return await connection.put(self._producer, self._caller, shared=self._shared)


def _is_open(opening: "asyncio.Task[PutStream]") -> bool:
    return not opening.cancelled() and opening.exception() is None and opening.result().is_open()
