"""The images of one Submit call: named, uploaded if the server needs their bytes, and queued.

`Uploads` reserves space before a file is sent or parsed, and releases it when its bytes stop arriving.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TypeAlias

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    ImageLimitError,
    InvalidRequestError,
    OverloadedError,
    UnknownImageError,
)
from encoder_contract.turns import Turns
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.describe import ServerInfo
from encoder_service.api.inbound import CallRecord, Requests
from encoder_service.api.messages import RawSubmit
from encoder_service.image.source import VideoFile
from encoder_service.images import Images, KeepingCall, LookupResult, SubmittedImage
from encoder_service.limits import REFUSAL_S, TURN_BYTES, Caller, Hold, name_turns
from encoder_service.logs import known_error
from encoder_service.scheduler import Claim

# A slower upload counts as stalled: an occasional byte must not keep space reserved that other callers wait for.
MIN_BYTES_PER_S = 64 << 10


Found: TypeAlias = tuple[int, SubmittedImage | None, LookupResult | EncoderError]
"""The caller's index of an image, the image (None if its name is invalid), and what is known of it."""


class Upload:
    """The pieces of one image, or of the file of a video, in order."""

    def __init__(self, max_bytes: int, limit: str, *, is_video: bool = False) -> None:
        """`limit` is the name of `max_bytes` in error messages."""
        self.max_bytes = max_bytes
        self.limit = limit
        self.size = 0
        self.is_video = is_video
        self.video: VideoFile | None = None
        """The file of a video. Created with its first piece, as it takes a file descriptor."""
        self._pieces: list[bytes] = []
        self._began = monotonic()

    @property
    def seconds(self) -> float:
        """Time since the image was named."""
        return monotonic() - self._began

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        if self.is_video:
            self.video = self.video or VideoFile()
            self.video.add(piece)
        else:
            self._pieces.append(piece)
        self.size += len(piece)

    def joined(self) -> bytes:
        """Return the whole image."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


class Uploads:
    """The incomplete uploads of one call, by the caller's index.

    The call reserves space for the largest of them, which is enough to send one after another. A caller that
    interleaves images may use more if there is space, up to the size of the largest image allowed, or of one message.
    """

    def __init__(
        self, hold: Hold, *, max_image_bytes: int, max_video_bytes: int, message_bytes: int, idle_s: float
    ) -> None:
        """`hold` is the part of the call in the upload bytes of all callers. A message has at most `message_bytes`."""
        self._message_bytes = message_bytes
        self._hold = hold
        most = hold.room.size
        # By whether the file is a video.
        self._max_bytes = {False: min(max_image_bytes, most), True: min(max_video_bytes, most)}
        self._idle_s = idle_s
        self._uploads: dict[int, Upload] = {}
        self._arrived_bytes = 0  # of all of them
        self.idle_left_s = idle_s
        """How much longer to wait for the next piece."""

    def admit(self, size_bytes: int) -> None:
        """Reserve space for the files in a message, until `settle`. Raises `OverloadedError`."""
        self._hold.resize(max(self._hold.amount, self._arrived_bytes + size_bytes))

    def settle(self) -> None:
        """Release the space that incomplete files do not need."""
        largest = max((upload.max_bytes for upload in self._uploads.values()), default=0)
        self._hold.resize(max(largest, self._arrived_bytes))

    def make_room(self, size_bytes: int, *, is_video: bool) -> tuple[int, str]:
        """Reserve space for a file, until `settle`; return the limit on its size and the name of that limit.

        Size 0 is unknown. Raises `ImageLimitError` and `OverloadedError`.
        """
        max_bytes, limit = self._max_bytes[is_video], "max_video_bytes" if is_video else "max_image_bytes"
        if size_bytes > max_bytes:
            raise ImageLimitError(
                f"the file has {size_bytes} bytes, which is larger than {limit} = {max_bytes}: send a smaller one"
            )
        self._hold.resize(max(self._hold.amount, size_bytes or max_bytes))
        return max_bytes, limit

    def reserve(self, index: int, size_bytes: int, *, is_video: bool = False) -> None:
        """Reserve space for an image or a video; size 0 is unknown. Raises `ImageLimitError` and `OverloadedError`."""
        max_bytes, limit = self.make_room(size_bytes, is_video=is_video)
        if not self._uploads:
            self.idle_left_s = self._idle_s
        if 0 < size_bytes < max_bytes:
            max_bytes, limit = size_bytes, "the size_bytes of its name"
        self._uploads[index] = Upload(max_bytes, limit, is_video=is_video)

    def of(self, index: int) -> Upload:
        """Return the upload of an image."""
        return self._uploads[index]

    def add(self, index: int, piece: bytes) -> None:
        """Append a piece. Raises as `reserve` does, before the piece is stored."""
        upload, size = self._uploads[index], len(piece)
        if upload.size + size > upload.max_bytes:
            raise ImageLimitError(
                f"the file is larger than {upload.limit} = {upload.max_bytes}: at least {upload.size + size} bytes"
            )
        total = size + self._arrived_bytes
        any_video = any(other.is_video for other in self._uploads.values())
        if upload.is_video and any(other.video for other in self._uploads.values() if other is not upload):
            raise ImageLimitError("the call sends two videos at the same time: send one after another")
        if total > (max_bytes := max(self._max_bytes[any_video], self._message_bytes)):
            limit = "max_video_bytes" if any_video else "max_image_bytes"
            raise ImageLimitError(
                f"the call's incomplete images have {total} bytes in all, more than {limit} = {max_bytes}: "
                "send images one after another"
            )
        self._hold.resize(max(self._hold.amount, total))
        self.idle_left_s = min(self.idle_left_s + size / MIN_BYTES_PER_S, self._idle_s)
        upload.add(piece)
        self._arrived_bytes = total

    def release(self, index: int) -> None:
        """Forget a complete or failed image, and release the space that the others do not need."""
        self._arrived_bytes -= self._uploads.pop(index).size
        self.settle()


class SubmitCall:
    """The images of one Submit call. An image is awaited while the server lacks its file, then queued.

    Kept images are awaited again when a Fetch needs their files. If several frames of one video need its file, the
    first of them is awaited, and the others are answered when the file has arrived.

    A failed image fails alone. The call fails only if the caller violates the contract or loses its rights.
    Iterate over `answers` once; always `close` the call.
    """

    def __init__(
        self,
        images: Images,
        uploads: Uploads,
        record: CallRecord,
        requests: Requests[RawSubmit],
        caller: Caller,
        info: ServerInfo,
        turns: Turns,
    ) -> None:
        """`requests` are those after the first; `turns` keeps a call with hundreds of names from delaying others."""
        self._images = images
        self._uploads = uploads
        self._record = record
        self._requests = requests
        self._caller = caller
        self._info = info
        self._turns = turns
        self._is_last = False  # no more names follow
        self._awaited: dict[int, SubmittedImage] = {}  # by the caller's index
        # Indexes of all images named so far. Their pieces are ignored unless the image is awaited: they were in transit
        # when it failed, or came along with the name of an image that is known.
        self._named: set[int] = set()
        self._refused_any = False  # since the last `_pause`
        self._claims: dict[int, Claim] = {}  # by index
        self._keeping = KeepingCall()
        # Of the message that is being answered.
        self._keeps_names = self._all_or_none = self._known_only = False
        self._kept: dict[bytes, SubmittedImage] = {}  # by address
        # Frames that wait for the file of an awaited video, by the video's key.
        self._waiting_frames: dict[bytes, list[SubmittedImage]] = {}
        self._file_errors: dict[bytes, EncoderError] = {}  # by the key of the rejected file

    async def answers(self, first: RawSubmit) -> AsyncGenerator[pb.SubmitResponse]:
        """Yield an answer for every name, and one more for every image whose file was awaited.

        Raises `InvalidRequestError` if the caller ended the call too early.
        """
        message: RawSubmit | None = first
        while True:
            if message is not None:
                async for states in self._handle(message):
                    if states:
                        yield self._answer_with(states)
            if (self._kept or self._awaited) and (states := self._unasked()):
                yield self._answer_with(states)
            if self._has_answered_all:
                self._record.complete = True
                return
            message = None
            try:
                message = await self._next_message()
            except TimeoutError:
                continue
            except StopAsyncIteration:
                break
        # The caller half-closed or cancelled, and both look the same here. One more message, even an empty one, tells
        # them apart: sending it fails if the caller has cancelled.
        yield self._response(self._end_uploads())
        if not self._is_last and not self._kept:
            raise InvalidRequestError(
                "the call ended without a message that is `last`: its images do not stay submitted"
            )
        self._record.complete = True

    @property
    def _has_answered_all(self) -> bool:
        return self._is_last and not self._awaited and not self._kept

    def _answer_with(self, states: Sequence[pb.ImageState]) -> pb.SubmitResponse:
        # Recorded before it is sent: once the caller has the last answer, it may end the call at once.
        self._record.complete = self._has_answered_all
        return self._response(states)

    def _response(self, states: Sequence[pb.ImageState]) -> pb.SubmitResponse:
        return pb.SubmitResponse(states=states, patches_per_s=self._images.patches_per_s)

    def close(self) -> None:
        """Drop incomplete uploads and, unless the call is complete, the images that only this call wants."""
        ended_normally = bool(self._kept) and not self._awaited
        for index in tuple(self._awaited):
            self._drop(index)
        for address in self._kept:
            self._images.unsubmitted.release(address, self._keeping)
        if not self._record.complete:
            for claim in self._claims.values():
                self._images.withdraw(claim)
            # A caller that ends a call with kept images no longer wants them: this is not a failure.
            self._record.complete = ended_normally

    # Messages

    async def _next_message(self) -> RawSubmit:
        kept_needed = self._keeping.changed if self._kept else None
        if not self._awaited:
            return await self._requests.next_within(None, kept_needed)
        began = monotonic()
        try:
            return await self._requests.next_within(max(self._uploads.idle_left_s, 0.0), kept_needed)
        finally:  # only this wait counts as the caller's idle time, not our work on a piece
            self._uploads.idle_left_s -= monotonic() - began

    async def _handle(self, message: RawSubmit) -> AsyncIterator[list[pb.ImageState]]:
        """Yield the answers to a message, those of a few names at a time."""
        request = self._parse(message)
        if request.HasField("names"):
            self._info.identity.check_again("submit", self._caller)
            self._keeps_names, self._all_or_none = request.names.kept, request.names.all_or_nothing
            self._known_only = request.names.known_only
        files, pieces = _files_and_pieces(request) if request.bytes else ({}, [])
        units_of_files = sum(map(len, files.values())) // TURN_BYTES
        together: list[Found] = []
        states: list[pb.ImageState] = []  # the next answers; the last ones are known to be the last
        for some, units in name_turns(request.names.names):
            if states:
                yield states
            await self._turns.take(self._caller.holder, units + units_of_files)
            units_of_files = 0
            found = await self._find(some)
            if self._all_or_none:
                together += found
            else:
                states = await self._answer_found(found, files)
        if together:
            states = await self._answer_found(self._all_or_nothing(together), files)
        if pieces:
            states += await self._answer_pieces(pieces)
        if message.file_bytes or self._all_or_none:  # others reserve what their files need
            self._uploads.settle()
        self._is_last |= request.last
        yield states

    def _parse(self, message: RawSubmit) -> pb.SubmitRequest:
        """Return the message: without the files of new names, if there is no space for them."""
        if message.open is not None:
            raise InvalidRequestError("`open` may come only in the first message of a call")
        try:
            if message.file_bytes:
                self._uploads.admit(message.file_bytes)
        except OverloadedError:
            return message.parsed(with_files=bool(self._awaited))
        return message.parsed()

    # Names

    async def _find(self, names: Sequence[pb.ImageName]) -> list[Found]:
        """Return the images of these names, and what is known of them. An invalid name has an error and no image."""
        images: list[SubmittedImage] = []
        invalid: list[Found] = []
        for name in names:
            self._reserve_index(name.index)
            try:
                images.append(self._image(name))
            except InvalidRequestError as error:
                # Without its traceback, which refers to this frame, which refers to the error.
                invalid.append((name.index, None, error.with_traceback(None)))
        return [*invalid, *await self._look_up(images)]

    async def _answer_found(self, found: Sequence[Found], files: Mapping[int, bytes]) -> list[pb.ImageState]:
        """Return the answers to images, some of whose files came along with their names."""
        states = self._answers(found, files)
        if arrived := self._awaited.keys() & files.keys():
            states += await self._receive_files(
                [(image, files[index]) for index, image, _ in found if image is not None and index in arrived]
            )
        if self._refused_any:
            await self._pause()
        return states

    def _all_or_nothing(self, found: Sequence[Found]) -> list[Found]:
        """Return what was found, or one refusal of all these images, if there is no room for all of them."""
        refusals = [known for *_, known in found if isinstance(known, OverloadedError)]
        by_queue = bool(refusals)
        try:
            for _, image, known in found:
                if image is not None and isinstance(known, LookupResult) and known.needs_bytes:
                    with suppress(ImageLimitError):  # that image fails alone
                        self._uploads.make_room(image.size_bytes, is_video=image.file_is_video)
        except OverloadedError as error:
            refusals.append(error.with_traceback(None))
        if not refusals:
            return list(found)
        images = [image for _, image, _ in found if image is not None]
        refusal = max(refusals, key=lambda refusal: refusal.retry_after_ms)
        withdrawn = self._images.withdraw_all(images, refusal, by_queue=by_queue)
        return [(index, image, known if _is_at_fault(known) else withdrawn) for index, image, known in found]

    def _reserve_index(self, index: int) -> None:
        if index in self._named:
            raise InvalidRequestError(
                f"index {index} is used twice in this call: give each image its own index"
            )
        if len(self._named) >= (most := self._info.max_images):
            raise InvalidRequestError(
                f"the call names more than max_images_per_call = {most} images: begin another call for the rest"
            )
        self._named.add(index)

    def _image(self, name: pb.ImageName) -> SubmittedImage:
        key = messages.image_key(self._info.recipe, name, self._caller.salt)
        grid = messages.claimed_grid(name)
        claim = self._claim(name.index)
        return SubmittedImage(name.index, key, grid, name.size_bytes, claim, name.video, self._known_only)

    def _claim(self, index: int) -> Claim:
        """Return a new claim on an image. It replaces the earlier claim, which ended with the rows or a failure."""
        if (before := self._claims.get(index)) is not None:
            self._images.withdraw(before)
        claim = self._claims[index] = self._caller.claim(reserves=self._all_or_none)
        return claim

    async def _look_up(self, images: Sequence[SubmittedImage]) -> list[Found]:
        known_only = any(image.known_only for image in images)  # then all are, as they are named together
        looked = await (self._images.lookup_known if known_only else self._images.lookup)(images)
        return [(image.index, image, known) for image, known in zip(images, looked, strict=True)]

    def _answers(self, found: Sequence[Found], files: Mapping[int, bytes]) -> list[pb.ImageState]:
        states: list[pb.ImageState] = []
        for index, image, known in found:
            if isinstance(known, EncoderError):
                states.append(self._refuse(index, known))
                continue
            assert image is not None, "an image is known"
            states += self._answer(image, known, files.get(index))
            if self._keeps_names and not image.is_video:
                self._kept[image.key.address] = image
                self._images.unsubmitted.keep(image.key.address, self._keeping)
        return states

    def _answer(
        self, image: SubmittedImage, known: LookupResult, file: bytes | None = None
    ) -> list[pb.ImageState]:
        """Return the answer to an image. If its file is needed, it is awaited from now on.

        Return no answer yet if the `file` came along, or for a frame whose video is being uploaded.
        """
        if known.video is not None:
            return [messages.state_message(image.index, b"", known, 0)]
        if known.grid is not None:
            if image.claim.place is not None:  # it is not queued here: it needs no place in the queue
                self._images.withdraw(image.claim)
            self._record.submitted("cached" if known.cached else "queued")
            tokens = self._info.geometry.tokens(known.grid)
            return [messages.state_message(image.index, image.key.address, known, tokens)]
        if image.file_is_video:
            if (frames := self._waiting_frames.get(image.key.source_key)) is not None:
                frames.append(image)
                return []
            self._waiting_frames[image.key.source_key] = []
        try:
            size_bytes = image.size_bytes or len(file or b"")
            self._uploads.reserve(image.index, size_bytes, is_video=image.file_is_video)
        except EncoderError as error:
            self._waiting_frames.pop(image.key.source_key, None)
            self._images.release_lease(image.key)
            return [self._refuse(image.index, error)]
        self._awaited[image.index] = image
        return [] if file is not None else [messages.state_message(image.index, image.key.address, known, 0)]

    async def _answer_waiting_frames(self, source_key: bytes) -> list[pb.ImageState]:
        """Return the answers to frames that waited for the file of their video, which has arrived or failed."""
        frames, error = self._waiting_frames.pop(source_key, ()), self._file_errors.pop(source_key, None)
        if error is not None:
            return [self._refuse(image.index, error) for image in frames]
        return self._answers(await self._look_up(frames), {}) if frames else []

    # Files

    async def _receive_files(self, files: Sequence[tuple[SubmittedImage, bytes]]) -> list[pb.ImageState]:
        """Return the answers to awaited images whose whole files came along with their names."""
        states: list[pb.ImageState] = []
        images: list[tuple[SubmittedImage, bytes]] = []
        for image, file in files:
            try:
                self._uploads.add(image.index, file)
            except EncoderError as error:
                states.append(self._fail(image, error))
                continue
            if image.file_is_video:
                states += await self._receive(image)
                states += await self._answer_waiting_frames(image.key.source_key)
            else:
                images.append((image, file))
        states += await self._receive_images(images)
        return states

    async def _answer_pieces(self, pieces: Sequence[pb.ImageBytes]) -> list[pb.ImageState]:
        """Append pieces to their files. Return the last answers of images that are complete or failed."""
        states: list[pb.ImageState] = []
        complete: dict[int, SubmittedImage] = {}
        for piece in pieces:
            if (image := self._awaited.get(piece.index)) is None or piece.index in complete:
                if piece.index not in self._named:
                    raise InvalidRequestError(
                        f"image {piece.index}: the server did not ask for its bytes in this call: send only what it "
                        "asks for"
                    )
                continue
            try:
                self._uploads.add(piece.index, piece.data)
            except EncoderError as error:
                states.append(self._fail(image, error))
                states += await self._answer_waiting_frames(image.key.source_key)
                continue
            if piece.last and image.file_is_video:
                states += await self._receive(image)
                states += await self._answer_waiting_frames(image.key.source_key)
            elif piece.last:
                complete[piece.index] = image
        states += await self._receive_images(
            [(image, self._uploads.of(index).joined()) for index, image in complete.items()]
        )
        if self._refused_any:
            await self._pause()
        return states

    async def _receive(self, image: SubmittedImage) -> list[pb.ImageState]:
        """Return the answer to an awaited video, or to the pair of its frames, whose file is complete."""
        upload = self._uploads.of(image.index)
        assert upload.video is not None, "a piece has arrived"
        self._record.uploaded(upload.size, upload.seconds)
        try:
            known = await self._images.receive_video(image, upload.video)
        except Exception as error:  # noqa: BLE001 - only this image fails
            return [self._fail(image, error)]
        return self._received(image, known)

    async def _receive_images(self, files: Sequence[tuple[SubmittedImage, bytes]]) -> list[pb.ImageState]:
        """Return the answers to awaited images whose files are complete."""
        if not files:
            return []
        for image, file in files:
            self._record.uploaded(len(file), self._uploads.of(image.index).seconds)
        states: list[pb.ImageState] = []
        received = await self._images.receive(files)
        for (image, _), known in zip(files, received, strict=True):
            if isinstance(known, Exception):
                states.append(self._fail(image, known))
            else:
                states += self._received(image, known)
        return states

    def _received(self, image: SubmittedImage, known: LookupResult) -> list[pb.ImageState]:
        del self._awaited[image.index]
        self._uploads.release(image.index)
        return self._answer(image, known)

    # Images that are not answered by a message

    def _unasked(self) -> list[pb.ImageState]:
        return [*self._ask_for_kept(), *self._time_out_uploads()]

    def _ask_for_kept(self) -> list[pb.ImageState]:
        """Ask again for the files of kept images that are needed, if the caller has them.

        Raises the error that ends keeping.
        """
        self._keeping.changed.clear()
        if self._keeping.error is not None:
            raise self._keeping.error
        needed, self._keeping.requested = self._keeping.requested, {}
        states = []
        for address in needed:
            image = self._kept[address]
            # If the file arrived since the Fetch asked, the image is queued already, under this call's claim.
            if image.index in self._awaited or self._images.knows(image.key):
                continue
            if image.known_only:
                self._images.unsubmitted.release(address, self._keeping)
                states.append(self._refuse(image.index, UnknownImageError(image.key.unknown)))
            else:
                image = self._kept[address] = replace(image, claim=self._claim(image.index))
                states += self._answer(image, LookupResult(None))
        return states

    def _time_out_uploads(self) -> list[pb.ImageState]:
        if self._uploads.idle_left_s > 0:
            return []
        return self._fail_uploads(
            DeadlineError(
                f"the upload of the image stalled, or was slower than {MIN_BYTES_PER_S >> 10} KiB/s: send the image "
                "again"
            )
        )

    def _end_uploads(self) -> list[pb.ImageState]:
        """Fail the images whose files the caller did not send before it ended the call."""
        return self._fail_uploads(
            InvalidRequestError(
                "the call ended before the bytes of the image arrived: send the bytes of every image that is answered "
                "STATE_NEEDS_BYTES"
            )
        )

    def _fail_uploads(self, error: EncoderError) -> list[pb.ImageState]:
        frames = [image for images in self._waiting_frames.values() for image in images]
        self._waiting_frames.clear()
        states = [self._fail(image, error) for image in tuple(self._awaited.values())]
        self._file_errors.clear()
        return [*states, *(self._refuse(image.index, error) for image in frames)]

    async def _pause(self) -> None:
        """Delay the answers that contain a refusal; see `REFUSAL_S`."""
        self._refused_any = False
        await asyncio.sleep(REFUSAL_S)

    def _fail(self, image: SubmittedImage, error: Exception) -> pb.ImageState:
        """Drop an awaited image; return its last answer."""
        known = known_error(error)
        if image.file_is_video:
            self._file_errors[image.key.source_key] = known
        self._drop(image.index)
        return self._refuse(image.index, known)

    def _drop(self, index: int) -> None:
        image = self._awaited.pop(index)
        self._uploads.release(index)
        self._images.release_lease(image.key)

    def _refuse(self, index: int, error: EncoderError) -> pb.ImageState:
        self._refused_any = True
        if (claim := self._claims.get(index)) is not None:
            self._images.withdraw(claim)
        self._record.submitted("failed", error)
        return messages.failed_state(index, error)


def _files_and_pieces(request: pb.SubmitRequest) -> tuple[dict[int, bytes], list[pb.ImageBytes]]:
    """Return the files that come along with their names, by the caller's index, and the pieces of other files."""
    names = {name.index for name in request.names.names}
    files: dict[int, bytes] = {}
    pieces: list[pb.ImageBytes] = []
    for piece in request.bytes:
        if piece.index not in names:
            pieces.append(piece)
        elif piece.last and piece.index not in files:
            files[piece.index] = piece.data
        else:
            raise InvalidRequestError(
                f"image {piece.index}: a file that comes along with its name must be complete, in one piece"
            )
    return files, pieces


def _is_at_fault(known: LookupResult | EncoderError) -> bool:
    """Whether an image is refused for its own sake, not because the server is full."""
    return isinstance(known, EncoderError) and not isinstance(known, OverloadedError)
