"""One Fetch call: it sends the rows of each image as soon as they are ready. Each image has exactly one outcome.

`PinnedRows` are the rows that one call keeps pinned.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from encoder_contract.errors import EncoderError, InvalidRequestError, OverloadedError, UnknownImageError
from encoder_contract.fleet_key import FleetKey
from encoder_contract.framing import MESSAGE_BYTES
from encoder_contract.turns import Turns
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.describe import ServerInfo
from encoder_service.api.inbound import CallRecord
from encoder_service.cluster.cluster import Locations
from encoder_service.images import FetchResult, Images
from encoder_service.keys import ImageKey
from encoder_service.limits import (
    NAMES_AT_A_TIME,
    TURN_BYTES,
    TURN_NAMES,
    Budgets,
    Caller,
    Hold,
    name_turns,
)
from encoder_service.rows_port import Reader, Transfer
from encoder_service.scheduler import Claim
from encoder_service.store import Pin
from encoder_service.transport import Sender

# How long an image waits for its caller's share of pinned bytes: longer than it takes to send rows or to read them in a
# forward pass, and as long as a writer waits for space in the store.
PIN_WAIT_S = 2.0


@dataclass(eq=False, slots=True)
class HeldRows:
    """The pin on the rows of one image, with what it takes of its caller's shares."""

    pin: Pin
    room: Hold
    tickets: Hold | None = None
    """Of rows that are sent beside the call."""

    def release(self) -> None:
        """Release all. A second call does nothing."""
        self.pin.release()
        self.room.release()
        if self.tickets is not None:
            self.tickets.release()


class PinnedRows:
    """The rows that one call keeps pinned, within its caller's shares of two budgets.

    Rows that the caller reads in place are pinned until the call ends; rows that are sent, for a moment. The first
    leave room for the second. An image that a caller pins in several calls counts once.
    """

    def __init__(self, budgets: Budgets, caller: Caller, row_bytes: int) -> None:
        self._budgets = budgets
        self._caller = caller
        self._row_bytes = row_bytes
        self._held: set[HeldRows] = set()

    def lend(self, pin: Pin) -> HeldRows:
        """Take over `pin`, on rows to be read in place; return what to pass to `release`.

        If it raises `OverloadedError`, the caller of this method keeps the pin.
        """
        size = pin.tokens * self._row_bytes
        return self._keep(pin, self._budgets.lent_bytes.hold(self._caller, size, once=pin.address))

    def send_now(self, pin: Pin) -> HeldRows:
        """Take over `pin`, on rows to be sent, as `lend` does."""
        size = pin.tokens * self._row_bytes
        return self._keep(pin, self._budgets.pinned_bytes.hold(self._caller, size, once=pin.address))

    async def send(self, pin: Pin, pin_again: Callable[[], Awaitable[Pin]]) -> HeldRows:
        """As `send_now`, but wait for room.

        The rows are unpinned while they wait. `pin_again` then finds or encodes them once more.
        """
        with suppress(OverloadedError):
            return self.send_now(pin)
        address, size = pin.address, pin.tokens * self._row_bytes
        pin.release()
        room = await self._budgets.pinned_bytes.hold_within(self._caller, size, PIN_WAIT_S, once=address)
        try:
            pin = await pin_again()
        except BaseException:
            room.release()
            raise
        return self._keep(pin, room)

    def _keep(self, pin: Pin, room: Hold) -> HeldRows:
        held = HeldRows(pin, room)
        self._held.add(held)
        return held

    def release(self, held: HeldRows) -> None:
        """Release the rows of one image."""
        held.release()
        self._held.discard(held)

    def leave(self, held: HeldRows) -> None:
        """Leave the rows of one image to the caller of this method, who releases them."""
        self._held.discard(held)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Release all."""
        for held in self._held:
            held.release()


SOURCES = {
    "device": pb.SOURCE_DEVICE,
    "host": pb.SOURCE_HOST,
    "peer": pb.SOURCE_PEER,
    "encoded": pb.SOURCE_ENCODED,
}
# Images to send that a call pins at a time: the one being sent, and the next one that is ready.
PINNED_AHEAD = 2
# Windows of a call that are sent beside it at a time: a client has as many connections.
SENT_BESIDE = 4
# Windows of at most this size travel inside their announcement: copying them takes less than a message of their own.
INSIDE_BYTES = TURN_BYTES


def owed_messages(request: pb.FetchRequest, row_bytes: int) -> int:
    """Return how many messages a Fetch counts as, for rows of `row_bytes`. Each is one unit of work for the event loop.

    A window counts as a message. `TURN_NAMES` windows cost as much as one if they are known to travel inside
    announcements: windows of all rows are not, as an image may be of any size, nor those that may get a ticket.
    """
    windows = len(request.images)
    if not request.rows_inside or pb.TRANSPORT_TCP in request.transports:
        return windows
    inside = sum(
        bool(window.row_end) and (window.row_end - window.row_begin) * row_bytes <= INSIDE_BYTES
        for window in request.images
    )
    return windows - inside + math.ceil(inside / TURN_NAMES)


@dataclass(frozen=True, slots=True)
class RequestedImage:
    """One image of the call, with its claim for the scheduler. It has one window of rows for each time it is named.

    The rows of an image are found, awaited and pinned once, even if the call names it several times.
    """

    key: ImageKey
    claim: Claim
    windows: Sequence[pb.FetchImage]
    """Rows [row_begin, row_end), `row_end` 0 meaning all."""


@dataclass(slots=True)
class _Outcome:
    """The outcome of one image: its rows, pinned while `held` is set, or its error; and how long that took."""

    request: RequestedImage
    result: FetchResult | EncoderError
    wait_s: float
    held: HeldRows | None = None

    @property
    def pin(self) -> Pin:
        """The pin on its rows."""
        assert isinstance(self.result, FetchResult)
        return self.result.pin

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


@dataclass(slots=True)
class _FetchMessage:
    """Outcomes of windows that are sent together, and the rows that follow them in messages of their own."""

    response: pb.FetchResponse = field(default_factory=pb.FetchResponse)
    following: list[tuple[int, Iterable[bytes]]] = field(default_factory=list)
    """The messages of each window whose rows follow, and how many bytes of rows they have."""
    row_bytes: int = 0
    """Bytes of rows inside it and after it."""
    outcomes: int = 0
    """Number of windows."""

    def is_full(self, windows: int = 1) -> bool:
        """Return whether so many more may be too much for one message, or for one turn on the event loop."""
        return self.outcomes + windows > NAMES_AT_A_TIME or self.row_bytes > MESSAGE_BYTES - INSIDE_BYTES


class _Beside:
    """An image that is sent beside the call. It keeps the pin until no thread reads the rows any more."""

    def __init__(self, held: HeldRows, indexes: Iterable[int]) -> None:
        """`indexes` are those of its windows."""
        self._held = held
        self._unsent = {*indexes}
        self._reading = len(self._unsent)
        self.transfers: list[Transfer] = []

    def sent(self, index: int) -> bool:
        """Note that a window has no more bytes to send, or failed. Return whether that is now true of the image."""
        is_new = index in self._unsent
        self._unsent.discard(index)
        return is_new and not self._unsent

    def ended(self) -> bool:
        """Note that a transfer has ended. Release the rows with the last one, and return whether it is."""
        self._reading -= 1
        if not self._reading:
            self._held.release()
        return not self._reading


def windows_by_image(request: pb.FetchRequest, max_images: int) -> list[list[pb.FetchImage]]:
    """Return the windows of a call, those of each image together.

    Raises `InvalidRequestError` for an index that is used twice, and for too few or too many images.
    """
    images = request.images
    if not 0 < len(images) <= max_images:
        raise InvalidRequestError(f"a Fetch call must name 1 to {max_images} images, got {len(images)}")
    if len({image.index for image in images}) < len(images):
        raise InvalidRequestError("two images of this call have the same index: give each name its own index")
    named: dict[tuple[object, ...], list[pb.FetchImage]] = {}
    for image in images:  # grouped by name: comparing names is cheaper than computing addresses
        frames = None
        if image.HasField("frames"):
            grid = image.grid
            frames = image.frames.SerializeToString(deterministic=True), grid.t, grid.h, grid.w
        name = image.digest, image.variant.min_pixels, image.variant.max_pixels, frames
        named.setdefault(name, []).append(image)
    return list(named.values())


class FetchCall:
    """The state of one Fetch call: the images that it waits for, and the rows that it keeps pinned."""

    def __init__(
        self,
        message: pb.FetchRequest,
        images: Images,
        record: CallRecord,
        caller: Caller,
        info: ServerInfo,
        turns: Turns,
        budgets: Budgets,
        owed: Hold,
    ) -> None:
        """Raises as `windows_by_image` does. `turns` keeps a large call from delaying others.

        `owed` are the call's messages. It is released with the last: a caller that still reads in place owes none.
        Rows for a peer are signed with the fleet's key, if there is one.
        """
        self._began = monotonic()
        self._windows = windows_by_image(message, info.max_images)
        self._images = images
        self._record = record
        self._caller = caller
        self._info = info
        self._turns = turns
        self._owed = owed
        self._fleet_key = info.identity.fleet_key if caller.is_peer else None
        self._grace_s = min(message.grace_ms, info.description.limits.max_grace_ms) / 1000
        self._local_only = message.local_only
        self._rows_inside = message.rows_inside
        self._located: Mapping[bytes, Locations] = {}
        # The caller's first choice, and the sender of rows that cannot be read in place.
        self._sender, self._copier = info.transports.choose(message, is_local=caller.is_local)
        self._pinned = PinnedRows(budgets, caller, info.row_bytes)
        self._known: deque[_Outcome] = deque()  # errors, and rows that are read in place
        self._to_send: deque[_Outcome] = deque()  # rows that are sent; the first few are pinned
        self._pinned_ahead = 0
        self._beside: set[_Beside] = set()  # rows that are being sent beside the call
        self._tickets = budgets.tickets
        self._tickets_out = 0
        self._send_errors: list[pb.ImageError] = []  # those of them that failed
        self._left = len(self._windows)  # images that the caller may still lack
        self._changed = asyncio.Event()  # one of these has changed
        # How to leave the images that are being encoded here, by the request's identity, and tasks that find others.
        self._watched: dict[int, Callable[[], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def answers(self) -> AsyncGenerator[bytes]:
        """Yield the messages of the call, serialised.

        What is known at one moment is yielded together. If rows are read in place, the call stays open and keeps them
        pinned until the caller ends it. Of rows that are sent, only the next ones are pinned, however slowly the caller
        reads. When the call ends, it releases every pin and withdraws every claim. Raises `InvalidRequestError` for an
        invalid name.
        """
        try:
            elsewhere: list[RequestedImage] = []
            for some, units in name_turns(self._windows):
                await self._turns.take(self._caller.holder, units)
                requests = [self._request(windows) for windows in some]
                elsewhere += [each for each in requests if not (self._take_held(each) or self._watch(each))]
            if elsewhere:
                await self._seek(elsewhere)
            while self._left or self._beside or self._send_errors:
                if not (self._known or self._send_errors or self._may_send):
                    self._changed.clear()
                    await self._changed.wait()
                async with aclosing(self._messages()) as messages:
                    async for message in messages:
                        if units := len(message) // TURN_BYTES:  # an image's own unit pays for a small one
                            await self._turns.take(self._caller.holder, units)
                        yield message
            self._record.complete = True
            if self._pinned:
                # The caller reads the rows in place, and cancels when it is done.
                self._owed.release()
                await asyncio.Event().wait()
        finally:
            await self._end()

    @property
    def _may_send(self) -> bool:
        return bool(self._to_send) and self._tickets_out < SENT_BESIDE

    # Finding rows

    def _request(self, windows: Sequence[pb.FetchImage]) -> RequestedImage:
        """Return the request of an image. Its claim has the earliest time and chunk of the windows."""
        key = messages.image_key(self._info.recipe, windows[0], self._caller.salt)
        needed_at = self._began + min(window.needed_in_ms for window in windows) / 1000
        claim = self._caller.claim(min(window.chunk for window in windows), needed_at)
        return RequestedImage(key, claim, windows)

    async def _seek(self, requests: Sequence[RequestedImage]) -> None:
        """Begin to find images that are neither in memory here nor being encoded here."""
        if not self._local_only:
            self._located = await self._images.locate([request.key for request in requests])
        for some, units in name_turns(requests):
            await self._turns.take(self._caller.holder, units)
            self._tasks.update(asyncio.create_task(self._resolve(request)) for request in some)

    def _take_held(self, request: RequestedImage) -> bool:
        """Return whether the rows of an image are held, in a tier that the sender reads. They are known then."""
        if (found := self._images.held(request.key)) is None:
            return False
        if not self._sender.reaches(found.pin):
            found.pin.release()
            return False
        self._arrive(_Outcome(request, found, 0.0))
        return True

    def _watch(self, request: RequestedImage) -> bool:
        """Return whether an image is being encoded here, or is known to fail. Its outcome arrives then."""
        began = monotonic()

        def ended(result: FetchResult | EncoderError) -> None:
            del self._watched[id(request)]
            if isinstance(result, FetchResult) and not self._sender.reaches(result.pin):
                result.pin.release()
                self._tasks.add(asyncio.create_task(self._resolve(request)))
            else:
                self._arrive(_Outcome(request, result, monotonic() - began))

        try:
            leave = self._images.watch(request.key, request.claim, ended)
        except EncoderError as error:
            self._arrive(_Outcome(request, error, 0.0))
            return True
        if leave is not None:
            self._watched[id(request)] = leave
        return leave is not None

    async def _resolve(self, request: RequestedImage) -> None:
        began = monotonic()
        try:
            result: FetchResult | EncoderError = await self._readable_rows(request)
        except Exception as error:  # noqa: BLE001 - only this image fails
            result = self._images.known_error(error)
        self._arrive(_Outcome(request, result, monotonic() - began))

    async def _readable_rows(self, request: RequestedImage) -> FetchResult:
        """Return the rows of an image, in a tier that the sender reads."""
        await self._turns.take(self._caller.holder)
        found = await self._rows(request.key, request.claim)
        if not self._sender.reaches(found.pin):
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

    def _arrive(self, outcome: _Outcome) -> None:
        """Take over the outcome of an image, with its pin, and decide how its rows reach the caller."""
        self._changed.set()
        result = outcome.result
        if isinstance(result, EncoderError):
            self._known.append(outcome)
            return
        if result.stage_ms:  # it was encoded for the call
            self._record.stages(result.stage_began_s, result.stage_ms)
        if not self._sender.holds:
            self._send_later(outcome, result.pin)
        else:
            self._lend(outcome, result.pin)

    def _lend(self, outcome: _Outcome, pin: Pin) -> None:
        """Let the caller read rows in place, or send them if its share is used up.

        Calls that kept the rows they have, and waited for room for the others, could wait for each other.
        """
        try:
            outcome.held = self._pinned.lend(pin)
        except OverloadedError as error:
            if self._copier is not None:
                self._send_later(outcome, pin)
                return
            pin.release()
            outcome.result = error
        self._known.append(outcome)

    def _send_later(self, outcome: _Outcome, pin: Pin) -> None:
        """Send rows when it is their turn. They are unpinned until then, unless they are among the next ones."""
        assert self._copier is not None
        self._to_send.append(outcome)
        if self._pinned_ahead < PINNED_AHEAD and (self._copier is self._sender or self._copier.reaches(pin)):
            with suppress(OverloadedError):
                outcome.held = self._pinned.send_now(pin)
                self._pinned_ahead += 1
                return
        pin.release()

    # Answers

    async def _messages(self) -> AsyncGenerator[bytes]:
        """Yield what is known now in as few messages as possible. Nothing in a message waits for what is not known."""
        errors, self._send_errors = self._send_errors, []
        message = _FetchMessage(pb.FetchResponse(errors=errors), outcomes=len(errors))
        while self._known or self._may_send:
            if self._known:
                image = self._add_known(message, self._known.popleft())
            else:
                image = self._add_sent(message, self._to_send.popleft())
            async with aclosing(image) as pieces:
                async for piece in pieces:
                    yield piece
        for piece in self._pieces(message):
            yield piece

    async def _add_known(self, message: _FetchMessage, outcome: _Outcome) -> AsyncGenerator[bytes]:
        """Add handles of rows that the caller reads in place, or errors. Yield the messages that this fills."""
        await self._turns.take(self._caller.holder, 1 + len(outcome.request.windows) // TURN_NAMES)
        self._left -= 1
        is_lent = False
        for window in outcome.request.windows:
            for piece in self._pieces(message) if message.is_full() else ():
                yield piece
            began = monotonic()
            if (ready := await self._announced(message, window, outcome, self._sender)) is not None:
                is_lent = True
                used = self._sender.sent_by(outcome.pin)
                self._record.transferred(used, ready.row_bytes, monotonic() - began)
        if outcome.held is not None and not is_lent:
            self._pinned.release(outcome.held)

    async def _add_sent(self, message: _FetchMessage, outcome: _Outcome) -> AsyncGenerator[bytes]:
        """Add rows that are sent, or tickets, or errors. Yield the messages that this fills, and rows after them."""
        assert self._copier is not None
        if not self._pin_now(outcome):
            for piece in self._pieces(message):
                yield piece
            await self._pin_again(outcome)
        await self._turns.take(self._caller.holder, 1 + len(outcome.request.windows) // TURN_NAMES)
        if self._goes_beside(outcome):
            for piece in self._pieces(message) if message.is_full(len(outcome.request.windows)) else ():
                yield piece
            await self._offer(message, outcome)
            return
        self._left -= 1
        for window in outcome.request.windows:
            for piece in self._pieces(message) if message.is_full() else ():
                yield piece
            began = monotonic()
            if (ready := await self._announced(message, window, outcome, self._copier)) is not None:
                self._add_rows(message, ready, outcome.pin, began)
        for piece in self._pieces(message) if message.following else ():  # while the rows are pinned
            yield piece
        if outcome.held is not None:
            self._pinned.release(outcome.held)
            self._pinned_ahead -= 1

    def _add_rows(self, message: _FetchMessage, ready: pb.ImageReady, pin: Pin, began: float) -> None:
        """Put rows inside their announcement if they may be there, else after the message."""
        assert self._copier is not None
        message.row_bytes += ready.row_bytes
        if self._rows_inside and ready.row_bytes <= INSIDE_BYTES:
            ready.rows = b"".join(pin.rows(ready.row_begin, ready.row_end))
            self._record.transferred(pb.TRANSPORT_INLINE, ready.row_bytes, monotonic() - began)
        else:
            message.following.append((ready.row_bytes, self._copier.frames(ready, pin)))

    def _pieces(self, message: _FetchMessage) -> Iterator[bytes]:
        """Empty a message. Yield it, unless it was empty, and the rows that follow it."""
        if not message.outcomes:
            return
        piece, following = message.response.SerializeToString(), message.following
        message.response, message.following = pb.FetchResponse(), []
        message.row_bytes = message.outcomes = 0
        for row_bytes, frames in following:
            began = monotonic()
            for frame in frames:
                yield piece
                piece = frame
            # Recorded before the last message is sent: once the caller has it, it may end the call at once.
            self._record.transferred(pb.TRANSPORT_INLINE, row_bytes, monotonic() - began)
        yield piece

    def _goes_beside(self, outcome: _Outcome) -> bool:
        """Return whether rows are sent beside the call. Its holder has a ticket for each window then.

        Each ticket may take a connection, and the kernel's memory for what its reader does not read.
        """
        assert self._copier is not None
        windows = outcome.request.windows
        if self._copier.transport != pb.TRANSPORT_TCP or outcome.held is None or len(windows) > SENT_BESIDE:
            return False
        with suppress(OverloadedError):
            outcome.held.tickets = self._tickets.hold(self._caller, len(windows))
            return True
        return False

    def _pin_now(self, outcome: _Outcome) -> bool:
        """Pin rows that are to be sent, if they are not pinned. Return False if that takes time."""
        if outcome.held is not None or isinstance(outcome.result, EncoderError):
            return True
        assert self._copier is not None
        if (found := self._images.held(outcome.request.key, again=True)) is None:
            return False
        if self._copier.reaches(found.pin):
            with suppress(OverloadedError):
                self._pinned_as(outcome, self._pinned.send_now(found.pin))
                return True
        found.pin.release()
        return False

    async def _pin_again(self, outcome: _Outcome) -> None:
        """Pin rows that are to be sent, or set the error."""

        async def pin() -> Pin:
            found = await self._rows(outcome.request.key, outcome.request.claim)
            assert self._copier is not None
            if not self._copier.reaches(found.pin):
                await self._copier.reach(found.pin)
            return found.pin

        try:
            self._pinned_as(outcome, await self._pinned.send(await pin(), pin))
        except Exception as error:  # noqa: BLE001 - only this image fails
            outcome.result = self._images.known_error(error)

    def _pinned_as(self, outcome: _Outcome, held: HeldRows) -> None:
        assert isinstance(outcome.result, FetchResult)
        outcome.result, outcome.held = replace(outcome.result, pin=held.pin), held
        self._pinned_ahead += 1

    async def _announced(
        self, message: _FetchMessage, window: pb.FetchImage, outcome: _Outcome, sender: Sender
    ) -> pb.ImageReady | None:
        """Add the outcome of a window to a message. Return its announcement, without rows; None for an error."""
        result = outcome.of_window(window)
        message.outcomes += 1
        if isinstance(result, EncoderError):
            message.response.errors.append(self._failed(window.index, outcome.wait_s, result))
            return None
        self._record.fetched(result.source, outcome.wait_s, result.stage_ms)
        ready = _add_ready(message.response, window, result, self._info)
        await sender.prepare(ready, result.pin)
        if self._fleet_key is not None:
            await _sign(ready, result.pin, self._fleet_key)
        return ready

    async def _offer(self, message: _FetchMessage, outcome: _Outcome) -> None:
        """Begin to send an image beside the call. Add its tickets, or its errors, to a message."""
        assert self._copier is not None
        announced = [
            await self._announced(message, window, outcome, self._copier)
            for window in outcome.request.windows
        ]
        offered = [ready for ready in announced if ready is not None]
        held = outcome.held
        assert held is not None
        self._pinned_ahead -= 1
        if not offered:
            self._left -= 1
            self._pinned.release(held)
            return
        self._pinned.leave(held)
        beside = _Beside(held, (ready.index for ready in offered))
        self._beside.add(beside)
        for ready in offered:
            self._send_beside(beside, ready, held.pin)

    def _send_beside(self, beside: _Beside, ready: pb.ImageReady, pin: Pin) -> None:
        assert self._copier is not None
        began = monotonic()
        # The transfer must not keep the announcement: it would keep its whole message, with the rows of other windows.
        index, row_bytes = ready.index, ready.row_bytes

        def sent() -> None:
            """Record it before the last bytes are sent: once the caller has them, it may end the call at once."""
            self._record.transferred(pb.TRANSPORT_TCP, row_bytes, monotonic() - began)
            self._sent_beside(beside, index)

        def ended(transfer: "asyncio.Future[EncoderError | None]") -> None:
            self._tickets_out -= 1
            if (error := transfer.result()) is not None:
                self._send_errors.append(self._failed(index, 0.0, error))
                self._sent_beside(beside, index)
            if beside.ended():
                self._beside.discard(beside)
            self._changed.set()

        reader = Reader(self._caller.holder, self._caller.certificate_names)
        transfer = self._copier.offer(ready, pin, reader, sent)
        assert transfer is not None
        self._tickets_out += 1
        beside.transfers.append(transfer)
        transfer.ended.add_done_callback(ended)

    def _sent_beside(self, beside: _Beside, index: int) -> None:
        if beside.sent(index):
            self._left -= 1
            self._record.complete = not self._left

    def _failed(self, index: int, wait_s: float, error: EncoderError) -> pb.ImageError:
        self._record.fetched("failed", wait_s, {}, error)
        return messages.error_message(index, error)

    async def _end(self) -> None:
        for leave in self._watched.values():
            leave()
        transfers = [transfer for beside in self._beside for transfer in beside.transfers]
        for transfer in transfers:
            transfer.withdraw()
        running = [task for task in self._tasks if not task.done()]
        try:
            if transfers:  # a thread may still read the rows, for a millisecond
                await asyncio.wait([transfer.ended for transfer in transfers])
            for some, units in name_turns(running) if running else ():
                await self._turns.take(self._caller.holder, units)
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


def _add_ready(
    response: pb.FetchResponse, window: pb.FetchImage, found: FetchResult, info: ServerInfo
) -> pb.ImageReady:
    """Announce a window of the rows that were found."""
    held = found.pin.entry
    end = window.row_end or held.tokens
    ready = response.ready.add(
        index=window.index,
        address=held.address,
        grid=messages.grid_message(held.grid),
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
