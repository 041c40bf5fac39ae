"""A running Submit call: its answers, and the images that it keeps."""

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
    """One attempt at images of one server: `answers`, then `finish`, or `send_again` if they are kept; then `close`.

    Images of a call that is closed before it has finished are withdrawn, unless other callers want them.
    """

    def __init__(
        self, call: Any, images: Sequence[Image], caller: pb.Caller, endpoint: str, piece_bytes: int
    ) -> None:
        super().__init__(call, endpoint)
        self._images = images
        self._caller = caller
        self._piece_bytes = piece_bytes

    async def answers(self, *, kept: bool = False) -> list[Submitted]:
        """Name the images, send the bytes of those the server lacks, and return its answer to each, in order.

        Raises the error of the call.
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

    async def send_again(self) -> EncoderError:
        """Send images again when the server asks for them. Return the reason once it refuses one or the call ends."""
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
            said = state.video
            video = VideoInfo(
                said.frames, said.readable_frames, said.fps, said.width, said.height, said.rotation
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
