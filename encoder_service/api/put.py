"""The images of one Put call: named, then stored when their rows have arrived, if the call holds their lease."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from encoder_contract.errors import (
    AbandonedError,
    DeadlineError,
    EncoderError,
    ImageLimitError,
    InvalidRequestError,
    UnavailableError,
)
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.describe import ServerInfo
from encoder_service.api.exchange import Exchange
from encoder_service.api.inbound import CallRecord, Requests
from encoder_service.images import Lease, PutImage, PutLeases
from encoder_service.limits import TURN_BYTES, Caller, Hold, Turns
from encoder_service.store import Incoming, Store

# Separate threads, so that reading from a caller's file does not delay hashing or sending for others.
_copies = ThreadPoolExecutor(4, "from-segment")
# These check rows that have arrived; they never wait for a caller.
_checks = ThreadPoolExecutor(2, "check-rows")
# How often an idle call checks for a drain: engines keep their Put call open, and a drain waits for open calls.
DRAIN_CHECK_S = 0.5
_HOLDINGS = {"held": pb.HOLDING_HELD, "yours": pb.HOLDING_YOURS, "wait": pb.HOLDING_WAIT}

MAX_OFFSET = 1 << 48  # larger than any file

PutMessage = pb.PutRequest | tuple[int, memoryview]


@dataclass(eq=False, slots=True)
class _Wanted:
    """An image for which this call holds the lease, and how much of it has arrived."""

    lease: Lease
    tokens: int
    incoming: Incoming | None = None
    task: "asyncio.Future[None] | None" = None  # in a thread that reads or writes the rows
    held_bytes: int = 0


class PutCall(Exchange[PutMessage, pb.PutName, PutImage, _Wanted, pb.PutResponse]):
    """The images of one Put call. An image is wanted while the call holds its lease, until its rows are in the store.

    An index may be used again after the last answer to its image.
    """

    right = "put"

    def __init__(
        self,
        leases: PutLeases,
        store: Store,
        record: CallRecord,
        requests: Requests[PutMessage],
        caller: Caller,
        info: ServerInfo,
        turns: Turns,
        *,
        producer: Producer,
        hold: Hold,
        segment: int | None,
        is_draining: Callable[[], bool],
    ) -> None:
        """`hold` is the call's part of the bytes of incomplete rows that all callers share.

        `segment` is the open file from which rows may be read; the call closes it. For `requests`, `caller`, `info` and
        `turns` see `Exchange`.
        """
        super().__init__(requests, caller, info, turns)
        self._leases = leases
        self._store = store
        self._record = record
        self._producer = producer
        self._hold = hold
        self._segment = segment
        self._is_draining = is_draining

    def opened(self) -> pb.PutResponse:
        """Return the answer to the call's first message."""
        opened = pb.PutOpened(
            lease_ms=round(self._leases.lease_s * 1000),
            shm=self._segment is not None,
            max_message_bytes=messages.PUT_PIECE_BYTES,
        )
        return pb.PutResponse(opened=opened)

    def close(self) -> None:
        """Drop images that are not complete, and release their leases."""
        super().close()
        if self._segment is not None:
            os.close(self._segment)

    def _unprompted_answers(self) -> list[pb.PutResponse]:
        ended = [index for index, wanted in self._wanted.items() if not wanted.lease.open]
        answers = [self._fail(index, self._lease_ended()) for index in ended]
        if self._is_draining() and not self._wanted and not answers:
            raise UnavailableError("the server is draining: use another server")
        return answers

    async def _next_request(self) -> PutMessage:
        now = asyncio.get_running_loop().time()
        left_s = [max(wanted.lease.ends_at - now, 0) for wanted in self._wanted.values()]
        return await self._requests.next_within(min(left_s, default=DRAIN_CHECK_S))

    async def _handle(self, request: PutMessage) -> AsyncIterator[pb.PutResponse]:
        if isinstance(request, tuple):
            index, data = request
            await self._turns.take(self._caller.holder, 1 + len(data) // TURN_BYTES)
            # Only after our turn, so that a waiting call has at most one message in memory.
            await self._requests.read_ahead()
            answers = await self._handle_piece(index, partial(self._receive, data))
        elif (kind := request.WhichOneof("message")) == "names":
            async for answer in self._handle_names(request.names.names):
                yield answer
            return
        elif kind == "shared":
            answers = await self._handle_piece(
                request.shared.index, partial(self._receive, request.shared.extent)
            )
        elif kind == "end":
            answers = await self._handle_piece(request.end.index, partial(self._end, request.end))
        else:
            raise InvalidRequestError(
                f"after `open`, a Put call may send only `names`, `rows`, `shared` and `end`, got "
                f"{kind or 'an empty message'}"
            )
        for answer in answers:
            yield answer

    def _reserve_index(self, index: int) -> None:
        if index in self._wanted:
            raise InvalidRequestError(
                f"index {index} is in use: wait for the last answer to its image, or use another"
            )
        if index >= (most := self._info.max_images):
            raise InvalidRequestError(f"index {index} must be less than max_images_per_call = {most}")
        self._finished.discard(index)

    def _parse_name(self, name: pb.PutName) -> PutImage:
        ours = self._info.description
        if (name.width, name.dtype) != (ours.width, ours.dtype):
            raise InvalidRequestError(
                f"this server's rows have {ours.width} elements of {ours.dtype}, got {name.width} of "
                f"{name.dtype[:16]!r}: put rows of the model that this server serves"
            )
        return messages.put_image(self._producer, self._caller.salt, name)

    async def _look_up(self, images: Sequence[PutImage]) -> list[pb.PutResponse]:
        answers = []
        for image, answer in zip(images, await self._leases.acquire(images, self._caller), strict=True):
            if isinstance(answer, EncoderError):
                answers.append(self._refuse(image.index, answer))
                continue
            wait_s = answer.wait_s
            if answer.lease is not None:
                self._wanted[image.index] = _Wanted(answer.lease, self._info.geometry.tokens(image.grid))
                wait_s = self._leases.lease_s
            self._record.put(answer.holding)
            answers.append(self._state(image, answer.holding, round(wait_s * 1000)))
        return answers

    async def _receive(self, piece: memoryview | pb.Extent, wanted: _Wanted) -> pb.PutResponse | None:
        if (incoming := self._reserve(wanted)) is None:
            return self._complete(wanted)
        if isinstance(piece, memoryview):
            incoming.add(piece)
        else:
            await self._read(wanted, incoming, piece)
        return None

    async def _end(self, end: pb.PutEnd, wanted: _Wanted) -> pb.PutResponse:
        if end.abandoned:
            raise AbandonedError("the caller abandoned the image: name it again to put it")
        if (incoming := self._reserve(wanted)) is not None:
            self._require_open(wanted.lease)
            incoming.check(end.checksum)
            wanted.task = asyncio.get_running_loop().run_in_executor(_checks, incoming.check_finite)
            await asyncio.shield(wanted.task)
            self._require_open(wanted.lease)
            incoming.commit(end.checksum).release()
        return self._complete(wanted)

    def _reserve(self, wanted: _Wanted) -> Incoming | None:
        """Reserve space for the rows and return where they go; None if the store has the rows by now.

        Raises `OverloadedError`, and `ImageLimitError` for rows that can never fit.
        """
        if wanted.incoming is None:
            size = wanted.tokens * self._info.row_bytes
            if size > self._hold.most:
                raise ImageLimitError(
                    f"the image's rows have {size} bytes, but all incomplete rows together may have at most "
                    f"{self._hold.most} (half of --store-host-gib): put smaller images, or enlarge the store"
                )
            self._hold.resize(self._hold.amount + size)
            wanted.held_bytes = size
            key, grid = wanted.lease.image.key, wanted.lease.image.grid
            wanted.incoming = self._store.receive(key.address, wanted.tokens, grid, self._caller.holder)
        return wanted.incoming

    async def _read(self, wanted: _Wanted, incoming: Incoming, extent: pb.Extent) -> None:
        """Copy a piece of rows from the caller's file."""
        if self._segment is None:
            raise InvalidRequestError(
                "the server opened no segment for this call (`shm` is false): send rows inline"
            )
        if extent.offset > MAX_OFFSET:
            raise InvalidRequestError(f"offset {extent.offset} of the extent is not inside the segment")
        wanted.task = asyncio.get_running_loop().run_in_executor(
            _copies, _read_and_close, incoming, os.dup(self._segment), extent.offset, extent.length
        )
        await asyncio.shield(wanted.task)

    def _require_open(self, lease: Lease) -> None:
        if not lease.open:
            raise self._lease_ended()

    def _lease_ended(self) -> DeadlineError:
        lease_s = self._leases.lease_s
        return DeadlineError(
            f"the lease ended after {lease_s:g} s, before the rows were complete: name the image again"
        )

    def _complete(self, wanted: _Wanted) -> pb.PutResponse:
        """Return the answer to an image whose rows are in the store."""
        self._hold.resize(self._hold.amount - wanted.held_bytes)
        self._leases.complete(wanted.lease)
        self._record.put("kept", wanted.held_bytes)
        return self._state(wanted.lease.image, "held")

    def _release(self, wanted: _Wanted) -> None:
        if wanted.incoming is not None:
            _abandon_after(wanted.task, wanted.incoming)
        self._hold.resize(self._hold.amount - wanted.held_bytes)
        self._leases.give_up(wanted.lease)

    def _failure_answer(self, index: int, error: EncoderError) -> pb.PutResponse:
        self._record.put("failed", error=error)
        message = messages.error_message(index, error)
        state = pb.PutState(index=index, holding=pb.HOLDING_FAILED, error=message)
        return pb.PutResponse(state=state)

    def _state(
        self, image: PutImage, holding: Literal["held", "yours", "wait"], lease_ms: int = 0
    ) -> pb.PutResponse:
        address = image.key.address
        state = pb.PutState(index=image.index, holding=_HOLDINGS[holding], address=address, lease_ms=lease_ms)
        return pb.PutResponse(state=state)


def _abandon_after(task: "asyncio.Future[None] | None", incoming: Incoming) -> None:
    """Abandon rows after the thread that works on them has ended, as their pages may then be reused."""
    if task is None or task.done():
        incoming.abandon()
    else:
        task.add_done_callback(lambda _: incoming.abandon())


def _read_and_close(incoming: Incoming, file: int, offset: int, length: int) -> None:
    try:
        incoming.read(file, offset, length)
    finally:
        os.close(file)
