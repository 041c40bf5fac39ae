"""A running Submit call: its answers, and the images that it keeps."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Any

import grpc

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.images import Image, Submitted
from prefill_client.transport.channels import ended_early, from_message, from_rpc


class SubmitStream:
    """One attempt at images of one server: `answers`, then `finish`, or `send_again` if they are kept; then `close`."""

    def __init__(
        self, call: Any, images: Sequence[Image], caller: pb.Caller, endpoint: str, piece_bytes: int
    ) -> None:
        self._call = call
        self._images = images
        self._caller = caller
        self._endpoint = endpoint
        self._piece_bytes = piece_bytes

    async def answers(self, *, kept: bool = False) -> list[Submitted]:
        """Name the images, send the bytes of those the server lacks, and return its answer to each, in order.

        Raises the error of the call.
        """
        try:
            return await self._converse(kept=kept)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise await self._why(error) from error

    async def finish(self) -> None:
        """End the call so that its images stay submitted. Raises the error of the call."""
        try:
            await self._call.done_writing()
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise await self._why(error) from error

    async def send_again(self) -> EncoderError:
        """Send the images that the server asks for again, until it takes one no more or the call ends; return why."""
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                state = response.state
                if state.state == pb.STATE_NEEDS_BYTES:
                    await self._send(state.index)
                elif state.state == pb.STATE_FAILED:
                    return from_message(state.error)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            return await self._why(error)
        return await ended_early(self._call, self._endpoint)

    def close(self) -> None:
        """End the call, if it has not ended: what it submitted and nobody else wants is withdrawn."""
        self._call.cancel()

    async def _converse(self, *, kept: bool) -> list[Submitted]:
        await self._call.write(pb.SubmitRequest(open=self._caller))
        names = [
            pb.ImageName(
                index=index,
                digest=image.digest,
                grid=pb.Grid(t=image.grid.t, h=image.grid.h, w=image.grid.w),
                size_bytes=len(image.data),
            )
            for index, image in enumerate(self._images)
        ]
        await self._call.write(pb.SubmitRequest(names=pb.ImageNames(names=names, kept=kept)))
        answers: dict[int, Submitted] = {}
        sent_s: dict[int, float] = {}
        while len(answers) < len(self._images):
            response = await self._call.read()
            if response is grpc.aio.EOF:
                raise await ended_early(self._call, self._endpoint)
            state = response.state
            if state.state == pb.STATE_NEEDS_BYTES:
                sent_s[state.index] = monotonic()
                await self._send(state.index)
            else:
                began_s = sent_s.get(state.index)
                upload_s = (began_s, monotonic()) if began_s is not None else None
                answers[state.index] = self._submitted(state, upload_s)
        return [answers[index] for index in range(len(self._images))]

    async def _send(self, index: int) -> None:
        view = memoryview(self._images[index].data)
        for begin in range(0, max(1, len(view)), self._piece_bytes):
            piece = bytes(view[begin : begin + self._piece_bytes])
            last = begin + self._piece_bytes >= len(view)
            await self._call.write(pb.SubmitRequest(bytes=pb.ImageBytes(index=index, data=piece, last=last)))

    def _submitted(self, state: pb.ImageState, upload_s: tuple[float, float] | None) -> Submitted:
        digest = self._images[state.index].digest
        if state.state == pb.STATE_FAILED:
            return Submitted(digest, error=from_message(state.error))
        return Submitted(
            digest,
            Grid(state.grid.t, state.grid.h, state.grid.w),
            state.tokens,
            state.address,
            cached=state.state == pb.STATE_CACHED,
            upload_s=upload_s,
            endpoint=self._endpoint,
        )

    async def _why(self, error: Exception) -> EncoderError:
        """Return why the call ended: a write to one that has ended fails in several ways, none of which says it."""
        if isinstance(error, grpc.aio.AioRpcError):
            return from_rpc(error, self._endpoint)
        return await ended_early(self._call, self._endpoint)
