"""One Submit call: names answered at once, bytes collected only for those that need them.

`Uploads` reserves space before the bytes are sent, and releases it when they stop arriving.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from time import monotonic

from encoder_contract.errors import DeadlineError, EncoderError, ImageLimitError, InvalidRequestError
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.call_log import Call
from encoder_service.api.inbound import Requests
from encoder_service.images import Encoder, Keeper, LookupResult, SubmittedImage
from encoder_service.keys import ImageKey
from encoder_service.limits import Caller, Hold, Turns, name_turns
from encoder_service.logs import known_error
from encoder_service.scheduler import Claim

# A slower upload counts as stalled: an occasional byte must not hold space that others wait for.
MIN_BYTES_PER_S = 64 << 10


class Upload:
    """The pieces of one image, in order."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self._pieces: list[bytes] = []
        self._began = monotonic()

    @property
    def seconds(self) -> float:
        """Time since the image was named."""
        return monotonic() - self._began

    def add(self, piece: bytes) -> None:
        """Append a piece."""
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

    def __init__(self, room: Hold, *, max_image_bytes: int, idle_s: float) -> None:
        """`room` is what the call holds of the bytes that all callers may upload."""
        self._room = room
        self._max_bytes = min(max_image_bytes, room.most)
        self._idle_s = idle_s
        self._images: dict[int, Upload] = {}
        self.patience_s = idle_s
        """How much longer to wait for the next piece."""

    @property
    def expected(self) -> list[int]:
        """The images that are not complete."""
        return list(self._images)

    def expect(self, index: int, size_bytes: int) -> None:
        """Reserve space for an image; size 0 is unknown. Raises `ImageLimitError` and `OverloadedError`."""
        if size_bytes > self._max_bytes:
            raise ImageLimitError(f"the image is larger than max_image_bytes = {self._max_bytes}")
        if not self._images:
            self.patience_s = self._idle_s
        self._room.resize(max(self._room.amount, size_bytes or self._max_bytes))
        self._images[index] = Upload(size_bytes or self._max_bytes)

    def add(self, index: int, piece: bytes) -> Upload:
        """Append a piece and return the upload; raises what `expect` does, before the piece is kept."""
        upload, size = self._images[index], len(piece)
        if upload.size + size > upload.max_bytes:
            limit = "max_image_bytes" if upload.max_bytes == self._max_bytes else "size_bytes of its name"
            raise ImageLimitError(f"the image is larger than {limit} = {upload.max_bytes}")
        held = size + sum(other.size for other in self._images.values())
        if held > self._max_bytes:
            raise ImageLimitError(
                f"the call's incomplete images exceed max_image_bytes = {self._max_bytes}: "
                "send images one after another"
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


class SubmitCall:
    """The state of one Submit call. Iterate over `answers` once; `close` it in any case."""

    def __init__(
        self,
        encoder: Encoder,
        uploads: Uploads,
        call: Call,
        caller: Caller,
        *,
        turns: Turns,
        new_claim: Callable[[], Claim],
        new_key: Callable[[pb.ImageName], ImageKey],
        tokens: Callable[[Grid], int],
        max_images: int,
        check_caller: Callable[[], None],
    ) -> None:
        """`turns` keeps a call of hundreds of names from delaying those of others.

        `check_caller` raises when the caller may no longer submit; it is asked before each list of names.
        """
        self._encoder = encoder
        self._uploads = uploads
        self._call = call
        self._caller = caller
        self._turns = turns
        self._new_claim = new_claim
        self._new_key = new_key
        self._tokens = tokens
        self._max_images = max_images
        self._check_caller = check_caller
        self._named: set[int] = set()
        self._expected: dict[int, SubmittedImage] = {}
        self._claims: dict[int, Claim] = {}  # by index
        self._keeper = Keeper()
        self._kept: dict[bytes, tuple[pb.ImageName, SubmittedImage]] = {}  # by address

    async def answers(self, requests: Requests[pb.SubmitRequest]) -> AsyncIterator[pb.SubmitResponse]:
        """Yield an answer for every name, and one more for every image whose bytes arrived, or stopped arriving.

        Images that the caller keeps are asked for again when a Fetch waits for them.
        """
        while True:
            for answer in self._wanted_again():
                yield answer
            try:
                request = await self._next(requests)
            except TimeoutError:
                for answer in self._given_up():
                    yield answer
                continue
            except StopAsyncIteration:
                break
            async for answer in self._answers_to(request):
                yield answer
        if self._expected:
            raise InvalidRequestError(
                f"the call ended before the bytes of images {sorted(self._expected)} arrived"
            )

    def close(self) -> None:
        """Drop unfinished uploads and, unless the call is complete, the images that only this call wants."""
        keeps = bool(self._kept) and not self._expected
        for index in tuple(self._expected):
            self._drop(index)
        for address in self._kept:
            self._encoder.keep_no_more(address, self._keeper)
        if not self._call.complete:
            for claim in self._claims.values():
                self._encoder.withdraw(claim)
            self._call.complete = (
                keeps  # a caller that ends it no longer wants its images: that is no failure
            )

    async def _answers_to(self, request: pb.SubmitRequest) -> AsyncIterator[pb.SubmitResponse]:
        kind = request.WhichOneof("message")
        if kind == "names":
            self._check_caller()
            async for answer in self._names(request.names.names, kept=request.names.kept):
                yield answer
        elif kind == "bytes":
            outcome = await self._bytes(request.bytes)
            if outcome is not None:
                yield outcome
        else:
            raise InvalidRequestError("after `open`, a Submit call may send only `names` and `bytes`")

    async def _next(self, requests: Requests[pb.SubmitRequest]) -> pb.SubmitRequest:
        """Return the next message; raises `TimeoutError` if there may be something to say before it.

        Bytes that are expected arrive too slowly or not at all, or the caller is to send a kept image again.
        """
        turned = self._keeper.turned if self._kept else None
        if not self._expected:
            return await requests.within(None, turned)
        began = monotonic()
        try:
            return await requests.within(max(self._uploads.patience_s, 0.0), turned)
        finally:  # only waiting counts: the time that we take for a piece is not the caller's
            self._uploads.patience_s -= monotonic() - began

    def _wanted_again(self) -> list[pb.SubmitResponse]:
        """Ask for the bytes of kept images that are needed again; raises the error with which the server ends."""
        self._keeper.turned.clear()
        if self._keeper.end is not None:
            raise self._keeper.end
        asked, self._keeper.asked = self._keeper.asked, {}
        answers = []
        for address in asked:
            name, named = self._kept[address]
            if name.index not in self._expected:
                named = replace(named, claim=self._claim(name.index))
                self._kept[address] = name, named
                answers.append(self._answer_name(name, named, LookupResult(None)))
        return answers

    def _given_up(self) -> list[pb.SubmitResponse]:
        if self._uploads.patience_s > 0 or not self._expected:
            return []
        late = DeadlineError(
            "the upload of the image stalled or is too slow (--upload-idle-s): send it again"
        )
        indexes = tuple(self._expected)
        for index in indexes:
            self._drop(index)
        return [self._failed(index, late) for index in indexes]

    def _drop(self, index: int) -> None:
        """Stop expecting the bytes of an image."""
        self._uploads.drop(index)
        self._encoder.forget(self._expected.pop(index).key)

    async def _names(self, names: Sequence[pb.ImageName], *, kept: bool) -> AsyncIterator[pb.SubmitResponse]:
        for some, pieces in name_turns(names):
            await self._turns.take(self._caller.holder, pieces)
            for answer in await self._answers_to_names(some, kept=kept):
                yield answer

    async def _answers_to_names(
        self, names: Sequence[pb.ImageName], *, kept: bool
    ) -> list[pb.SubmitResponse]:
        answers: list[pb.SubmitResponse] = []
        images: dict[int, SubmittedImage] = {}
        by_index = {name.index: name for name in names}
        for name in names:
            self._check_index(name.index)
            try:
                key = self._new_key(name)
            except InvalidRequestError as error:
                answers.append(self._failed(name.index, error))
                continue
            images[name.index] = SubmittedImage(key, messages.claimed_grid(name), self._claim(name.index))
        known = await self._encoder.name(list(images.values()))
        for (index, named), answer in zip(images.items(), known, strict=True):
            answers.append(self._answer_name(by_index[index], named, answer))
            if kept and not isinstance(answer, EncoderError):
                self._kept[named.key.address] = by_index[index], named
                self._encoder.keep(named.key.address, self._keeper)
        return answers

    def _claim(self, index: int) -> Claim:
        """Return a new claim on an image, which replaces the one that ended with its rows or its failure."""
        if (before := self._claims.get(index)) is not None:
            self._encoder.withdraw(before)
        claim = self._claims[index] = self._new_claim()
        return claim

    def _check_index(self, index: int) -> None:
        if index in self._named:
            raise InvalidRequestError(f"index {index} is used twice in this call")
        if len(self._named) >= self._max_images:
            raise InvalidRequestError(
                f"the call names more than max_images_per_call = {self._max_images} images"
            )
        self._named.add(index)

    def _answer_name(
        self, name: pb.ImageName, named: SubmittedImage, answer: LookupResult | EncoderError
    ) -> pb.SubmitResponse:
        index = name.index
        if isinstance(answer, EncoderError):
            return self._failed(index, answer)
        if answer.grid is None:
            try:
                self._uploads.expect(index, name.size_bytes)
            except EncoderError as error:
                self._encoder.forget(named.key)
                return self._failed(index, error)
            self._expected[index] = named
        return self._answer(index, named, answer)

    async def _bytes(self, piece: pb.ImageBytes) -> pb.SubmitResponse | None:
        index = piece.index
        if index not in self._expected:
            # The image has failed already (over a limit): the rest of its bytes was on its way.
            if index in self._named:
                return None
            raise InvalidRequestError(f"image {index}: bytes arrived before its name")
        try:
            upload = self._uploads.add(index, piece.data)
            if not piece.last:
                return None
            self._call.uploaded(upload.size, upload.seconds)
            named = self._expected[index]
            known = await self._encoder.receive(named, upload.joined())
        except Exception as error:  # noqa: BLE001 - one image's failure is that image's answer
            self._drop(index)
            return self._failed(index, error)
        self._uploads.drop(index)
        del self._expected[index]
        return self._answer(index, named, known)

    def _failed(self, index: int, error: Exception) -> pb.SubmitResponse:
        known = known_error(error)
        self._call.submitted("failed", known)
        return messages.failed_state(index, known)

    def _answer(self, index: int, named: SubmittedImage, known: LookupResult) -> pb.SubmitResponse:
        if known.grid is not None:
            self._call.submitted("cached" if known.cached else "queued")
        return messages.state_message(
            index, named.key.address, known, self._tokens(known.grid) if known.grid else 0
        )
