"""One Fetch call: it sends the rows of each image as soon as they are ready. Each image has exactly one outcome.

`PinnedRows` are the rows that one call keeps pinned.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from encoder_contract.errors import EncoderError, InvalidRequestError, OverloadedError, UnknownImageError
from encoder_contract.fleet_key import FleetKey
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.describe import ServerInfo
from encoder_service.api.inbound import CallRecord
from encoder_service.cluster.cluster import Locations
from encoder_service.images import FetchResult, Images
from encoder_service.keys import ImageKey
from encoder_service.limits import TURN_BYTES, Budget, Caller, Turns, name_turns
from encoder_service.scheduler import Claim
from encoder_service.store import Pin

# How long an image waits for its caller's share of pinned bytes: longer than it takes to send rows or to read them in a
# forward pass, and as long as a writer waits for space in the store.
PIN_WAIT_S = 2.0


class PinnedRows:
    """The rows that one call keeps pinned: `places` images at a time, within its caller's share of pinned bytes.

    An image that a caller pins in several calls counts once.
    """

    def __init__(self, pinned_bytes: Budget, caller: Caller, places: int, row_bytes: int) -> None:
        self._budget = pinned_bytes
        self._caller = caller
        self._places = asyncio.Semaphore(places)
        self._row_bytes = row_bytes
        self._holds: set[ExitStack] = set()

    async def add(self, pin: Pin, pin_again: Callable[[], Awaitable[Pin]]) -> tuple[Pin, ExitStack]:
        """Take over `pin`; return a pin on its rows, and the hold to pass to `release`.

        Rows that must wait for a place are unpinned while they wait. `pin_again` then finds or encodes them once more.
        """
        address, size = pin.address, pin.tokens * self._row_bytes
        with ExitStack() as stack:
            fits_now = False
            if not self._places.locked():
                with suppress(OverloadedError):
                    stack.push(self._budget.hold(self._caller, size, once=address))
                    fits_now = True
            if not fits_now:
                pin.release()
            await self._places.acquire()
            stack.callback(self._places.release)
            if not fits_now:
                stack.push(await self._budget.hold_within(self._caller, size, PIN_WAIT_S, once=address))
                pin = await pin_again()
            stack.push(pin)
            hold = stack.pop_all()
        self._holds.add(hold)
        return pin, hold

    def release(self, hold: ExitStack) -> None:
        """Release the rows of one image."""
        hold.close()
        self._holds.discard(hold)

    def __len__(self) -> int:
        return len(self._holds)

    def close(self) -> None:
        """Release all."""
        for hold in self._holds:
            hold.close()


SOURCES = {
    "device": pb.SOURCE_DEVICE,
    "host": pb.SOURCE_HOST,
    "peer": pb.SOURCE_PEER,
    "encoded": pb.SOURCE_ENCODED,
}
# Images that a call which sends rows pins at a time: the one being sent, and the next one that is ready.
PINNED_AHEAD = 2


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One image of the call, with its claim for the scheduler. It has one window of rows for each time it is named.

    The rows of an image are found, awaited and pinned once, even if the call names it several times.
    """

    key: ImageKey
    claim: Claim
    windows: Sequence[pb.FetchImage]
    """Rows [row_begin, row_end), `row_end` 0 meaning all."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of one image: its rows, pinned until `hold` is closed, or its error; and how long that took."""

    request: RowRequest
    result: FetchResult | EncoderError
    wait_s: float
    hold: ExitStack = field(default_factory=ExitStack)

    def of_window(self, window: pb.FetchImage) -> FetchResult | EncoderError:
        """Return the outcome of one window of the image."""
        if isinstance(self.result, EncoderError):
            return self.result
        begin, end, tokens = window.row_begin, window.row_end, self.result.pin.tokens
        if begin < (end or tokens) <= tokens:
            return self.result
        return InvalidRequestError(
            f"the row window [{begin}, {end}) must lie within the image's {tokens} rows and not be empty"
        )


async def row_requests(
    request: pb.FetchRequest, caller: Caller, info: ServerInfo, turns: Turns
) -> list[RowRequest]:
    """Return the requests of a call, one for each image. A claim has the earliest time and chunk of its windows.

    Raises `InvalidRequestError` for an invalid name, an index that is used twice, and too few or too many images.
    """
    images = request.images
    if not 0 < len(images) <= info.max_images:
        raise InvalidRequestError(f"a Fetch call must name 1 to {info.max_images} images, got {len(images)}")
    if len({image.index for image in images}) < len(images):
        raise InvalidRequestError("two images of this call have the same index: give each name its own index")
    now = monotonic()
    named: dict[tuple[object, ...], list[pb.FetchImage]] = {}
    for image in images:  # grouped by name: comparing names is cheaper than computing addresses
        frames = None
        if image.HasField("frames"):
            grid = image.grid
            frames = image.frames.SerializeToString(deterministic=True), grid.t, grid.h, grid.w
        name = image.digest, image.variant.min_pixels, image.variant.max_pixels, frames
        named.setdefault(name, []).append(image)
    requests: list[RowRequest] = []
    for some, pieces in name_turns(list(named.values())):
        await turns.take(caller.holder, pieces)
        for windows in some:
            key = messages.image_key(info.recipe, windows[0], caller.salt)
            needed_at = now + min(window.needed_in_ms for window in windows) / 1000
            claim = caller.claim(min(window.chunk for window in windows), needed_at)
            requests.append(RowRequest(key, claim, windows))
    return requests


class FetchCall:
    """The state of one Fetch call: the images that it waits for, and the rows that it keeps pinned."""

    def __init__(
        self,
        message: pb.FetchRequest,
        requests: Sequence[RowRequest],
        images: Images,
        record: CallRecord,
        caller: Caller,
        info: ServerInfo,
        turns: Turns,
        pinned_bytes: Budget,
    ) -> None:
        """`requests` are the `row_requests` of `message`; `turns` keeps a large call from delaying others.

        Rows for a peer are signed with the fleet's key, if there is one.
        """
        self._requests = requests
        self._images = images
        self._record = record
        self._caller = caller
        self._info = info
        self._turns = turns
        self._fleet_key = info.identity.fleet_key if caller.is_peer else None
        self._grace_s = min(message.grace_ms, info.description.limits.max_grace_ms) / 1000
        self._local_only = message.local_only
        self._located: Mapping[bytes, Locations] = {}
        self._sender = info.transports.choose(message, is_local=caller.is_local)
        places = len(requests) if self._sender.holds else PINNED_AHEAD
        self._pinned = PinnedRows(pinned_bytes, caller, places, info.row_bytes)

    async def answers(self) -> AsyncGenerator[pb.FetchResponse | bytes]:
        """Yield the messages of the call; rows are already framed, as bytes.

        With a sender that holds rows, the call stays open and keeps them pinned until the caller ends it. With any
        other sender, only the rows that are sent next are pinned, however slowly the caller reads. When the call ends,
        it releases every pin and withdraws every claim.
        """
        if not self._local_only:
            self._located = await self._images.locate([request.key for request in self._requests])
        tasks: set[asyncio.Task[_Outcome]] = set()
        try:
            for some, pieces in name_turns(self._requests):
                await self._turns.take(self._caller.holder, pieces)
                tasks |= {asyncio.create_task(self._resolve(request)) for request in some}
            for resolved in asyncio.as_completed(tasks):
                outcome = await resolved
                is_held = False
                for window in outcome.request.windows:
                    result = outcome.of_window(window)
                    is_held |= self._sender.holds and not isinstance(result, EncoderError)
                    async with aclosing(self._messages(window, result, outcome.wait_s)) as answers:
                        async for message in answers:
                            yield message
                if not is_held:
                    self._pinned.release(outcome.hold)
            self._record.complete = True
            if self._pinned:
                # The caller reads the rows in place, and cancels when it is done.
                await asyncio.Event().wait()
        finally:
            await self._end(tasks)

    async def _readable_rows(self, request: RowRequest) -> FetchResult:
        """Return the rows of an image, in a tier that the sender reads."""
        await self._turns.take(self._caller.holder)
        found = await self._rows(request.key, request.claim)
        await self._sender.reach(found.pin)
        return found

    async def _rows(self, key: ImageKey, claim: Claim) -> FetchResult:
        """Return the rows of an image; with `local_only`, only if they are held or being encoded here."""
        if not self._local_only:
            return await self._images.rows(key, claim, self._caller, self._grace_s, self._located)
        if (found := await self._images.rows_here(key, claim)) is None:
            raise UnknownImageError(
                f"this replica neither holds nor encodes {key.named}, and the call is local_only: ask another replica"
            )
        return found

    async def _resolve(self, request: RowRequest) -> _Outcome:
        async def pin_again() -> Pin:
            return (await self._readable_rows(request)).pin

        began = monotonic()
        try:
            found = await self._readable_rows(request)
            wait_s = monotonic() - began
            pin, hold = await self._pinned.add(found.pin, pin_again)
        except Exception as error:  # noqa: BLE001 - only this image fails
            return _Outcome(request, self._images.known_error(error), monotonic() - began)
        return _Outcome(request, replace(found, pin=pin), wait_s, hold)

    async def _messages(
        self, window: pb.FetchImage, result: FetchResult | EncoderError, wait_s: float
    ) -> AsyncGenerator[pb.FetchResponse | bytes]:
        """Yield the outcome of one window: its error, or its rows."""
        if isinstance(result, EncoderError):
            self._record.fetched("failed", wait_s, {}, result)
            await self._turns.take(self._caller.holder)
            yield pb.FetchResponse(error=messages.error_message(window.index, result))
            return
        self._record.fetched(result.source, wait_s, result.stage_ms)
        began = monotonic()
        ready = _ready(window, result, self._info)
        await self._sender.prepare(ready, result.pin)
        if self._fleet_key is not None and not self._sender.holds:
            await _sign(ready, result.pin, self._fleet_key)
        message: pb.FetchResponse | bytes = pb.FetchResponse(ready=ready)
        for frame in self._sender.frames(ready, result.pin):
            await self._turns.take(self._caller.holder, _turn_pieces(message))
            yield message
            message = frame
        # Recorded before the last message is sent: once the caller has it, it may end the call at once.
        await self._turns.take(self._caller.holder, _turn_pieces(message))
        self._record.transferred(self._sender.sent_by(result.pin), ready.row_bytes, monotonic() - began)
        yield message

    async def _end(self, tasks: "set[asyncio.Task[_Outcome]]") -> None:
        running = [task for task in tasks if not task.done()]
        try:
            for some, pieces in name_turns(running):
                await self._turns.take(self._caller.holder, pieces)
                for task in some:
                    task.cancel()
                await asyncio.gather(*some, return_exceptions=True)
        finally:  # also if this call is cancelled again while its tasks end: no rows stay pinned
            for task in running:
                task.cancel()
            self._pinned.close()


async def _sign(ready: pb.ImageReady, pin: Pin, fleet_key: FleetKey) -> None:
    """Sign the rows for a peer if the window has all of them. Runs in a worker thread, as it takes milliseconds."""
    if (ready.row_begin, ready.row_end) == (0, pin.tokens):
        grid = pin.grid
        ready.signature = await asyncio.to_thread(fleet_key.sign_rows, ready.address, grid, pin.rows())


def _turn_pieces(message: pb.FetchResponse | bytes) -> int:
    return 1 + len(message) // TURN_BYTES if isinstance(message, bytes) else 1


def _ready(window: pb.FetchImage, found: FetchResult, info: ServerInfo) -> pb.ImageReady:
    pin = found.pin
    end = window.row_end or pin.tokens
    ready = pb.ImageReady(
        index=window.index,
        address=pin.address,
        grid=messages.grid_message(pin.grid),
        row_begin=window.row_begin,
        row_end=end,
        width=info.description.width,
        dtype=info.description.dtype,
        row_bytes=(end - window.row_begin) * info.row_bytes,
        source=SOURCES[found.source],
    )
    ready.stage_ms.update(found.stage_ms)
    ready.stage_began_s.update(found.stage_began_s)
    return ready
