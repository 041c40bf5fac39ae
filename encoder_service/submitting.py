"""One Submit call: names answered at once, bytes collected only for those that need them."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from encoder_contract.errors import InvalidRequestError
from encoder_contract.geometry import Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service import wire
from encoder_service.calls import Call
from encoder_service.encoder import Encoder, ImageRef, Known
from encoder_service.scheduler import Claim
from encoder_service.uploads import Upload, UploadBudget


@dataclass(slots=True)
class _Expected:
    """An image that was named and whose bytes are to come."""

    image: ImageRef
    grid: Grid | None
    claim: Claim
    upload: Upload


class Submitting:
    """The state of one Submit call. `answer` every message in order; `close` it in any case."""

    def __init__(
        self,
        encoder: Encoder,
        budget: UploadBudget,
        call: Call,
        *,
        new_claim: Callable[[], Claim],
        salt: bytes,
        tokens: Callable[[Grid], int],
        max_images: int,
        max_image_bytes: int,
    ) -> None:
        self._encoder = encoder
        self._budget = budget
        self._call = call
        self._new_claim = new_claim
        self._salt = salt
        self._tokens = tokens
        self._max_images = max_images
        self._max_image_bytes = max_image_bytes
        self._named: set[int] = set()
        self._expected: dict[int, _Expected] = {}
        self._claims: list[Claim] = []

    async def answers(self, requests: AsyncIterator[pb.SubmitRequest]) -> AsyncIterator[pb.SubmitResponse]:
        """Yield an answer for every name, and one more for every image whose bytes arrived."""
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "names":
                for name in request.names.names:
                    yield self._name(name)
            elif kind == "bytes":
                answer = await self._bytes(request.bytes)
                if answer is not None:
                    yield answer
            else:
                raise InvalidRequestError("after `open`, a Submit call holds names and bytes only")
        if self._expected:
            raise InvalidRequestError(f"the call ended without the bytes of images {sorted(self._expected)}")

    def close(self, *, withdraw: bool) -> None:
        """Drop unfinished uploads; `withdraw` also gives up what this call submitted and nobody else wants."""
        for expected in self._expected.values():
            expected.upload.discard()
        self._expected.clear()
        if withdraw:
            for claim in self._claims:
                self._encoder.withdraw(claim)

    def _name(self, name: pb.ImageName) -> pb.SubmitResponse:
        if name.index in self._named:
            raise InvalidRequestError(f"index {name.index} was used twice")
        if len(self._named) >= self._max_images:
            raise InvalidRequestError(
                f"more than max_images_per_call = {self._max_images} images in one call"
            )
        self._named.add(name.index)
        claim = self._new_claim()
        self._claims.append(claim)
        try:
            image = wire.image_ref(name.digest, name.variant, self._salt)
            known = self._encoder.name(image, claim, wire.claimed_grid(name))
        except Exception as error:  # noqa: BLE001 - one image's failure is that image's answer
            return self._failed(name.index, error)
        if known.grid is None:
            upload = Upload(self._budget, self._max_image_bytes)
            self._expected[name.index] = _Expected(image, wire.claimed_grid(name), claim, upload)
        return self._answer(name.index, known)

    async def _bytes(self, piece: pb.ImageBytes) -> pb.SubmitResponse | None:
        expected = self._expected.get(piece.index)
        if expected is None:
            # The image has failed already (over a limit): the rest of its bytes was on its way.
            if piece.index in self._named:
                return None
            raise InvalidRequestError(f"bytes of image {piece.index}, which was not named")
        try:
            expected.upload.add(piece.data)
            if not piece.last:
                return None
            del self._expected[piece.index]
            self._call.uploaded(expected.upload.size, expected.upload.seconds)
            known = await self._encoder.receive(
                expected.image, expected.upload.take(), expected.claim, expected.grid
            )
        except Exception as error:  # noqa: BLE001 - one image's failure is that image's answer
            expected.upload.discard()
            self._expected.pop(piece.index, None)
            return self._failed(piece.index, error)
        return self._answer(piece.index, known)

    def _failed(self, index: int, error: Exception) -> pb.SubmitResponse:
        known = wire.known_error(error)
        self._call.submitted("failed", known)
        return wire.failed_state(index, known)

    def _answer(self, index: int, known: Known) -> pb.SubmitResponse:
        if known.grid is not None:
            self._call.submitted("cached" if known.cached else "queued")
        return wire.state_message(index, known, self._tokens(known.grid) if known.grid else 0)
