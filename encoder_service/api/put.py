"""The images of one Put call: named, and stored when their rows have come, if this call holds their lease."""

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
from encoder_service.api.call_log import Call
from encoder_service.api.describe import ServerInfo
from encoder_service.api.exchange import Exchange
from encoder_service.api.inbound import Requests
from encoder_service.images import Lease, PutImage, PutLeases
from encoder_service.limits import TURN_BYTES, Caller, Hold, Turns
from encoder_service.store import Incoming, Store

# Separate threads: reading from a caller's file does not delay hashing or sending for others.
_copies = ThreadPoolExecutor(4, "from-segment")
# These read rows that have arrived, and never wait for a caller.
_checks = ThreadPoolExecutor(2, "check-rows")
# How often an idle call checks whether the server drains: engines keep theirs open, and a drain waits for them.
LOOK_S = 0.5
_HOLDINGS = {"held": pb.HOLDING_HELD, "yours": pb.HOLDING_YOURS, "wait": pb.HOLDING_WAIT}

MAX_OFFSET = 1 << 48  # no file is as long
LATE = "the lease ended before the rows had arrived"

PutMessage = pb.PutRequest | tuple[int, memoryview]


@dataclass(eq=False, slots=True)
class _Wanted:
    """An image for which this call holds the lease, and how much of it has arrived."""

    lease: Lease
    tokens: int
    incoming: Incoming | None = None
    working: "asyncio.Future[None] | None" = None  # a thread that reads or writes its rows
    held_bytes: int = 0


class PutCall(Exchange[PutMessage, pb.PutName, PutImage, _Wanted, pb.PutResponse]):
    """The images of one Put call: wanted while the call holds their lease, until their rows are in the store.

    An index may be used again once its image has had its last answer.
    """

    right = "put"

    def __init__(
        self,
        leases: PutLeases,
        store: Store,
        call: Call,
        requests: Requests[PutMessage],
        caller: Caller,
        info: ServerInfo,
        turns: Turns,
        *,
        producer: Producer,
        under_way: Hold,
        segment: int | None,
        is_draining: Callable[[], bool],
    ) -> None:
        """`under_way` is what the call holds of the bytes of rows that are not complete, of all callers together.

        `segment` is the open file through which rows may come; the call closes it. For `requests`, `caller`, `info` and
        `turns` see `Exchange`.
        """
        super().__init__(requests, caller, info, turns)
        self._leases = leases
        self._store = store
        self._call = call
        self._producer = producer
        self._under_way = under_way
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

    def _due(self) -> list[pb.PutResponse]:
        ended = [index for index, wanted in self._wanted.items() if not wanted.lease.open]
        answers = [self._fail(index, DeadlineError(LATE)) for index in ended]
        if self._is_draining() and not self._wanted and not answers:
            raise UnavailableError("the server is draining: use another server")
        return answers

    async def _next(self) -> PutMessage:
        """Wait until the next lease ends, or until it is time to look whether the server drains."""
        now = asyncio.get_running_loop().time()
        left_s = [max(wanted.lease.ends_at - now, 0) for wanted in self._wanted.values()]
        return await self._requests.within(min(left_s, default=LOOK_S))

    async def _answers_to(self, request: PutMessage) -> AsyncIterator[pb.PutResponse]:
        if isinstance(request, tuple):
            index, data = request
            await self._turns.take(self._caller.holder, 1 + len(data) // TURN_BYTES)
            # Not before our turn: a call that waits for it has one message here.
            await self._requests.begin_next()
            answers = await self._piece(index, partial(self._rows, data))
        elif (kind := request.WhichOneof("message")) == "names":
            async for answer in self._names(request.names.names):
                yield answer
            return
        elif kind == "shared":
            answers = await self._piece(request.shared.index, partial(self._rows, request.shared.extent))
        elif kind == "end":
            answers = await self._piece(request.end.index, partial(self._end, request.end))
        else:
            raise InvalidRequestError(
                "after `open`, a Put call may send only `names`, `rows`, `shared` and `end`"
            )
        for answer in answers:
            yield answer

    def _take_index(self, index: int) -> None:
        if index in self._wanted:
            raise InvalidRequestError(f"index {index} is in use: wait for the last answer for its image")
        if index >= (most := self._info.max_images):
            raise InvalidRequestError(f"index {index} must be below max_images_per_call = {most}")
        self._over.discard(index)

    def _image(self, name: pb.PutName) -> PutImage:
        ours = self._info.description
        if (name.width, name.dtype) != (ours.width, ours.dtype):
            raise InvalidRequestError(
                f"this server's row has {ours.width} {ours.dtype} elements, got {name.width} {name.dtype[:16]!r}"
            )
        return messages.put_image(self._producer, self._caller.salt, name)

    async def _look_up(self, images: Sequence[PutImage]) -> list[pb.PutResponse]:
        answers = []
        for image, answer in zip(images, await self._leases.ask(images, self._caller), strict=True):
            if isinstance(answer, EncoderError):
                answers.append(self._failure(image.index, answer))
                continue
            wait_s = answer.wait_s
            if answer.lease is not None:
                self._wanted[image.index] = _Wanted(answer.lease, self._info.geometry.tokens(image.grid))
                wait_s = self._leases.lease_s
            self._call.put(answer.holding)
            answers.append(self._state(image, answer.holding, round(wait_s * 1000)))
        return answers

    async def _rows(self, piece: memoryview | pb.Extent, wanted: _Wanted) -> pb.PutResponse | None:
        if (incoming := self._begun(wanted)) is None:
            return self._complete(wanted)
        if isinstance(piece, memoryview):
            incoming.add(piece)
        else:
            await self._read(wanted, incoming, piece)
        return None

    async def _end(self, end: pb.PutEnd, wanted: _Wanted) -> pb.PutResponse:
        if end.abandoned:
            raise AbandonedError("the caller abandoned the image")
        if (incoming := self._begun(wanted)) is not None:
            _require_open(wanted.lease)
            incoming.check(end.checksum)
            wanted.working = asyncio.get_running_loop().run_in_executor(_checks, incoming.check_finite)
            await asyncio.shield(wanted.working)
            _require_open(wanted.lease)
            incoming.commit(end.checksum).release()
        return self._complete(wanted)

    def _begun(self, wanted: _Wanted) -> Incoming | None:
        """Return where the rows go, once space is reserved for them; None if the store has got them otherwise.

        Raises `OverloadedError`, and `ImageLimitError` for rows that can never fit.
        """
        if wanted.incoming is None:
            size = wanted.tokens * self._info.row_bytes
            if size > self._under_way.most:
                raise ImageLimitError(
                    f"its rows have {size} bytes, but at most {self._under_way.most} may be on their way "
                    "into the store (half of --store-host-gib)"
                )
            self._under_way.resize(self._under_way.amount + size)
            wanted.held_bytes = size
            key, grid = wanted.lease.image.key, wanted.lease.image.grid
            wanted.incoming = self._store.receive(key.address, wanted.tokens, grid, self._caller.holder)
        return wanted.incoming

    async def _read(self, wanted: _Wanted, incoming: Incoming, extent: pb.Extent) -> None:
        """Copy a piece of rows out of the caller's file."""
        if self._segment is None or extent.offset > MAX_OFFSET:
            raise InvalidRequestError("the call opened no segment that holds rows at this offset")
        wanted.working = asyncio.get_running_loop().run_in_executor(
            _copies, _read_and_close, incoming, os.dup(self._segment), extent.offset, extent.length
        )
        await asyncio.shield(wanted.working)

    def _complete(self, wanted: _Wanted) -> pb.PutResponse:
        """Answer an image whose rows are in the store."""
        self._under_way.resize(self._under_way.amount - wanted.held_bytes)
        self._leases.kept(wanted.lease)
        self._call.put("kept", wanted.held_bytes)
        return self._state(wanted.lease.image, "held")

    def _dropped(self, wanted: _Wanted) -> None:
        if wanted.incoming is not None:
            _drop_unused(wanted.incoming, wanted.working)
        self._under_way.resize(self._under_way.amount - wanted.held_bytes)
        self._leases.give_up(wanted.lease)

    def _failed(self, index: int, error: EncoderError) -> pb.PutResponse:
        self._call.put("failed", error=error)
        message = messages.error_message(index, error)
        state = pb.PutState(index=index, holding=pb.HOLDING_FAILED, error=message)
        return pb.PutResponse(state=state)

    def _state(
        self, image: PutImage, holding: Literal["held", "yours", "wait"], lease_ms: int = 0
    ) -> pb.PutResponse:
        address = image.key.address
        state = pb.PutState(index=image.index, holding=_HOLDINGS[holding], address=address, lease_ms=lease_ms)
        return pb.PutResponse(state=state)


def _require_open(lease: Lease) -> None:
    if not lease.open:
        raise DeadlineError(LATE)


def _drop_unused(incoming: Incoming, working: "asyncio.Future[None] | None") -> None:
    """Drop rows, but not before the thread that works on them has ended: afterwards their pages may be reused."""
    if working is None or working.done():
        incoming.abandon()
    else:
        working.add_done_callback(lambda _: incoming.abandon())


def _read_and_close(incoming: Incoming, file: int, offset: int, length: int) -> None:
    try:
        incoming.read(file, offset, length)
    finally:
        os.close(file)
