"""A running Submit call: the server's answers, and uploads."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from encoder_contract.errors import EncoderError, UnknownImageError
from encoder_contract.framing import frame_piece
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import VideoInfo
from prefill_client.images import Image, Submitted
from prefill_client.transport.channels import from_message
from prefill_client.transport.exchange import Exchange

# How long the server may take to end a call that the client leaves.
LEAVE_S = 30.0
_LAST = pb.SubmitRequest(last=True).SerializeToString()
"""A message, and the end of any other."""


class SubmitStream(Exchange):
    """One attempt to submit images to a server: call `answers`; to keep the images, `resend`; then `close` or `leave`.

    If the call is closed before it has ended, the server drops its images unless other callers want them.
    """

    def __init__(
        self,
        call: Any,
        images: Sequence[Image],
        caller: pb.Caller,
        endpoint: str,
        max_message_bytes: int,
        new: Collection[int],
    ) -> None:
        """`new` are the indexes of images that the server probably lacks: their files come along if they fit."""
        super().__init__(call, endpoint)
        self._images = images
        self._caller = caller
        self._max_message_bytes = max_message_bytes
        self._new = new
        self._known_only = False
        self._exchanging: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._sent_s: dict[int, float] = {}
        self.answered: dict[int, Submitted] = {}
        """The answers so far, by index."""
        self.patches_per_s = 0.0
        """The server's measured rate, as in its last answer."""

    async def answers(
        self, *, kept: bool = False, all_or_nothing: bool = False, known_only: bool = False
    ) -> list[Submitted]:
        """Name the images, upload those that the server does not have, and return one answer per image, in order.

        With `kept`, the server may ask for a file again. With `all_or_nothing`, a server that has no room for all of
        the images refuses all, and keeps none without `complete`. Otherwise, the images stay submitted. The call is
        still open then. With `known_only`, nothing is uploaded, and the answer to an image that the server does not
        have is an `UnknownImageError`. Raises the error of the call. If this is cancelled, the exchange goes on until
        `close` or `leave`: cancelling an operation of gRPC would end the call.
        """
        self._known_only = known_only
        self._exchanging = asyncio.create_task(
            self._exchange(kept=kept, all_or_nothing=all_or_nothing), name="submit"
        )
        await asyncio.shield(self._exchanging)
        return [self.answered[index] for index in range(len(self._images))]

    async def resend(self) -> EncoderError:
        """Upload images again when the server asks for them. Return the error of a refused image or of the call."""
        try:
            while True:
                for state in (await self._read()).states:
                    if state.state == pb.STATE_NEEDS_BYTES and not self._known_only:
                        await self._send([state.index])
                    elif state.state == pb.STATE_NEEDS_BYTES:
                        return self._unknown()
                    elif state.state == pb.STATE_FAILED:
                        return from_message(state.error)
        except EncoderError as error:
            return error

    async def complete(self) -> None:
        """End the call: its images stay submitted. A Fetch submits them again if the server has left."""
        with suppress(EncoderError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._write(_LAST)
                await self._half_close()
                await self.finish()

    async def leave_kept(self) -> None:
        """Have the server end the call, whose images then stay submitted. `resend` returns when it has ended."""
        with suppress(EncoderError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._half_close()

    def close(self) -> None:
        """End the call if it has not ended."""
        if self._exchanging is not None:
            self._exchanging.cancel()
        super().close()

    def leave(self) -> None:
        """Send nothing more and let the call end: the images that the server has stay submitted."""
        self._leaving = asyncio.create_task(self._leave(), name="leave")

    async def _exchange(self, *, kept: bool, all_or_nothing: bool) -> None:
        names = [image.to_message(index) for index, image in enumerate(self._images)]
        fitting = list(self._fitting())
        self._sent_s = dict.fromkeys(fitting, monotonic())
        named = pb.ImageNames(
            names=names, kept=kept, all_or_nothing=all_or_nothing, known_only=self._known_only
        )
        parts: list[bytes | memoryview] = [
            pb.SubmitRequest(open=self._caller, names=named).SerializeToString()
        ]
        for index in fitting:
            parts += frame_piece(index, memoryview(self._images[index].data), last=True)
        if kept or not all_or_nothing:
            parts.append(_LAST)
        await self._write(b"".join(parts))
        while len(self.answered) < len(self._images):
            needed: list[int] = []
            answer = await self._read()
            self.patches_per_s = answer.patches_per_s
            for state in answer.states:
                if state.state == pb.STATE_NEEDS_BYTES and self._known_only:
                    self.answered[state.index] = self._failed(state.index, self._unknown())
                elif state.state == pb.STATE_NEEDS_BYTES:
                    self._sent_s[state.index] = monotonic()
                    needed.append(state.index)
                else:
                    began_s = self._sent_s.get(state.index)
                    upload_s = (began_s, monotonic()) if began_s is not None else None
                    self.answered[state.index] = self._submitted(state, upload_s)
            await self._send(needed)

    async def _read(self) -> Any:
        """Return the next message. Raises the error of the call, which may come as a message: see `SubmitResponse`."""
        answer = await super()._read()
        if answer.HasField("error"):
            error = from_message(answer.error, self._endpoint)
            with suppress(EncoderError):
                await self._half_close()
            raise error
        return answer

    def _fitting(self) -> Iterator[int]:
        """Yield the indexes of new images whose files fit into one message together."""
        room = self._max_message_bytes
        for index in self._new:
            image = self._images[index]
            if not image.is_video and image.frames is None and len(image.data) <= room:
                room -= len(image.data)
                yield index

    async def _send(self, indexes: Sequence[int]) -> None:
        """Send files, in as few messages as possible."""
        parts: list[bytes | memoryview] = []
        room = self._max_message_bytes
        for index in indexes:
            view, begin = memoryview(self._images[index].data), 0
            while begin < len(view) or begin == 0:
                piece = view[begin : begin + room]
                begin, room = begin + max(len(piece), 1), room - len(piece)
                parts += frame_piece(index, piece, last=begin >= len(view))
                if not room:
                    if self._leaving is not None:
                        return
                    await self._write(b"".join(parts))
                    parts, room = [], self._max_message_bytes
        if parts and self._leaving is None:
            await self._write(b"".join(parts))

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                with suppress(EncoderError):
                    await self._half_close()
                    if self._exchanging is not None:
                        await asyncio.shield(self._exchanging)
                    await self.finish()
        except TimeoutError:
            pass
        finally:
            self.close()

    def _submitted(self, state: pb.ImageState, upload_s: tuple[float, float] | None) -> Submitted:
        image = self._images[state.index]
        digest = image.digest
        if state.state == pb.STATE_FAILED:
            return self._failed(state.index, from_message(state.error))
        if state.state == pb.STATE_PROBED:
            info = state.video
            video = VideoInfo(
                info.frames, info.readable_frames, info.fps, info.width, info.height, info.rotation
            )
            return Submitted(digest, upload_s=upload_s, endpoint=self._endpoint, video=video)
        return Submitted(
            digest,
            Grid(state.grid.t, state.grid.h, state.grid.w),
            state.tokens,
            state.address,
            cached=state.state == pb.STATE_CACHED,
            upload_s=upload_s,
            endpoint=self._endpoint,
            frames=image.frames,
        )

    def _failed(self, index: int, error: EncoderError) -> Submitted:
        image = self._images[index]
        return Submitted(image.digest, error=error, endpoint=self._endpoint, frames=image.frames)

    def _unknown(self) -> UnknownImageError:
        """Return the error of an image without a file. Only a server that does not know `known_only` asks for it."""
        return UnknownImageError(f"{self._endpoint} does not have the image")
