"""One Fetch call: rows of each image as soon as they are ready, each in exactly one outcome."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from encoder_contract.errors import EncoderError, InvalidRequestError, UnknownImageError
from encoder_contract.framing import frame_rows
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service import wire
from encoder_service.address import ImageRef
from encoder_service.calls import Call
from encoder_service.encoder import Encoder, Found
from encoder_service.incidents import known_error
from encoder_service.scheduler import Claim
from encoder_service.store import Pin

SOURCES = {
    "device": pb.SOURCE_DEVICE,
    "host": pb.SOURCE_HOST,
    "peer": pb.SOURCE_PEER,
    "encoded": pb.SOURCE_ENCODED,
}
CHECKSUM_ON_LOOP_BYTES = 4 << 20  # XXH3 does this in 0.2 ms; more goes to a worker thread


@dataclass(frozen=True, slots=True)
class Wanted:
    """One image of the call: its rows [begin, end), end 0 meaning all, and what the scheduler is told."""

    index: int
    image: ImageRef
    begin: int
    end: int
    claim: Claim


RowsOf = Callable[[Wanted], Awaitable[Found]]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What a row is on this server."""

    width: int
    dtype: str
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    wanted: Wanted
    found: Found | None = None
    error: EncoderError | None = None


async def rows_anywhere(encoder: Encoder, images: Sequence[Wanted], grace_s: float) -> RowsOf:
    """Return what finds rows here or elsewhere; asks at once, for all images together, who else holds them."""
    located = await encoder.locate([wanted.image for wanted in images])
    return lambda wanted: encoder.rows(wanted.image, wanted.claim, grace_s, located)


def rows_of_this_replica(encoder: Encoder) -> RowsOf:
    """Return what finds rows that are held or being made here; anything else is unknown."""

    async def rows_of(wanted: Wanted) -> Found:
        found = await encoder.rows_here(wanted.image, wanted.claim)
        if found is None:
            raise UnknownImageError(f"this replica does not hold image {wanted.image.digest.hex()}")
        return found

    return rows_of


async def fetch(
    rows_of: RowsOf,
    images: Sequence[Wanted],
    call: Call,
    *,
    use_handles: bool,
    rows: RowFormat,
) -> AsyncGenerator[pb.FetchResponse | bytes]:
    """Yield the messages of a Fetch call; rows come hand-framed, as bytes.

    With `use_handles` the rows stay in shared memory and the call stays open, holding them, until the caller ends
    it. Whatever ends the call releases every pin and withdraws every claim.
    """
    pins: list[Pin] = []
    tasks = {asyncio.create_task(_resolve(rows_of, wanted, pins, call)) for wanted in images}
    try:
        for ready in asyncio.as_completed(tasks):
            outcome = await ready
            if outcome.found is None:
                assert outcome.error is not None
                yield pb.FetchResponse(error=wire.error_message(outcome.wanted.index, outcome.error))
            elif use_handles:
                began = monotonic()
                handed = _handle_message(outcome, rows)
                call.transferred("shm", handed.ready.row_bytes, monotonic() - began)
                yield handed
            else:
                async for message in _inline(outcome, rows, call):
                    yield message
                outcome.found.pin.release()
        call.complete = True
        if use_handles and pins:
            await asyncio.Event().wait()  # until the caller cancels: it is reading
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pin in pins:
            pin.release()


async def _resolve(rows_of: RowsOf, wanted: Wanted, pins: list[Pin], call: Call) -> _Outcome:
    began = monotonic()
    try:
        found = await rows_of(wanted)
        pin = found.pin
        pins.append(pin)
        if not (wanted.begin < (wanted.end or pin.tokens) <= pin.tokens):
            raise InvalidRequestError(
                f"row window [{wanted.begin}, {wanted.end}) is not inside the {pin.tokens} rows of the image"
            )
    except Exception as error:  # noqa: BLE001 - one image's failure is that image's outcome
        known = known_error(error)
        call.fetched("failed", monotonic() - began, {}, known)
        return _Outcome(wanted, error=known)
    call.fetched(found.source, monotonic() - began, found.job.stage_ms if found.job else {})
    return _Outcome(wanted, found)


def _ready(outcome: _Outcome, rows: RowFormat) -> pb.ImageReady:
    wanted, found = outcome.wanted, outcome.found
    assert found is not None
    pin = found.pin
    end = wanted.end or pin.tokens
    ready = pb.ImageReady(
        index=wanted.index,
        address=pin.address,
        grid=wire.grid_message(pin.grid),
        row_begin=wanted.begin,
        row_end=end,
        width=rows.width,
        dtype=rows.dtype,
        row_bytes=(end - wanted.begin) * rows.row_bytes,
        source=SOURCES[found.source],
    )
    if found.job is not None:
        ready.stage_ms.update(found.job.stage_ms)
        ready.stage_began_s.update(found.job.stage_began_s)
    return ready


async def _inline(outcome: _Outcome, rows: RowFormat, call: Call) -> AsyncIterator[pb.FetchResponse | bytes]:
    assert outcome.found is not None
    ready, pin = _ready(outcome, rows), outcome.found.pin
    began = monotonic()
    views = pin.rows(ready.row_begin, ready.row_end)
    window = (ready.row_begin, ready.row_end)
    if ready.row_bytes <= CHECKSUM_ON_LOOP_BYTES or (pin.checksum_known and window == (0, pin.tokens)):
        ready.checksum = pin.checksum(*window)
    else:
        ready.checksum = await asyncio.to_thread(pin.checksum, *window)
    yield pb.FetchResponse(ready=ready)
    for message in frame_rows(ready.index, views):
        yield message
    call.transferred("inline", ready.row_bytes, monotonic() - began)


def _handle_message(outcome: _Outcome, rows: RowFormat) -> pb.FetchResponse:
    assert outcome.found is not None
    ready, pin = _ready(outcome, rows), outcome.found.pin
    ready.handle.CopyFrom(pin.handle(ready.row_begin, ready.row_end).to_message())
    return pb.FetchResponse(ready=ready)
