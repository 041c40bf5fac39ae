"""The gRPC service: Describe, Submit, Fetch and Put. Nothing here blocks the event loop."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Any, Literal
from uuid import uuid4

from encoder_contract.errors import ForbiddenError, InvalidRequestError, ModelMismatchError, UnavailableError
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.call_log import Call
from encoder_service.api.describe import ServerInfo
from encoder_service.api.fetch import (
    FetchCall,
    RowRequest,
    row_requests,
    rows_anywhere,
    rows_of_this_replica,
)
from encoder_service.api.inbound import Entrance, Inbound, Methods
from encoder_service.api.put import PutCall, PutMessage, PutRoom
from encoder_service.api.submit import SubmitCall, Uploads
from encoder_service.images import Images, PutLeases
from encoder_service.keys import ImageKey
from encoder_service.limits import Budgets, Caller, Turns
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Claim
from encoder_service.store import Store

SERVICE = "encoder_contract.v1.EncoderService"


class EncoderService:
    """The calls. One instance serves all connections, on one event loop."""

    def __init__(
        self,
        images: Images,
        leases: PutLeases,
        store: Store,
        info: ServerInfo,
        metrics: Metrics,
        budgets: Budgets,
    ) -> None:
        self._images = images
        self._info = info
        self._metrics = metrics
        self._budgets = budgets
        self._turns = Turns()
        self._put_room = PutRoom(leases, store, info.rows, self._turns, lambda: self.draining)
        self.draining = False

    async def describe(self, _request: pb.DescribeRequest, caller: Caller) -> pb.DescribeResponse:
        """Describe this server, to any tenant."""
        self._info.identity.require(None, caller)
        description = pb.DescribeResponse()
        description.CopyFrom(self._info.description)
        description.clock_s = monotonic()
        self._info.transports.describe(description, is_local=caller.is_local)
        return description

    async def submit(self, inbound: Inbound[pb.SubmitRequest]) -> AsyncGenerator[pb.SubmitResponse]:
        """Accept images; see the contract."""
        call = self._begun("submit", inbound)
        self._info.identity.require("submit", inbound.caller)  # before anything is parsed
        first = await inbound.requests.first()
        if first.WhichOneof("message") != "open":
            raise InvalidRequestError("the first message of a Submit call must be `open`")
        caller = self._admitted("submit", inbound.caller, first.open, call)
        if not self._info.encodes:
            raise ModelMismatchError(
                "this server only stores rows (--store-only): submit images to a server that encodes, or put their rows"
            )
        submitting = self._submitting(caller, call, inbound)
        inbound.held.callback(submitting.close)
        async for answer in submitting.answers():
            yield answer
        submitting.check_end()
        # The requests of a cancelled call end just as those of a complete one, a moment before the cancellation
        # arrives. Sending one more message tells them apart: it fails if the caller has left.
        yield pb.SubmitResponse()
        call.complete = True

    async def fetch(self, inbound: Inbound[bytes]) -> AsyncGenerator[pb.FetchResponse | bytes]:
        """Stream rows; see the contract."""
        call = self._begun("fetch", inbound)
        identity, raw = self._info.identity, await inbound.requests.first()
        is_peer = identity.is_peer(raw, inbound.caller)
        if not is_peer:
            identity.require("fetch", inbound.caller)  # before anything is parsed
        request = messages.parse_fetch(raw, self._info.description.limits.max_images_per_call)
        caller = self._admitted("fetch", inbound.caller, request.caller, call, is_peer=is_peer)
        inbound.held.enter_context(self._budgets.fetched_images.hold(caller, len(request.images)))
        wanted = await self._wanted(request, caller)
        fetching = await self._fetching(request, wanted, caller, call)
        # When the caller leaves, its pins are released now, not at garbage collection.
        async with aclosing(fetching.answers()) as answers:
            async for message in answers:
                yield message

    async def put(self, inbound: Inbound[PutMessage]) -> AsyncGenerator[pb.PutResponse]:
        """Accept rows that the caller computes; see the contract."""
        call = self._begun("put", inbound)
        self._info.identity.require("put", inbound.caller)  # before anything is parsed
        first = await inbound.requests.first()
        if isinstance(first, tuple) or first.WhichOneof("message") != "open":
            raise InvalidRequestError("the first message of a Put call must be `open`")
        caller = self._admitted("put", inbound.caller, first.open.caller, call)
        putting = self._putting(caller, first.open, call, inbound)
        inbound.held.callback(putting.close)
        yield putting.opened()
        async for answer in putting.answers():
            yield answer
        call.complete = True

    def _begun(self, kind: Literal["submit", "fetch", "put"], inbound: Inbound[Any]) -> Call:
        """Return the record of a call, which ends with it."""
        call = Call(self._metrics, kind, inbound.caller)
        inbound.held.callback(call.close)
        inbound.on_error = call.failed
        return call

    def _admitted(
        self,
        right: Literal["submit", "fetch", "put"],
        caller: Caller,
        said: pb.Caller,
        call: Call,
        *,
        is_peer: bool = False,
    ) -> Caller:
        """Return the caller with what it said, noted in the record of its call.

        Raises what `Identity.admit` does, `ForbiddenError` where Put is off, `UnavailableError` during a drain, and
        `ModelMismatchError`.
        """
        call.made_by(said.request_id, said.client_id or caller.host)
        identity = self._info.identity
        caller = identity.admit_peer(caller, said) if is_peer else identity.admit(right, caller, said)
        call.made_by(caller.request_id, caller.name)
        if right == "put" and not self._info.accepts_put:
            raise ForbiddenError("Put is off on this server: the operator turns it on with --accept-put yes")
        if self.draining:
            raise UnavailableError("the server is draining: use another server")
        self._info.check_model(said)
        return caller

    def _putting(
        self, caller: Caller, opened: pb.PutOpen, call: Call, inbound: Inbound[PutMessage]
    ) -> PutCall:
        producer = Producer.from_message(opened.producer)
        return PutCall(
            self._put_room,
            call,
            inbound.requests,
            caller,
            under_way=inbound.held.enter_context(self._budgets.put_bytes.hold(caller, 0)),
            new_image=partial(messages.put_image, producer, caller.salt),
            tokens=self._info.geometry.tokens,
            max_images=self._info.description.limits.max_images_per_call,
            segment=self._info.transports.open_segment(opened, is_local=caller.is_local),
            check_caller=partial(self._info.identity.check_again, "put", caller),
        )

    def _submitting(self, caller: Caller, call: Call, inbound: Inbound[pb.SubmitRequest]) -> SubmitCall:
        limits = self._info.description.limits
        room = inbound.held.enter_context(self._budgets.upload_bytes.hold(caller, 0))
        return SubmitCall(
            self._images,
            Uploads(
                room,
                max_image_bytes=limits.max_image_bytes,
                max_video_bytes=limits.max_video_bytes,
                idle_s=self._budgets.upload_idle_s,
            ),
            call,
            inbound.requests,
            caller,
            turns=self._turns,
            new_claim=partial(_claim, caller, uuid4().hex),
            new_key=partial(self._key, caller.salt),
            tokens=self._info.geometry.tokens,
            max_images=limits.max_images_per_call,
            check_caller=partial(self._info.identity.check_again, "submit", caller),
        )

    async def _fetching(
        self, request: pb.FetchRequest, wanted: Sequence[RowRequest], caller: Caller, call: Call
    ) -> FetchCall:
        grace_ms = min(request.grace_ms, self._info.description.limits.max_grace_ms)
        rows_of = (
            rows_of_this_replica(self._images)
            if request.local_only
            else await rows_anywhere(self._images, wanted, caller, grace_ms / 1000)
        )
        return FetchCall(
            rows_of,
            wanted,
            call,
            self._images,
            caller=caller,
            sender=self._info.transports.choose(request, is_local=caller.is_local),
            rows=self._info.rows,
            pinned_bytes=self._budgets.pinned_bytes,
            turns=self._turns,
            fleet_key=self._info.fleet_key if caller.is_peer else None,
        )

    async def _wanted(self, request: pb.FetchRequest, caller: Caller) -> list[RowRequest]:
        most = self._info.description.limits.max_images_per_call
        if not 0 < len(request.images) <= most:
            raise InvalidRequestError(f"a Fetch call must name 1 to {most} images, got {len(request.images)}")
        if request.HasField("producer"):
            by = Producer.from_message(request.producer)
            key_of = partial(messages.put_image_key, by, salt=caller.salt)
        else:
            key_of = partial(self._key, caller.salt)
        claim = partial(_claim, caller, uuid4().hex)
        return await row_requests(request.images, key_of, claim, self._turns, caller)

    def _key(self, salt: bytes, image: pb.ImageName | pb.FetchImage) -> ImageKey:
        return messages.image_key(self._info.recipe, image, salt)


def _claim(caller: Caller, call_id: str, chunk: int = 0, needed_at: float | None = None) -> Claim:
    """Return a claim of a call: demanded if there is a `needed_at` (a Fetch), else speculative (a Submit)."""
    return Claim(
        request_id=caller.request_id or call_id,
        # What a peer asks for is for those who brought the images here: see `Claim`.
        holder="" if caller.is_peer else caller.holder,
        priority=caller.priority,
        chunk=chunk,
        needed_at=needed_at,
        demanded=needed_at is not None,
    )


def methods(service: EncoderService, entrance: Entrance, submits: Entrance, max_images: int) -> Methods:
    """Return the methods of a server whose calls name at most `max_images` images; `submits` admits Submit calls."""
    return {
        "Describe": entrance.unary(service.describe, partial(messages.parse, pb.DescribeRequest)),
        "Submit": submits.stream(service.submit, partial(messages.parse_submit, max_images=max_images)),
        "Put": entrance.stream(service.put, partial(messages.parse_put, max_images=max_images)),
        "Fetch": entrance.stream(service.fetch, bytes),  # parsed once its caller is admitted
    }
