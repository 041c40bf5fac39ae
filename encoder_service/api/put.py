"""One Put call: names are answered at once; rows are accepted only for images whose lease this call holds."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from encoder_contract.errors import (
    AbandonedError,
    DeadlineError,
    EncoderError,
    ImageLimitError,
    InvalidRequestError,
    UnavailableError,
)
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.call_log import Call
from encoder_service.api.fetch import RowFormat
from encoder_service.api.inbound import Requests
from encoder_service.images import Lease, PutAnswer, PutImage, PutLeases
from encoder_service.limits import TURN_BYTES, Caller, Hold, Turns, name_turns
from encoder_service.logs import known_error
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


@dataclass(frozen=True, slots=True)
class PutRoom:
    """What all Put calls share: the leases, the store, and the turns."""

    leases: PutLeases
    store: Store
    rows: RowFormat
    turns: Turns
    is_draining: Callable[[], bool]


@dataclass(eq=False, slots=True)
class _Expected:
    """An image for which this call holds the lease, and how much of it has arrived."""

    lease: Lease
    tokens: int
    incoming: Incoming | None = None
    working: "asyncio.Future[None] | None" = None  # a thread that reads or writes its rows
    held_bytes: int = 0


class PutCall:
    """The state of one Put call. Iterate over `answers` once; `close` it in any case."""

    def __init__(
        self,
        room: PutRoom,
        caller: Caller,
        call: Call,
        *,
        under_way: Hold,
        new_image: Callable[[pb.PutName], PutImage],
        tokens: Callable[[Grid], int],
        max_images: int,
        segment: int | None,
        check_caller: Callable[[], None],
    ) -> None:
        """`under_way` is what the call holds of the bytes of rows that are not complete, of all callers together.

        `segment` is the open file through which rows may come; the call closes it.

        `check_caller` raises when the caller may no longer put; it is asked before each list of names.
        """
        self._room = room
        self._caller = caller
        self._call = call
        self._under_way = under_way
        self._new_image = new_image
        self._tokens = tokens
        self._max_images = max_images
        self._segment = segment
        self._check_caller = check_caller
        self._expected: dict[int, _Expected] = {}
        self._late: set[int] = set()  # they have their last answer, but more of their rows may be on the way

    async def answers(self, requests: Requests[PutMessage]) -> AsyncIterator[pb.PutResponse]:
        """Yield an answer for every name, and one more for every image whose rows arrived, or will not arrive."""
        opened = pb.PutOpened(
            lease_ms=round(self._room.leases.lease_s * 1000),
            shm=self._segment is not None,
            max_message_bytes=messages.PUT_PIECE_BYTES,
        )
        yield pb.PutResponse(opened=opened)
        while True:
            for answer in self._ended():
                yield answer
            if self._room.is_draining() and not self._expected:
                raise UnavailableError("the server is draining: use another server")
            try:
                request = await requests.within(self._patience_s())
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return
            for answer in await self._answers_to(request, requests):
                yield answer

    def close(self) -> None:
        """Drop images that are not complete, and release their leases."""
        for index in tuple(self._expected):
            self._drop(index)
        if self._segment is not None:
            os.close(self._segment)

    async def _answers_to(self, request: PutMessage, requests: Requests[PutMessage]) -> list[pb.PutResponse]:
        if isinstance(request, tuple):
            index, data = request
            await self._room.turns.take(self._caller.holder, 1 + len(data) // TURN_BYTES)
            await requests.begin_next()  # not before our turn: a call that waits for it has one message here
            return await self._piece(index, data)
        kind = request.WhichOneof("message")
        if kind == "names":
            self._check_caller()
            return await self._names(request.names.names)
        if kind == "shared":
            return await self._piece(request.shared.index, request.shared.extent)
        if kind == "end":
            return await self._end(request.end)
        raise InvalidRequestError(
            "after `open`, a Put call may send only `names`, `rows`, `shared` and `end`"
        )

    def _patience_s(self) -> float:
        """Return how long until there may be something to answer: the next lease ends, or the server drains."""
        now = asyncio.get_running_loop().time()
        return min((max(each.lease.ends_at - now, 0) for each in self._expected.values()), default=LOOK_S)

    def _ended(self) -> list[pb.PutResponse]:
        """Answer images whose lease has ended."""
        ended = [index for index, each in self._expected.items() if not each.lease.open]
        return [self._fail(index, DeadlineError(LATE)) for index in ended]

    async def _names(self, names: Sequence[pb.PutName]) -> list[pb.PutResponse]:
        answers: list[pb.PutResponse] = []
        named: set[int] = set()
        for some, pieces in name_turns(names):
            await self._room.turns.take(self._caller.holder, pieces)
            answers += await self._answers_to_names(some, named)
        return answers

    async def _answers_to_names(self, names: Sequence[pb.PutName], named: set[int]) -> list[pb.PutResponse]:
        answers: list[pb.PutResponse] = []
        images: dict[int, PutImage] = {}
        for name in names:
            self._check_index(name.index, named)
            try:
                self._check_row(name)
                images[name.index] = self._new_image(name)
            except InvalidRequestError as error:
                answers.append(self._refused(name.index, error))
        known = await self._room.leases.ask(list(images.values()), self._caller)
        for (index, image), answer in zip(images.items(), known, strict=True):
            answers.append(self._answer_name(index, image, answer))
        return answers

    def _check_index(self, index: int, named: set[int]) -> None:
        if index in self._expected or index in named:
            raise InvalidRequestError(f"index {index} is in use: wait for the last answer for its image")
        if index >= self._max_images:
            raise InvalidRequestError(f"index {index} must be below max_images_per_call = {self._max_images}")
        named.add(index)
        self._late.discard(index)

    def _check_row(self, name: pb.PutName) -> None:
        rows = self._room.rows
        if (name.width, name.dtype) != (rows.width, rows.dtype):
            raise InvalidRequestError(
                f"this server's row has {rows.width} {rows.dtype} elements, got {name.width} {name.dtype[:16]!r}"
            )

    def _answer_name(self, index: int, image: PutImage, answer: PutAnswer | EncoderError) -> pb.PutResponse:
        if isinstance(answer, EncoderError):
            return self._refused(index, answer)
        wait_s = answer.wait_s
        if answer.lease is not None:
            self._expected[index] = _Expected(answer.lease, self._tokens(image.grid))
            wait_s = self._room.leases.lease_s
        self._call.put(answer.holding)
        return self._state(index, answer.holding, image.key.address, round(wait_s * 1000))

    async def _piece(self, index: int, piece: memoryview | pb.Extent) -> list[pb.PutResponse]:
        if (expected := self._expected_at(index)) is None:
            return []
        try:
            if (incoming := self._begun(expected)) is None:
                return [self._complete(index, expected)]
            if isinstance(piece, memoryview):
                incoming.add(piece)
            else:
                await self._read(expected, incoming, piece)
        except Exception as error:  # noqa: BLE001 - one image's failure is that image's answer
            return [self._fail(index, error)]
        return []

    async def _end(self, end: pb.PutEnd) -> list[pb.PutResponse]:
        if (expected := self._expected_at(end.index)) is None:
            return []
        if end.abandoned:
            return [self._fail(end.index, AbandonedError("the caller abandoned the image"))]
        try:
            if (incoming := self._begun(expected)) is not None:
                _require_open(expected.lease)
                incoming.check(end.checksum)
                expected.working = asyncio.get_running_loop().run_in_executor(_checks, incoming.check_finite)
                await asyncio.shield(expected.working)
                _require_open(expected.lease)
                incoming.complete(end.checksum).release()
        except Exception as error:  # noqa: BLE001 - one image's failure is that image's answer
            return [self._fail(end.index, error)]
        return [self._complete(end.index, expected)]

    def _expected_at(self, index: int) -> _Expected | None:
        """Return the image that the rows belong to; None if it has had its last answer, and they were on their way."""
        if index not in self._expected and index not in self._late:
            raise InvalidRequestError(f"image {index}: this call holds no lease")
        return self._expected.get(index)

    def _begun(self, expected: _Expected) -> Incoming | None:
        """Return where the rows go, once space is reserved for them; None if the store has got them otherwise.

        Raises `OverloadedError`, and `ImageLimitError` for rows that can never fit.
        """
        if expected.incoming is None:
            size = expected.tokens * self._room.rows.row_bytes
            if size > self._under_way.most:
                raise ImageLimitError(
                    f"its rows have {size} bytes, but at most {self._under_way.most} may be on their way "
                    "into the store (half of --store-host-gib)"
                )
            self._under_way.resize(self._under_way.amount + size)
            expected.held_bytes = size
            key, grid = expected.lease.image.key, expected.lease.image.grid
            expected.incoming = self._room.store.receive(
                key.address, expected.tokens, grid, self._caller.holder
            )
        return expected.incoming

    async def _read(self, expected: _Expected, incoming: Incoming, extent: pb.Extent) -> None:
        """Copy a piece of rows out of the caller's file."""
        if self._segment is None or extent.offset > MAX_OFFSET:
            raise InvalidRequestError("the call opened no segment that holds rows at this offset")
        expected.working = asyncio.get_running_loop().run_in_executor(
            _copies, _read_and_close, incoming, os.dup(self._segment), extent.offset, extent.length
        )
        await asyncio.shield(expected.working)

    def _complete(self, index: int, expected: _Expected) -> pb.PutResponse:
        """Answer an image whose rows are in the store."""
        del self._expected[index]
        self._late.add(index)
        self._under_way.resize(self._under_way.amount - expected.held_bytes)
        self._room.leases.kept(expected.lease)
        self._call.put("kept", expected.held_bytes)
        return self._state(index, "held", expected.lease.image.key.address)

    def _fail(self, index: int, error: Exception) -> pb.PutResponse:
        """Drop an image; more of its rows may be on their way."""
        self._drop(index)
        self._late.add(index)
        return self._refused(index, known_error(error))

    def _refused(self, index: int, error: EncoderError) -> pb.PutResponse:
        self._call.put("failed", error=error)
        message = messages.error_message(index, error)
        state = pb.PutState(index=index, holding=pb.HOLDING_FAILED, error=message)
        return pb.PutResponse(state=state)

    def _drop(self, index: int) -> None:
        expected = self._expected.pop(index)
        if expected.incoming is not None:
            _drop_unused(expected.incoming, expected.working)
        self._under_way.resize(self._under_way.amount - expected.held_bytes)
        self._room.leases.give_up(expected.lease)

    def _state(
        self, index: int, holding: Literal["held", "yours", "wait"], address: bytes, lease_ms: int = 0
    ) -> pb.PutResponse:
        state = pb.PutState(index=index, holding=_HOLDINGS[holding], address=address, lease_ms=lease_ms)
        return pb.PutResponse(state=state)


def _require_open(lease: Lease) -> None:
    if not lease.open:
        raise DeadlineError(LATE)


def _drop_unused(incoming: Incoming, working: "asyncio.Future[None] | None") -> None:
    """Drop rows, but not before the thread that works on them has ended: afterwards their pages may be reused."""
    if working is None or working.done():
        incoming.drop()
    else:
        working.add_done_callback(lambda _: incoming.drop())


def _read_and_close(incoming: Incoming, file: int, offset: int, length: int) -> None:
    try:
        incoming.read(file, offset, length)
    finally:
        os.close(file)
