"""One Fetch call: rows of each image as soon as they are ready, each in exactly one outcome."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import monotonic

from encoder_contract.errors import EncoderError, InvalidRequestError, UnknownImageError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.address import ImageKey
from encoder_service.api import messages
from encoder_service.api.call_log import Call
from encoder_service.api.pin_budget import PinRoom
from encoder_service.engine.row_finder import FetchResult, RowFinder
from encoder_service.observability.incidents import known_error
from encoder_service.scheduler import Claim
from encoder_service.scheduler.turns import Turns
from encoder_service.store import Pin
from encoder_service.transport import Sender

SOURCES = {
    "device": pb.SOURCE_DEVICE,
    "host": pb.SOURCE_HOST,
    "peer": pb.SOURCE_PEER,
    "encoded": pb.SOURCE_ENCODED,
}
# Images that are pinned at a time by a call that sends them: the one being sent, and one that is ready after it.
PINNED_AHEAD = 2


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One image of the call: its rows [begin, end), end 0 meaning all, and what the scheduler is told."""

    index: int
    key: ImageKey
    begin: int
    end: int
    claim: Claim


RowsOf = Callable[[RowRequest], Awaitable[FetchResult]]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What a row is on this server."""

    width: int
    dtype: str
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    wanted: RowRequest
    found: FetchResult | None = None
    error: EncoderError | None = None
    hold: ExitStack = field(default_factory=ExitStack)  # closed, it lets go of the rows


async def rows_anywhere(finder: RowFinder, images: Sequence[RowRequest], grace_s: float) -> RowsOf:
    """Return what finds rows here or elsewhere; asks at once, for all images together, who else holds them."""
    located = await finder.locate([wanted.key for wanted in images])
    return lambda wanted: finder.rows(wanted.key, wanted.claim, grace_s, located)


def rows_of_this_replica(finder: RowFinder) -> RowsOf:
    """Return what finds rows that are held or being made here; anything else is unknown."""

    async def rows_of(wanted: RowRequest) -> FetchResult:
        found = await finder.rows_here(wanted.key, wanted.claim)
        if found is None:
            raise UnknownImageError(f"this replica does not hold image {wanted.key.digest.hex()}")
        return found

    return rows_of


async def fetch(
    rows_of: RowsOf,
    images: Sequence[RowRequest],
    call: Call,
    *,
    sender: Sender,
    rows: RowFormat,
    pin_room: PinRoom,
    turns: Turns,
) -> AsyncGenerator[pb.FetchResponse | bytes]:
    """Yield the messages of a Fetch call; rows come hand-framed, as bytes.

    With a `sender` that holds rows, the call stays open, holding them, until the caller ends it; else what is not
    about to be sent is not pinned, however long the caller takes. Whatever ends the call releases every pin and
    withdraws every claim. `turns` keeps a call of hundreds of images from holding up the calls of others.
    """

    async def rows_in_reach(wanted: RowRequest) -> FetchResult:
        await turns.take(wanted.claim.client_id)
        found = await rows_of(wanted)
        await sender.reach(found.pin)
        return found

    holds = _Holds(rows_in_reach, len(images) if sender.holds else PINNED_AHEAD, pin_room, rows.row_bytes)
    tasks = {asyncio.create_task(_resolve(rows_in_reach, wanted, holds, call)) for wanted in images}
    try:
        for resolved in asyncio.as_completed(tasks):
            outcome = await resolved
            if outcome.found is None:
                assert outcome.error is not None
                yield pb.FetchResponse(error=messages.error_message(outcome.wanted.index, outcome.error))
                continue
            began = monotonic()
            ready = _ready(outcome.wanted, outcome.found, rows)
            await sender.prepare(ready, outcome.found.pin)
            message: pb.FetchResponse | bytes = pb.FetchResponse(ready=ready)
            for frame in sender.frames(ready, outcome.found.pin):
                yield message
                message = frame
            # Before the last message, as whoever has that may end the call at once.
            call.transferred(sender.transport, ready.row_bytes, monotonic() - began)
            yield message
            if not sender.holds:
                outcome.hold.close()
        call.complete = True
        if sender.holds and holds:
            await asyncio.Event().wait()  # until the caller cancels: it is reading
    finally:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # whoever cancels once more, while they end, keeps no rows pinned by that
            holds.close()


class _Holds:
    """The rows that one call keeps pinned: `places` images at a time, each within its client's room for pins."""

    def __init__(self, rows_of: RowsOf, places: int, room: PinRoom, row_bytes: int) -> None:
        self._rows_of = rows_of
        self._places = asyncio.Semaphore(places)
        self._room = room
        self._row_bytes = row_bytes
        self._held: list[ExitStack] = []

    async def keep(self, wanted: RowRequest, pin: Pin) -> tuple[Pin, ExitStack]:
        """Return a pin on rows that were found, and what lets go of them.

        What has to wait for its place is not pinned meanwhile: evicted by then, it is found again, or made again.
        """
        counted = (wanted.claim.client_id, pin.address, pin.tokens * self._row_bytes)
        at_once = not self._places.locked() and self._room.taken_at_once(*counted)
        if not at_once:
            pin.release()
        with ExitStack() as hold:
            await self._places.acquire()
            hold.callback(self._places.release)
            if not at_once:
                await self._room.take(*counted)
            hold.callback(self._room.give_back, *counted)
            if not at_once:
                pin = (await self._rows_of(wanted)).pin
            hold.push(pin)
            kept = hold.pop_all()
        self._held.append(kept)
        return pin, kept

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Let go of all."""
        for hold in self._held:
            hold.close()


async def _resolve(rows_of: RowsOf, wanted: RowRequest, holds: _Holds, call: Call) -> _Outcome:
    began = monotonic()
    try:
        found = await rows_of(wanted)
        wait_s = monotonic() - began
        _check_window(wanted, found.pin)
        pin, hold = await holds.keep(wanted, found.pin)
    except Exception as error:  # noqa: BLE001 - one image's failure is that image's outcome
        known = known_error(error)
        call.fetched("failed", monotonic() - began, {}, known)
        return _Outcome(wanted, error=known)
    call.fetched(found.source, wait_s, found.stage_ms)
    return _Outcome(wanted, replace(found, pin=pin), hold=hold)


def _check_window(wanted: RowRequest, pin: Pin) -> None:
    if not (wanted.begin < (wanted.end or pin.tokens) <= pin.tokens):
        tokens = pin.tokens
        pin.release()
        raise InvalidRequestError(
            f"row window [{wanted.begin}, {wanted.end}) is not inside the {tokens} rows of the image"
        )


def _ready(wanted: RowRequest, found: FetchResult, rows: RowFormat) -> pb.ImageReady:
    pin = found.pin
    end = wanted.end or pin.tokens
    ready = pb.ImageReady(
        index=wanted.index,
        address=pin.address,
        grid=messages.grid_message(pin.grid),
        row_begin=wanted.begin,
        row_end=end,
        width=rows.width,
        dtype=rows.dtype,
        row_bytes=(end - wanted.begin) * rows.row_bytes,
        source=SOURCES[found.source],
    )
    ready.stage_ms.update(found.stage_ms)
    ready.stage_began_s.update(found.stage_began_s)
    return ready
