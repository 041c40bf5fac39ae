"""Puts rows that the caller computes into the servers' stores, by one Put call to each server."""

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
    """Puts the rows of any number of images. Use it with `async with`: the leases end with the session.

    The session does not retry, because a caller that cannot put still has its rows. If a server goes away, the images
    in progress there fail. Images named later go to another server, or to the same one once it is back.
    """

    def __init__(
        self, pool: Pool, producer: Producer, caller: pb.Caller, *, shared: bool, timeout_s: float
    ) -> None:
        """With `shared`, rows may go through shared memory. `timeout_s` bounds each step."""
        self._pool = pool
        self._producer = producer
        self._caller = caller
        self._shared = shared
        self._timeout_s = timeout_s
        self._streams: dict[str, asyncio.Task[PutStream]] = {}
        self._abandoning: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the calls. The servers release leases and drop incomplete rows."""
        streams, self._streams = list(self._streams.values()), {}
        for opening in streams:
            opening.cancel()
        for opened in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(opened, PutStream):
                opened.close()

    async def name(self, images: Sequence[PutImage]) -> list[PutAnswer]:
        """Ask the servers who computes the rows of these images. Return one answer per image, in order.

        What the caller does next depends on the state of the answer:

        - `yours`: compute the rows and `put` them within `lease_s`, or `abandon` the image.
        - `wait`: fetch the rows with a grace of `lease_s`, and name the image again after `UnknownImageError`.
        - `held`: fetch the rows.
        - `failed`: see the answer's error.

        A cancelled caller holds no lease: the session gives back the leases in the answers.
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
        """Send the rows [tokens, width] of an image that is `yours`. Return the final answer, `held` or `failed`.

        Pass bfloat16 rows as uint16 bit patterns. Do not change the rows before this returns or raises.
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
        """Give back the lease of an image that is `yours`, so that another caller can compute it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await (await self._opened(answer)).abandon(answer)
        except (TimeoutError, EncoderError):
            pass  # the lease expires at the server

    async def _name_all(
        self, images: Sequence[PutImage], groups: dict[str, list[int]]
    ) -> list[list[PutAnswer]]:
        """Name each group of images at its server. If the caller is cancelled, give back the leases in the answers."""
        naming = [
            asyncio.create_task(self._name(endpoint, [images[position] for position in group]))
            for endpoint, group in groups.items()
        ]
        try:
            return await asyncio.gather(*naming)
        except BaseException:
            for task in naming:
                task.add_done_callback(self._abandon_leases)
            raise

    async def _name(self, endpoint: str, images: Sequence[PutImage]) -> list[PutAnswer]:
        try:
            async with self._pool.attempt(endpoint, self._timeout_s) as connection:
                stream = await self._stream(endpoint)
                description = connection.description
                return await stream.name(images, description.width, description.dtype)
        except EncoderError as error:
            return [PutAnswer(image, "failed", error=error, endpoint=endpoint) for image in images]

    def _abandon_leases(self, naming: "asyncio.Task[list[PutAnswer]]") -> None:
        """Give back the leases in one server's answers, because the caller was cancelled."""
        if naming.cancelled() or naming.exception() is not None:
            return
        for answer in naming.result():
            if answer.state == "yours":
                task = asyncio.create_task(self.abandon(answer), name="put-abandon")
                self._abandoning.add(task)
                task.add_done_callback(self._abandoning.discard)

    async def _opened(self, answer: PutAnswer) -> PutStream:
        """Return the call in which the image was named. Raises `UnavailableError` if the call has ended."""
        opening = self._streams.get(answer.endpoint)
        if opening is not None:
            stream = await asyncio.shield(opening)
            if stream.is_open() and stream.number == answer.call:
                return stream
        raise UnavailableError(f"{answer.endpoint}: the Put call and its leases have ended")

    async def _stream(self, endpoint: str) -> PutStream:
        """Return the open call to a server, or start one. Concurrent callers share one attempt."""
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
