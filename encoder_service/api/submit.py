"""The images of one Submit call: named, uploaded if their bytes are needed, and queued.

`Uploads` reserves space before the bytes are sent, and releases it when they stop arriving.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

from encoder_contract.errors import DeadlineError, EncoderError, ImageLimitError, InvalidRequestError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.call_log import Call
from encoder_service.api.describe import ServerInfo
from encoder_service.api.exchange import Exchange
from encoder_service.api.inbound import Requests
from encoder_service.image.source import VideoFile
from encoder_service.images import Images, LookupResult, Retainer, SubmittedImage
from encoder_service.limits import Caller, Hold, Turns
from encoder_service.scheduler import Claim

# A slower upload counts as stalled: an occasional byte must not hold space that others wait for.
MIN_BYTES_PER_S = 64 << 10


class Upload:
    """The pieces of one image, or of the file of a video, in order."""

    def __init__(self, max_bytes: int, limit: str, *, is_video: bool = False) -> None:
        """`limit` is what messages call `max_bytes`."""
        self.max_bytes = max_bytes
        self.limit = limit
        self.size = 0
        self.is_video = is_video
        self.video: VideoFile | None = None
        """The file of a video, from its first piece on: it takes a descriptor."""
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
    """The images of one call that are being uploaded, by the caller's index.

    The call reserves space for the largest of them, which is enough to send one after another. A caller that
    interleaves images may hold more, up to the size of the largest image allowed, if there is space.
    """

    def __init__(self, room: Hold, *, max_image_bytes: int, max_video_bytes: int, idle_s: float) -> None:
        """`room` is what the call holds of the bytes that all callers may upload."""
        self._room = room
        self._most = {False: min(max_image_bytes, room.most), True: min(max_video_bytes, room.most)}
        self._idle_s = idle_s
        self._images: dict[int, Upload] = {}
        self.patience_s = idle_s
        """How much longer to wait for the next piece."""

    @property
    def expected(self) -> list[int]:
        """The images that are not complete."""
        return list(self._images)

    def expect(self, index: int, size_bytes: int, *, is_video: bool = False) -> None:
        """Reserve space for an image or a video; size 0 is unknown. Raises `ImageLimitError` and `OverloadedError`."""
        most, limit = self._most[is_video], "max_video_bytes" if is_video else "max_image_bytes"
        if size_bytes > most:
            raise ImageLimitError(f"the file is larger than {limit} = {most}")
        if not self._images:
            self.patience_s = self._idle_s
        self._room.resize(max(self._room.amount, size_bytes or most))
        if 0 < size_bytes < most:
            most, limit = size_bytes, "size_bytes of its name"
        self._images[index] = Upload(most, limit, is_video=is_video)

    def add(self, index: int, piece: bytes) -> Upload:
        """Append a piece and return the upload; raises what `expect` does, before the piece is kept."""
        upload, size = self._images[index], len(piece)
        if upload.size + size > upload.max_bytes:
            raise ImageLimitError(f"the file is larger than {upload.limit} = {upload.max_bytes}")
        held = size + sum(other.size for other in self._images.values())
        is_any_video = any(other.is_video for other in self._images.values())
        if upload.is_video and any(other.video for other in self._images.values() if other is not upload):
            raise ImageLimitError("the call sends two videos at a time: send them one after another")
        if held > (most := self._most[is_any_video]):
            limit = "max_video_bytes" if is_any_video else "max_image_bytes"
            raise ImageLimitError(
                f"the call's incomplete images exceed {limit} = {most}: send images one after another"
            )
        self._room.resize(max(self._room.amount, held))
        self.patience_s = min(self.patience_s + size / MIN_BYTES_PER_S, self._idle_s)
        upload.add(piece)
        return upload

    def drop(self, index: int) -> None:
        """Forget an image that is complete or failed, and release the space that the others do not need."""
        del self._images[index]
        largest = max((upload.max_bytes for upload in self._images.values()), default=0)
        self._room.resize(max(largest, sum(upload.size for upload in self._images.values())))


class SubmitCall(Exchange[pb.SubmitRequest, pb.ImageName, SubmittedImage, SubmittedImage, pb.SubmitResponse]):
    """The images of one Submit call: wanted until their bytes have arrived, and queued then.

    Images that the caller keeps are wanted again when a Fetch waits for them. Of the frames of one video, the first
    that need its file are wanted, and the others are answered once that has arrived.
    """

    right = "submit"

    def __init__(
        self,
        images: Images,
        uploads: Uploads,
        call: Call,
        requests: Requests[pb.SubmitRequest],
        caller: Caller,
        info: ServerInfo,
        turns: Turns,
    ) -> None:
        """For `requests`, `caller`, `info` and `turns` see `Exchange`."""
        super().__init__(requests, caller, info, turns)
        self._images = images
        self._uploads = uploads
        self._call = call
        self._claims: dict[int, Claim] = {}  # by index
        self._retainer = Retainer()
        self._keeps_names = False  # those that are being answered
        self._kept: dict[bytes, SubmittedImage] = {}  # by address
        self._behind: dict[bytes, list[SubmittedImage]] = {}  # by the key of a video that is wanted
        self._refused: dict[bytes, EncoderError] = {}  # why a file did not become a source, by its key

    def check_end(self) -> None:
        """Raise `InvalidRequestError` if the caller must not end the call yet."""
        if self._wanted:
            raise InvalidRequestError(
                f"the call ended before the bytes of images {sorted(self._wanted)} arrived"
            )

    def close(self) -> None:
        """Drop unfinished uploads and, unless the call is complete, the images that only this call wants."""
        keeps = bool(self._kept) and not self._wanted
        super().close()
        for address in self._kept:
            self._images.waiters.release(address, self._retainer)
        if not self._call.complete:
            for claim in self._claims.values():
                self._images.withdraw(claim)
            # A caller that ends a call of kept images no longer wants them: that is no failure.
            self._call.complete = keeps

    def _due(self) -> list[pb.SubmitResponse]:
        return [*self._wanted_again(), *self._stalled()]

    def _wanted_again(self) -> list[pb.SubmitResponse]:
        """Ask for the bytes of kept images that are needed again; raises the error with which the server ends."""
        self._retainer.changed.clear()
        if self._retainer.error is not None:
            raise self._retainer.error
        asked, self._retainer.requested = self._retainer.requested, {}
        answers = []
        for address in asked:
            image = self._kept[address]
            # Bytes that arrived since the Fetch asked are queued, under the claim that this call has.
            if image.index not in self._wanted and not self._images.knows(image.key):
                image = self._kept[address] = replace(image, claim=self._claim(image.index))
                answers += self._answer(image, LookupResult(None))
        return answers

    def _stalled(self) -> list[pb.SubmitResponse]:
        if self._uploads.patience_s > 0:
            return []
        late = DeadlineError("the upload of the image stalled or is too slow: send it again")
        behind = [image for images in self._behind.values() for image in images]
        self._behind.clear()
        return [
            *(self._fail(index, late) for index in tuple(self._wanted)),
            *(self._failure(image.index, late) for image in behind),
        ]

    async def _next(self) -> pb.SubmitRequest:
        turned = self._retainer.changed if self._kept else None
        if not self._wanted:
            return await self._requests.within(None, turned)
        began = monotonic()
        try:
            return await self._requests.within(max(self._uploads.patience_s, 0.0), turned)
        finally:  # only waiting counts: the time that we take for a piece is not the caller's
            self._uploads.patience_s -= monotonic() - began

    async def _answers_to(self, request: pb.SubmitRequest) -> AsyncIterator[pb.SubmitResponse]:
        kind = request.WhichOneof("message")
        if kind == "names":
            self._keeps_names = request.names.kept
            async for answer in self._names(request.names.names):
                yield answer
        elif kind == "bytes":
            wanted = self._wanted.get(request.bytes.index)
            for answer in await self._piece(request.bytes.index, partial(self._bytes, request.bytes)):
                yield answer
            if wanted is not None and request.bytes.index not in self._wanted:
                for answer in await self._answers_behind(wanted.key.source_key):
                    yield answer
        else:
            raise InvalidRequestError("after `open`, a Submit call may send only `names` and `bytes`")

    def _take_index(self, index: int) -> None:
        if index in self._over:
            raise InvalidRequestError(f"index {index} is used twice in this call")
        if len(self._over) >= (most := self._info.max_images):
            raise InvalidRequestError(f"the call names more than max_images_per_call = {most} images")
        self._over.add(index)

    def _image(self, name: pb.ImageName) -> SubmittedImage:
        key = messages.image_key(self._info.recipe, name, self._caller.salt)
        grid = messages.claimed_grid(name)
        return SubmittedImage(name.index, key, grid, name.size_bytes, self._claim(name.index), name.video)

    def _claim(self, index: int) -> Claim:
        """Return a new claim on an image, which replaces the one that ended with its rows or its failure."""
        if (before := self._claims.get(index)) is not None:
            self._images.withdraw(before)
        claim = self._claims[index] = self._caller.claim()
        return claim

    async def _look_up(self, images: Sequence[SubmittedImage]) -> list[pb.SubmitResponse]:
        answers: list[pb.SubmitResponse] = []
        for image, known in zip(images, await self._images.lookup(images), strict=True):
            if isinstance(known, EncoderError):
                answers.append(self._failure(image.index, known))
                continue
            answers += self._answer(image, known)
            if self._keeps_names and not image.is_video:
                self._kept[image.key.address] = image
                self._images.waiters.retain(image.key.address, self._retainer)
        return answers

    def _answer(self, image: SubmittedImage, known: LookupResult) -> list[pb.SubmitResponse]:
        """Return the answer to an image; if its bytes are needed, from now on it is wanted.

        There is none yet if its bytes are on their way: those of the video that it is in.
        """
        if known.video is not None:
            return [messages.state_message(image.index, b"", known, 0)]
        if known.grid is not None:
            self._call.submitted("cached" if known.cached else "queued")
            tokens = self._info.geometry.tokens(known.grid)
            return [messages.state_message(image.index, image.key.address, known, tokens)]
        if image.file_is_video:
            if (behind := self._behind.get(image.key.source_key)) is not None:
                behind.append(image)
                return []
            self._behind[image.key.source_key] = []
        try:
            self._uploads.expect(image.index, image.size_bytes, is_video=image.file_is_video)
        except EncoderError as error:
            self._behind.pop(image.key.source_key, None)
            self._images.forget(image.key)
            return [self._failure(image.index, error)]
        self._wanted[image.index] = image
        return [messages.state_message(image.index, image.key.address, known, 0)]

    async def _answers_behind(self, source_key: bytes) -> list[pb.SubmitResponse]:
        """Return the answers to frames that waited for the file of their video, which came or was refused."""
        behind, refused = self._behind.pop(source_key, ()), self._refused.pop(source_key, None)
        if refused is not None:
            return [self._failure(image.index, refused) for image in behind]
        return await self._look_up(behind)

    async def _bytes(self, piece: pb.ImageBytes, image: SubmittedImage) -> pb.SubmitResponse | None:
        try:
            return await self._added(piece, image)
        except EncoderError as error:
            self._refused[image.key.source_key] = error
            raise

    async def _added(self, piece: pb.ImageBytes, image: SubmittedImage) -> pb.SubmitResponse | None:
        upload = self._uploads.add(piece.index, piece.data)
        if not piece.last:
            return None
        self._call.uploaded(upload.size, upload.seconds)
        if upload.video is not None:
            known = await self._images.receive_video(image, upload.video)
        else:
            known = await self._images.receive(image, upload.joined())
        self._uploads.drop(piece.index)
        [answer] = self._answer(image, known)
        return answer

    def _dropped(self, wanted: SubmittedImage) -> None:
        self._uploads.drop(wanted.index)
        self._images.forget(wanted.key)

    def _failed(self, index: int, error: EncoderError) -> pb.SubmitResponse:
        self._call.submitted("failed", error)
        return messages.failed_state(index, error)
