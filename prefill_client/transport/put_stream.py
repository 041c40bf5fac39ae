"""A running Put call to one server: names and their answers, and rows, inline or through shared memory."""

import asyncio
import itertools
import mmap
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar, TypeVarTuple

import grpc
import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import (
    EncoderError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from encoder_contract.framing import Checksum, frame
from encoder_contract.owned_file import create_owned, remove_ownerless
from encoder_contract.producer import Producer
from encoder_contract.segment_file import CALLERS_PREFIX
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.images import PutAnswer, PutImage
from prefill_client.transport.channels import from_message
from prefill_client.transport.exchange import Exchange

# Bytes copied at a time: few enough to be in the processor's cache when their checksum is computed.
_COPY_BYTES = 512 << 10
# Bytes of rows per message through shared memory. The server copies a piece while the next one is written.
SHARED_BYTES = 4 << 20
PUT = "/encoder_contract.v1.EncoderService/Put"
_numbers = itertools.count()
_STATES = {pb.HOLDING_HELD: "held", pb.HOLDING_YOURS: "yours", pb.HOLDING_WAIT: "wait"}
Waiting: TypeAlias = "asyncio.Future[pb.PutState]"
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class OutgoingSegment:
    """A file in shared memory through which one Put call sends rows, one image at a time.

    It grows to the size of the largest image and is reused for the next. It has a name only until the server has opened
    it, and no memory before that: a killed process leaves at worst an empty file, which the next caller or server of
    this user and folder removes.
    """

    def __init__(self, path: str, file: int) -> None:
        self.path = path
        self._file = file
        self._map: mmap.mmap | None = None

    @classmethod
    def beside(cls, segment: str) -> Self | None:
        """Return an empty segment in the folder of a server's; None if this process cannot write there.

        Removes the files that killed callers have left in the folder.
        """
        folder = Path(segment).parent
        remove_ownerless(folder, CALLERS_PREFIX)
        try:
            path, file = create_owned(folder, CALLERS_PREFIX)
        except OSError:
            return None
        return cls(str(path), file)

    def unlink(self) -> None:
        """Remove the file's name. Processes that have opened it keep it."""
        Path(self.path).unlink(missing_ok=True)

    def reserve(self, size: int) -> bool:
        """Make room for an image of `size` bytes. Return False if shared memory is full. For a worker thread."""
        if self._map is None or len(self._map) < size:
            try:
                os.posix_fallocate(self._file, 0, size)  # writing to a hole could raise SIGBUS
                self._map = mmap.mmap(self._file, size)
            except OSError:
                return False
        return True

    def write(self, data: memoryview, begin: int, end: int, checksum: Checksum) -> pb.Extent:
        """Copy bytes [begin, end) of an image's rows to the same offset, add them to `checksum`, and return the extent.

        Call `reserve` for the whole image first. For a worker thread: it takes 0.2 ms per MB, more in fresh memory.
        Raises `UnavailableError` once the segment is closed.
        """
        if (mapped := self._map) is None:
            raise UnavailableError("the Put call was closed")
        target, source = np.frombuffer(mapped, np.uint8), np.frombuffer(data, np.uint8)
        for place in range(begin, end, _COPY_BYTES):
            piece = slice(place, min(place + _COPY_BYTES, end))
            target[piece] = source[piece]
            checksum.add(memoryview(target[piece]))  # type: ignore[arg-type]
        return pb.Extent(offset=begin, length=end - begin)

    def close(self) -> None:
        """Release the memory. Not while a thread runs `reserve` or `write`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._map = None


async def whole(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run work in a thread. A cancelled caller waits for the thread: the next one writes to the same memory."""
    working = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):  # a second cancel; the first is raised below
                await asyncio.wait([working])
        working.exception()  # retrieved, or asyncio would log it
        raise


class PutStream(Exchange):
    """A running Put call, for any number of names and of concurrent images. Its leases end with it.

    Every method raises the error of the call once the call has ended.
    """

    def __init__(self, call: Any, endpoint: str, max_images: int) -> None:
        super().__init__(call, endpoint)
        self._piece_bytes = 0
        self._free = list(range(max_images))[::-1]
        self._awaited: dict[int, Waiting] = {}
        self._segment: OutgoingSegment | None = None
        self._sharing = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._error: EncoderError | None = None
        self._yours: dict[int, PutImage] = {}
        self._going_on: set[asyncio.Task[Any]] = set()
        self.number = next(_numbers)

    @classmethod
    async def open(
        cls,
        channel: grpc.aio.Channel,
        endpoint: str,
        producer: Producer,
        caller: pb.Caller,
        *,
        max_images: int,
        segment: str = "",
        proof: bytes = b"",
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Self:
        """Begin a call. With the path of the server's `segment` and a `proof`, rows go through shared memory.

        Raises the error of the call if the server refuses it.
        """
        call = channel.stream_stream(
            PUT, request_serializer=_serialized, response_deserializer=pb.PutResponse.FromString
        )(metadata=metadata)
        stream = cls(call, endpoint, max_images)
        ours = OutgoingSegment.beside(segment) if proof else None
        try:
            opening = pb.PutOpen(caller=caller, producer=producer.to_message())
            if ours is not None:
                opening.segment, opening.shm_proof = ours.path, proof
            await stream._begin(opening, ours)
        except BaseException:  # also when cancelled: no one else can end the call
            call.cancel()
            raise
        finally:
            if ours is not None:
                ours.unlink()
                if stream._segment is None:  # the server refused the segment or the call
                    ours.close()
        return stream

    def close(self) -> None:
        """End the call. The server releases its leases."""
        super().close()  # ends the reading task and all pending writes too
        self._end(UnavailableError("the Put call was closed"))

    async def name(self, images: Sequence[PutImage], width: int, dtype: str) -> list[PutAnswer]:
        """Name images together and return the answer to each, in order. Raises `OverloadedError` for too many.

        If the caller is cancelled, leases in the answers are given back.
        """
        asking = self._begin_whole(self._name(images, width, dtype))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._forsake_all)
            raise

    async def put(self, answer: PutAnswer, rows: NDArray[np.generic]) -> PutAnswer:
        """Send the rows of an image that is `yours`; return its last answer, `held` or `failed`.

        If the caller is cancelled, the lease is given back, and the cancellation is raised once no thread reads the
        rows.
        """
        self._check_yours(answer)
        data = memoryview(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))  # type: ignore[arg-type]
        waiting = self._await(answer.index)
        try:
            if not await self._share(answer.index, data, waiting):
                await asyncio.shield(self._begin_whole(self._send(answer.index, data, waiting)))
            return self._answer(answer.image, answer.index, await waiting)
        except asyncio.CancelledError:
            waiting.cancel()  # stops sending
            self._begin_whole(self._abandon(answer))
            raise

    async def abandon(self, answer: PutAnswer) -> None:
        """Give back the lease of an image that is `yours`. The server is told even if the caller is cancelled."""
        await asyncio.shield(self._begin_whole(self._abandon(answer)))

    async def _abandon(self, answer: PutAnswer) -> None:
        self._check_yours(answer)
        waiting = self._await(answer.index)
        await self._say(pb.PutRequest(end=pb.PutEnd(index=answer.index, abandoned=True)))
        self._answer(answer.image, answer.index, await waiting)

    def _check_yours(self, answer: PutAnswer) -> None:
        """Raise `InvalidRequestError` unless the call still holds the lease: the index may be reused by now."""
        ours = answer.call == self.number and self._yours.get(answer.index) is answer.image
        if not ours:
            raise InvalidRequestError(
                "rows may be sent once, and only for an image that was answered `yours`"
            )

    async def _name(self, images: Sequence[PutImage], width: int, dtype: str) -> list[PutAnswer]:
        if len(images) > len(self._free):
            raise OverloadedError(
                "this call has as many images in progress as the server allows: wait for answers"
            )
        indexes = [self._free.pop() for _ in images]
        pairs = list(zip(images, indexes, strict=True))
        waiting = [self._await(index) for index in indexes]
        names = [image.to_message(index, width, dtype) for image, index in pairs]
        await self._say(pb.PutRequest(names=pb.PutNames(names=names)))
        states = await asyncio.gather(*waiting)
        return [self._answer(*pair, state) for pair, state in zip(pairs, states, strict=True)]

    async def _send(self, index: int, data: memoryview, waiting: Waiting) -> None:
        """Send rows inline; stop if the image fails or is given up. Must not be cancelled."""
        checksum = Checksum()
        for begin in range(0, len(data), self._piece_bytes):
            if waiting.done():
                return
            piece = data[begin : begin + self._piece_bytes]
            checksum.add(piece)
            await self._write_whole(frame(index, [piece]))
        if not waiting.done():
            await self._write_whole(pb.PutRequest(end=pb.PutEnd(index=index, checksum=checksum.value)))

    async def _share(self, index: int, data: memoryview, waiting: Waiting) -> bool:
        """Send rows through shared memory and wait for their answer. Return False without a segment or room in it."""
        if (segment := self._segment) is None:
            return False
        try:
            async with self._sharing:  # until the server answers: the segment holds one image
                if not await whole(segment.reserve, len(data)):
                    return False
                await self._copy(segment, index, data, waiting)
                await asyncio.wait([waiting])
                return True
        finally:
            self._close_segment()

    async def _copy(self, segment: OutgoingSegment, index: int, data: memoryview, waiting: Waiting) -> None:
        """Copy an image into the segment in pieces. The server copies a piece out while the next one is written."""
        checksum = Checksum()
        for begin in range(0, len(data), SHARED_BYTES):
            if waiting.done():
                return
            end = min(begin + SHARED_BYTES, len(data))
            extent = await whole(segment.write, data, begin, end, checksum)
            await self._say(pb.PutRequest(shared=pb.PutShared(index=index, extent=extent)))
        await self._say(pb.PutRequest(end=pb.PutEnd(index=index, checksum=checksum.value)))

    def _forsake_all(self, asking: "asyncio.Future[list[PutAnswer]]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            for answer in asking.result():
                if answer.state == "yours":
                    self._begin_whole(self._abandon(answer))

    def _begin_whole(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Start work that goes on if its caller is cancelled. The end of the call ends it."""
        task = asyncio.create_task(work)
        self._going_on.add(task)
        task.add_done_callback(self._heard)
        return task

    def _heard(self, task: "asyncio.Task[Any]") -> None:
        self._going_on.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it if the caller has left

    async def _begin(self, opening: pb.PutOpen, segment: OutgoingSegment | None) -> None:
        await self._write(pb.PutRequest(open=opening))
        first = await self._read()
        if not first.HasField("opened"):
            raise InternalError(
                f"{self._endpoint}: the server's first answer to the Put call is not `opened`"
            )
        self._piece_bytes = first.opened.max_message_bytes
        if segment is not None and first.opened.shm:
            self._segment = segment
        self._reading = asyncio.create_task(self._listen(), name="put-answers")

    async def _listen(self) -> None:
        error: EncoderError = UnavailableError(f"{self._endpoint}: the Put call was cancelled")
        try:
            while True:
                state = (await self._read()).state
                # Kept for the next caller if no one awaits it: the lease has ended.
                waiting = self._await(state.index)
                if not waiting.done():
                    waiting.set_result(state)
        except EncoderError as caught:
            error = caught
        finally:  # also for CancelledError, which gRPC raises here if the call was cancelled
            self._end(error)

    def _await(self, index: int) -> Waiting:
        """Return the next answer to an image: one that was kept, or the next to arrive."""
        if self._error is not None:
            raise self._error
        waiting = self._awaited.get(index)
        if waiting is None or waiting.cancelled():
            waiting = self._awaited[index] = asyncio.get_running_loop().create_future()
        return waiting

    def _answer(self, image: PutImage, index: int, state: pb.PutState) -> PutAnswer:
        self._awaited.pop(index, None)
        if state.holding == pb.HOLDING_YOURS:
            self._yours[index] = image
        else:
            self._yours.pop(index, None)
            self._free.append(index)
        error = from_message(state.error) if state.holding == pb.HOLDING_FAILED else None
        holding, lease_s = _STATES.get(state.holding, "failed"), state.lease_ms / 1000
        place = self._endpoint, self.number, index
        return PutAnswer(image, holding, state.address, lease_s, error, *place)  # type: ignore[arg-type]

    async def _say(self, message: pb.PutRequest | bytes) -> None:
        """Write a message, to its end even if the caller is cancelled: cancelling a write would end the call."""
        await asyncio.shield(self._begin_whole(self._write_whole(message)))

    async def _write_whole(self, message: pb.PutRequest | bytes) -> None:
        try:
            await self._write(message)
        except asyncio.CancelledError as error:  # the call was cancelled, not this task
            raise UnavailableError(f"{self._endpoint}: the Put call was cancelled") from error

    def _end(self, error: EncoderError) -> None:
        """Fail all callers that wait for an answer: the call has ended."""
        self._error = self._error or error
        self._close_segment()
        for waiting in self._awaited.values():
            if not waiting.done():
                waiting.set_exception(self._error)
                waiting.exception()  # retrieved, or asyncio would log it if the caller has left
        self._awaited.clear()

    def _close_segment(self) -> None:
        """Close the segment once the call has ended. While a thread may write to it, its sender does that later."""
        if self._segment is not None and self._error is not None and not self._sharing.locked():
            self._segment.close()


def _serialized(message: pb.PutRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
