"""A running Put call to one server: names images, and sends their rows inline or through shared memory."""

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
from encoder_contract.producer import Producer
from encoder_contract.segment_file import CALLERS_PREFIX, create_owned, remove_ownerless
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.images import PutAnswer, PutImage
from prefill_client.transport.channels import from_message
from prefill_client.transport.exchange import Exchange

# Bytes copied at a time: few enough to be still in the CPU cache when their checksum is computed.
_COPY_BYTES = 512 << 10
# Bytes of rows that one message announces in shared memory. The server copies a piece while the next one is written.
SHARED_BYTES = 4 << 20
PUT = "/encoder_contract.v1.EncoderService/Put"
_numbers = itertools.count()
_STATES = {pb.HOLDING_HELD: "held", pb.HOLDING_YOURS: "yours", pb.HOLDING_WAIT: "wait"}
Answer: TypeAlias = "asyncio.Future[pb.PutState]"
"""The server's next answer to one image."""
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class OutgoingSegment:
    """A file in shared memory through which one Put call sends rows, one image at a time.

    It grows to the size of the largest image, and all images use it. It has a name only until the server has opened it,
    and no memory before that. A killed process therefore leaves at most an empty file, which the next caller or server
    of this user and folder removes.
    """

    def __init__(self, path: str, file: int) -> None:
        self.path = path
        self._file = file
        self._map: mmap.mmap | None = None

    @classmethod
    def beside(cls, segment: str) -> Self | None:
        """Return an empty segment in the folder of the server's segment; None if this process cannot write there.

        Removes files that killed callers left in the folder.
        """
        folder = Path(segment).parent
        remove_ownerless(folder, CALLERS_PREFIX)
        try:
            path, file = create_owned(folder, CALLERS_PREFIX)
        except OSError:
            return None
        return cls(str(path), file)

    def unlink(self) -> None:
        """Remove the file's name. Processes that have opened the file keep it."""
        Path(self.path).unlink(missing_ok=True)

    def reserve(self, size: int) -> bool:
        """Make room for an image of `size` bytes. Return False if shared memory is full. Call it in a worker thread."""
        if self._map is None or len(self._map) < size:
            try:
                os.posix_fallocate(self._file, 0, size)  # writing to a hole in the file could raise SIGBUS
                self._map = mmap.mmap(self._file, size)
            except OSError:
                return False
        return True

    def write(self, data: memoryview, begin: int, end: int, checksum: Checksum) -> pb.Extent:
        """Copy bytes [begin, end) of an image's rows to the same offset, add them to `checksum`, and return the extent.

        Call `reserve` for the whole image first. Call this in a worker thread: it takes 0.2 ms per MB, more in new
        memory. Raises `UnavailableError` once the segment is closed.
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
        """Release the memory. Do not call it while a thread runs `reserve` or `write`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._map = None


async def run_in_thread(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run `work` in a thread. A cancelled caller waits for the thread, which still writes to the shared segment."""
    working = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):  # a second cancellation; the first one is raised below
                await asyncio.wait([working])
        working.exception()  # retrieve it, so that asyncio does not log it
        raise


class PutStream(Exchange):
    """A running Put call for any number of images at the same time. Its leases end with the call.

    Every method raises the error of the call once the call has ended.
    """

    def __init__(self, call: Any, endpoint: str, max_images: int) -> None:
        super().__init__(call, endpoint)
        self._piece_bytes = 0
        self._free_indexes = list(range(max_images))[::-1]
        self._answers: dict[int, Answer] = {}
        self._segment: OutgoingSegment | None = None
        self._segment_lock = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._error: EncoderError | None = None
        self._leases: dict[int, PutImage] = {}
        self._background: set[asyncio.Task[Any]] = set()
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
        """Start a call. With the path of the server's `segment` and a `proof`, rows go through shared memory.

        Raises the error of the call if the server refuses it.
        """
        call = channel.stream_stream(
            PUT, request_serializer=_serialized, response_deserializer=pb.PutResponse.FromString
        )(metadata=metadata)
        stream = cls(call, endpoint, max_images)
        outgoing = OutgoingSegment.beside(segment) if proof else None
        try:
            opening = pb.PutOpen(caller=caller, producer=producer.to_message())
            if outgoing is not None:
                opening.segment, opening.shm_proof = outgoing.path, proof
            await stream._begin(opening, outgoing)
        except BaseException:  # also when cancelled: the caller gets no stream to close
            call.cancel()
            raise
        finally:
            if outgoing is not None:
                outgoing.unlink()
                if stream._segment is None:  # the server refused the segment or the call
                    outgoing.close()
        return stream

    def close(self) -> None:
        """End the call. The server releases its leases."""
        super().close()  # also ends the reading task and all pending writes
        self._end(UnavailableError("the Put call was closed"))

    async def name(self, images: Sequence[PutImage], width: int, dtype: str) -> list[PutAnswer]:
        """Name images together; return one answer per image, in order. Raises `OverloadedError` for too many images.

        If the caller is cancelled, the leases in the answers are given back.
        """
        naming = self._start_detached(self._name(images, width, dtype))
        try:
            return await asyncio.shield(naming)
        except asyncio.CancelledError:
            naming.add_done_callback(self._abandon_leases)
            raise

    async def put(self, answer: PutAnswer, rows: NDArray[np.generic]) -> PutAnswer:
        """Send the rows of an image that is `yours`; return the final answer, `held` or `failed`.

        If the caller is cancelled, the lease is given back, and this raises the cancellation once no thread reads the
        rows.
        """
        self._check_lease(answer)
        data = memoryview(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))  # type: ignore[arg-type]
        final = self._next_answer(answer.index)
        try:
            if not await self._put_shared(answer.index, data, final):
                await asyncio.shield(self._start_detached(self._put_inline(answer.index, data, final)))
            return self._put_answer(answer.image, answer.index, await final)
        except asyncio.CancelledError:
            final.cancel()  # stops sending
            self._start_detached(self._abandon(answer))
            raise

    async def abandon(self, answer: PutAnswer) -> None:
        """Give back the lease of an image that is `yours`, even if the caller is cancelled."""
        await asyncio.shield(self._start_detached(self._abandon(answer)))

    async def _abandon(self, answer: PutAnswer) -> None:
        self._check_lease(answer)
        final = self._next_answer(answer.index)
        await self._write_uncancelled(pb.PutRequest(end=pb.PutEnd(index=answer.index, abandoned=True)))
        self._put_answer(answer.image, answer.index, await final)

    def _check_lease(self, answer: PutAnswer) -> None:
        """Raise `InvalidRequestError` unless the call still holds this lease: its index may have been reused."""
        if answer.call != self.number or self._leases.get(answer.index) is not answer.image:
            raise InvalidRequestError(
                "rows may be sent once, and only for an image that was answered `yours`"
            )

    async def _name(self, images: Sequence[PutImage], width: int, dtype: str) -> list[PutAnswer]:
        if len(images) > len(self._free_indexes):
            raise OverloadedError(
                "this call has as many images in progress as the server allows: wait for answers"
            )
        indexes = [self._free_indexes.pop() for _ in images]
        pairs = list(zip(images, indexes, strict=True))
        answers = [self._next_answer(index) for index in indexes]
        names = [image.to_message(index, width, dtype) for image, index in pairs]
        await self._write_uncancelled(pb.PutRequest(names=pb.PutNames(names=names)))
        states = await asyncio.gather(*answers)
        return [self._put_answer(*pair, state) for pair, state in zip(pairs, states, strict=True)]

    async def _put_inline(self, index: int, data: memoryview, final: Answer) -> None:
        """Send rows inline. Stop if the image fails or its lease is given back. Must not be cancelled."""
        checksum = Checksum()
        for begin in range(0, len(data), self._piece_bytes):
            if final.done():
                return
            piece = data[begin : begin + self._piece_bytes]
            checksum.add(piece)
            await self._write_message(frame(index, [piece]))
        if not final.done():
            await self._write_message(pb.PutRequest(end=pb.PutEnd(index=index, checksum=checksum.value)))

    async def _put_shared(self, index: int, data: memoryview, final: Answer) -> bool:
        """Send rows through shared memory and wait for the answer. Return False without a segment or room in it."""
        if (segment := self._segment) is None:
            return False
        try:
            async with self._segment_lock:  # until the server answers, because the segment holds one image
                if not await run_in_thread(segment.reserve, len(data)):
                    return False
                await self._copy(segment, index, data, final)
                await asyncio.wait([final])
                return True
        finally:
            self._close_segment()

    async def _copy(self, segment: OutgoingSegment, index: int, data: memoryview, final: Answer) -> None:
        """Copy an image into the segment in pieces. The server copies a piece out while the next one is written."""
        checksum = Checksum()
        for begin in range(0, len(data), SHARED_BYTES):
            if final.done():
                return
            end = min(begin + SHARED_BYTES, len(data))
            extent = await run_in_thread(segment.write, data, begin, end, checksum)
            await self._write_uncancelled(pb.PutRequest(shared=pb.PutShared(index=index, extent=extent)))
        await self._write_uncancelled(pb.PutRequest(end=pb.PutEnd(index=index, checksum=checksum.value)))

    def _abandon_leases(self, naming: "asyncio.Future[list[PutAnswer]]") -> None:
        if not naming.cancelled() and naming.exception() is None:
            for answer in naming.result():
                if answer.state == "yours":
                    self._start_detached(self._abandon(answer))

    def _start_detached(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Start work that continues if its caller is cancelled. It ends with the call at the latest."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it, so that asyncio does not log it after the caller was cancelled

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
        self._reading = asyncio.create_task(self._read_answers(), name="put-answers")

    async def _read_answers(self) -> None:
        error: EncoderError = UnavailableError(f"{self._endpoint}: the Put call was cancelled")
        try:
            while True:
                state = (await self._read()).state
                # An answer that no caller awaits ends a lease. It is kept for the next caller.
                answer = self._next_answer(state.index)
                if not answer.done():
                    answer.set_result(state)
        except EncoderError as caught:
            error = caught
        finally:  # also after CancelledError, which gRPC raises here if the call was cancelled
            self._end(error)

    def _next_answer(self, index: int) -> Answer:
        """Return the next answer to an image, which may have arrived already."""
        if self._error is not None:
            raise self._error
        answer = self._answers.get(index)
        if answer is None or answer.cancelled():
            answer = self._answers[index] = asyncio.get_running_loop().create_future()
        return answer

    def _put_answer(self, image: PutImage, index: int, state: pb.PutState) -> PutAnswer:
        """Convert an answer, and update the lease of its image."""
        self._answers.pop(index, None)
        if state.holding == pb.HOLDING_YOURS:
            self._leases[index] = image
        else:
            self._leases.pop(index, None)
            self._free_indexes.append(index)
        error = from_message(state.error) if state.holding == pb.HOLDING_FAILED else None
        holding, lease_s = _STATES.get(state.holding, "failed"), state.lease_ms / 1000
        place = self._endpoint, self.number, index
        return PutAnswer(image, holding, state.address, lease_s, error, *place)  # type: ignore[arg-type]

    async def _write_uncancelled(self, message: pb.PutRequest) -> None:
        """Write a message completely even if the caller is cancelled, because cancelling a write would end the call."""
        await asyncio.shield(self._start_detached(self._write_message(message)))

    async def _write_message(self, message: pb.PutRequest | bytes) -> None:
        try:
            await self._write(message)
        except asyncio.CancelledError as error:  # the call was cancelled, not this task
            raise UnavailableError(f"{self._endpoint}: the Put call was cancelled") from error

    def _end(self, error: EncoderError) -> None:
        """Fail all callers that wait for an answer, because the call has ended."""
        self._error = self._error or error
        self._close_segment()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._error)
                answer.exception()  # retrieve it, so that asyncio does not log it after the caller was cancelled
        self._answers.clear()

    def _close_segment(self) -> None:
        """Close the segment if the call has ended. While the lock is held, leave that to its holder."""
        if self._segment is not None and self._error is not None and not self._segment_lock.locked():
            self._segment.close()


def _serialized(message: pb.PutRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
