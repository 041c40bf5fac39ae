"""A running Submit call: the server's answers, and uploads."""

from collections.abc import Sequence
from time import monotonic
from typing import Any

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.video import VideoInfo
from prefill_client.images import Image, Submitted
from prefill_client.transport.channels import from_message
from prefill_client.transport.exchange import Exchange


class SubmitStream(Exchange):
    """One attempt to submit images to a server: call `answers`, then `finish` or, to keep them, `resend`; then `close`.

    If the call is closed before it has finished, the server drops its images unless other callers want them.
    """

    def __init__(
        self, call: Any, images: Sequence[Image], caller: pb.Caller, endpoint: str, piece_bytes: int
    ) -> None:
        super().__init__(call, endpoint)
        self._images = images
        self._caller = caller
        self._piece_bytes = piece_bytes

    async def answers(self, *, kept: bool = False) -> list[Submitted]:
        """Name the images, upload those that the server does not have, and return one answer per image, in order.

        With `kept`, the server may ask for a file again until the call ends. Raises the error of the call.
        """
        await self._write(pb.SubmitRequest(open=self._caller))
        names = [image.to_message(index) for index, image in enumerate(self._images)]
        await self._write(pb.SubmitRequest(names=pb.ImageNames(names=names, kept=kept)))
        answers: dict[int, Submitted] = {}
        sent_s: dict[int, float] = {}
        while len(answers) < len(self._images):
            state = (await self._read()).state
            if state.state == pb.STATE_NEEDS_BYTES:
                sent_s[state.index] = monotonic()
                await self._send(state.index)
            else:
                began_s = sent_s.get(state.index)
                upload_s = (began_s, monotonic()) if began_s is not None else None
                answers[state.index] = self._submitted(state, upload_s)
        return [answers[index] for index in range(len(self._images))]

    async def resend(self) -> EncoderError:
        """Upload images again when the server asks for them. Return the error of a refused image or of the call."""
        try:
            while True:
                state = (await self._read()).state
                if state.state == pb.STATE_NEEDS_BYTES:
                    await self._send(state.index)
                elif state.state == pb.STATE_FAILED:
                    return from_message(state.error)
        except EncoderError as error:
            return error

    async def _send(self, index: int) -> None:
        view = memoryview(self._images[index].data)
        for begin in range(0, max(1, len(view)), self._piece_bytes):
            piece = bytes(view[begin : begin + self._piece_bytes])
            last = begin + self._piece_bytes >= len(view)
            await self._write(pb.SubmitRequest(bytes=pb.ImageBytes(index=index, data=piece, last=last)))

    def _submitted(self, state: pb.ImageState, upload_s: tuple[float, float] | None) -> Submitted:
        image = self._images[state.index]
        digest = image.digest
        if state.state == pb.STATE_FAILED:
            return Submitted(digest, error=from_message(state.error), frames=image.frames)
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
