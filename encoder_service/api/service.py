"""The gRPC service: Describe, Submit, Fetch and Put. Nothing here blocks the event loop."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic
from uuid import uuid4

from encoder_contract.errors import ForbiddenError, InvalidRequestError, ModelMismatchError, UnavailableError
from encoder_contract.producer import Producer
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.call_log import Call
from encoder_service.api.describe import ServerInfo
from encoder_service.api.fetch import (
    FetchCall,
    PinRoom,
    RowRequest,
    row_requests,
    rows_anywhere,
    rows_of_this_replica,
)
from encoder_service.api.inbound import Entrance, Methods, Requests
from encoder_service.api.messages import Context
from encoder_service.api.put import PutCall, PutMessage, PutRoom
from encoder_service.api.submit import SubmitCall, Uploads
from encoder_service.images import Encoder, PutLeases, RowFinder
from encoder_service.keys import ImageKey
from encoder_service.limits import Shares, Turns
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Claim
from encoder_service.store import Store

SERVICE = "encoder_contract.v1.EncoderService"
# Whom the shares of other replicas count against. Those of callers begin with another word: see `Identity.holders`.
PEER = "peer"


class EncoderService:
    """The calls. One instance serves all connections, on one event loop."""

    def __init__(
        self,
        encoder: Encoder,
        finder: RowFinder,
        leases: PutLeases,
        store: Store,
        info: ServerInfo,
        metrics: Metrics,
    ) -> None:
        self._encoder = encoder
        self._finder = finder
        self._info = info
        self._metrics = metrics
        self._upload_room = Shares(info.max_upload_bytes, "upload bytes")
        self._pin_room = PinRoom(info.max_pinned_bytes)
        # A Fetch over this is refused as a whole and first of all: refusing must be cheaper than asking again.
        self._fetch_room = Shares(info.max_fetched_images, "images in Fetch calls")
        self._turns = Turns()
        put_room = Shares(info.max_put_bytes, "bytes of rows being put")
        self._put_room = PutRoom(leases, store, info.rows, put_room, self._turns, lambda: self.draining)
        self.draining = False

    @property
    def held_upload_bytes(self) -> int:
        """Bytes reserved for uploads."""
        return self._upload_room.held

    @property
    def put_bytes(self) -> int:
        """Bytes reserved for rows that callers are putting."""
        return self._put_room.bytes_under_way.held

    @property
    def pinned_bytes(self) -> int:
        """Bytes of rows that running Fetch calls keep pinned."""
        return self._pin_room.held_bytes

    async def describe(self, _request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Describe this server, to any tenant."""
        self._info.identity.require(None, context)
        description = pb.DescribeResponse()
        description.CopyFrom(self._info.description)
        description.clock_s = monotonic()
        self._info.transports.describe(description, is_local=messages.is_local(context))
        return description

    async def submit(
        self, requests: Requests[pb.SubmitRequest], context: Context
    ) -> AsyncGenerator[pb.SubmitResponse]:
        """Accept images; see the contract."""
        submitting: SubmitCall | None = None
        call = Call(self._metrics, "submit", messages.trace_id_of(context))
        try:
            with messages.Border(context, call.failed):
                self._info.identity.require("submit", context)  # before anything is parsed
                caller = await self._opened(requests, context)
                _note_caller(caller, context, call)
                submitting = self._submitting(caller, call, context)
                async for answer in submitting.answers(requests):
                    yield answer
                # The requests of a cancelled call end just as those of a complete one, a moment before the cancellation
                # arrives. Sending one more message tells them apart: it fails if the caller has left.
                yield pb.SubmitResponse()
                call.complete = True
        finally:
            if submitting is not None:
                keeps = submitting.keeps
                submitting.close(withdraw=not call.complete)
                call.complete |= keeps  # its caller wants the images no more: nothing is amiss
            call.close()

    async def fetch(
        self, requests: Requests[bytes], context: Context
    ) -> AsyncGenerator[pb.FetchResponse | bytes]:
        """Stream rows; see the contract."""
        call = Call(self._metrics, "fetch", messages.trace_id_of(context))
        holder, held = PEER, 0
        try:
            with messages.Border(context, call.failed):
                raw = await requests.first()
                is_peer = self._info.identity.is_peer(raw, context)
                if not is_peer:
                    self._info.identity.require("fetch", context)  # before anything is parsed
                request = messages.parse_fetch(raw, self._info.description.limits.max_images_per_call)
                caller = request.caller
                _note_caller(caller, context, call)
                if not is_peer:
                    caller.CopyFrom(self._info.identity.admit("fetch", caller, context))
                    holder = self._info.identity.holders(caller, context)[0]
                _note_caller(caller, context, call)
                self._admit(caller)
                self._fetch_room.take((holder,), len(request.images))
                held = len(request.images)
                wanted = await self._wanted(request, holder)
                # When the caller leaves, its pins are released now, not at garbage collection.
                fetching = await self._fetching(request, wanted, call, context, holder)
                async with aclosing(fetching.answers()) as answers:
                    async for message in answers:
                        yield message
        finally:
            self._fetch_room.give_back((holder,), held)
            call.close()

    async def put(self, requests: Requests[PutMessage], context: Context) -> AsyncGenerator[pb.PutResponse]:
        """Accept rows that the caller computes; see the contract."""
        putting: PutCall | None = None
        call = Call(self._metrics, "put", messages.trace_id_of(context))
        try:
            with messages.Border(context, call.failed):
                self._info.identity.require("put", context)  # before anything is parsed
                first = await requests.first()
                if isinstance(first, tuple) or first.WhichOneof("message") != "open":
                    raise InvalidRequestError("the first message of a Put call must be `open`")
                caller = first.open.caller
                caller.CopyFrom(self._info.identity.admit("put", caller, context))
                _note_caller(caller, context, call)
                putting = self._putting(first.open, call, context)
                async for answer in putting.answers(requests):
                    yield answer
                call.complete = True
        finally:
            if putting is not None:
                putting.close()
            call.close()

    def _putting(self, opened: pb.PutOpen, call: Call, context: Context) -> PutCall:
        """Return the state of a call that may put. Raises `ForbiddenError` unless the operator allows it."""
        if not self._info.accepts_put:
            raise ForbiddenError("Put is off on this server: the operator turns it on with --accept-put yes")
        self._admit(opened.caller)
        producer, salt = Producer.from_message(opened.producer), opened.caller.tenant_salt
        segment = self._info.transports.open_segment(opened, is_local=messages.is_local(context))
        return PutCall(
            self._put_room,
            self._info.identity.holders(opened.caller, context),
            call,
            new_image=partial(messages.put_image, producer, salt),
            tokens=self._info.geometry.tokens,
            max_images=self._info.description.limits.max_images_per_call,
            segment=segment,
            check_caller=partial(self._info.identity.check_again, "put", opened.caller, context),
        )

    def _submitting(self, caller: pb.Caller, call: Call, context: Context) -> SubmitCall:
        if not self._info.encodes:
            raise ModelMismatchError(
                "this server only stores rows (--store-only): submit images to a server that encodes, or put their rows"
            )
        limits = self._info.description.limits
        holders = self._info.identity.holders(caller, context)
        return SubmitCall(
            self._encoder,
            self._uploads(holders),
            call,
            turns=self._turns,
            holder=holders[0],
            new_claim=partial(_claim, caller, holders[0], uuid4().hex),
            new_key=partial(self._key, caller),
            tokens=self._info.geometry.tokens,
            max_images=limits.max_images_per_call,
            check_caller=partial(self._info.identity.check_again, "submit", caller, context),
        )

    async def _fetching(
        self,
        request: pb.FetchRequest,
        wanted: Sequence[RowRequest],
        call: Call,
        context: Context,
        holder: str,
    ) -> FetchCall:
        grace_ms = min(request.grace_ms, self._info.description.limits.max_grace_ms)
        rows_of = (
            rows_of_this_replica(self._finder)
            if request.local_only
            else await rows_anywhere(self._finder, wanted, grace_ms / 1000)
        )
        return FetchCall(
            rows_of,
            wanted,
            call,
            self._finder,
            holder=holder,
            sender=self._info.transports.choose(request, is_local=messages.is_local(context)),
            rows=self._info.rows,
            pin_room=self._pin_room,
            turns=self._turns,
            fleet_key=self._info.fleet_key if holder == PEER else None,
        )

    async def _opened(self, requests: Requests[pb.SubmitRequest], context: Context) -> pb.Caller:
        first = await requests.first()
        if first.WhichOneof("message") != "open":
            raise InvalidRequestError("the first message of a Submit call must be `open`")
        caller = self._info.identity.admit("submit", first.open, context)
        self._admit(caller)
        return caller

    def _uploads(self, holders: Sequence[str]) -> Uploads:
        return Uploads(
            self._upload_room,
            holders,
            max_image_bytes=self._info.description.limits.max_image_bytes,
            idle_s=self._info.upload_idle_s,
        )

    def _admit(self, caller: pb.Caller) -> None:
        if self.draining:
            raise UnavailableError("the server is draining: use another server")
        self._info.check_model(caller)

    async def _wanted(self, request: pb.FetchRequest, holder: str) -> list[RowRequest]:
        most = self._info.description.limits.max_images_per_call
        if not 0 < len(request.images) <= most:
            raise InvalidRequestError(f"a Fetch call must name 1 to {most} images, got {len(request.images)}")
        if request.HasField("producer"):
            by = Producer.from_message(request.producer)
            key_of = partial(messages.put_image_key, by, salt=request.caller.tenant_salt)
        else:
            key_of = partial(self._key, request.caller)
        # What a peer asks for is for those who brought the images here: see `Claim`.
        claim = partial(_claim, request.caller, "" if holder == PEER else holder, uuid4().hex)
        return await row_requests(request.images, key_of, claim, self._turns, holder)

    def _key(self, caller: pb.Caller, image: pb.ImageName | pb.FetchImage) -> ImageKey:
        return messages.image_key(self._info.recipe, image.digest, image.variant, caller.tenant_salt)


def _claim(
    caller: pb.Caller, holder: str, call_id: str, chunk: int = 0, needed_at: float | None = None
) -> Claim:
    """Return a claim of a call: demanded if there is a `needed_at` (a Fetch), else speculative (a Submit)."""
    return Claim(
        request_id=caller.request_id or call_id,
        holder=holder,
        priority=caller.priority,
        chunk=chunk,
        needed_at=needed_at,
        demanded=needed_at is not None,
    )


def _note_caller(caller: pb.Caller, context: Context, call: Call) -> None:
    """Note in the call's record who makes it."""
    client = caller.client_id or messages.host(context)
    call.made_by(caller.request_id or messages.request_id_of(context), client)


def methods(service: EncoderService, entrance: Entrance, submits: Entrance, max_images: int) -> Methods:
    """Return the methods of a server whose calls name at most `max_images` images; `submits` admits Submit calls."""
    return {
        "Describe": entrance.unary(service.describe, partial(messages.parse, pb.DescribeRequest)),
        "Submit": submits.stream(service.submit, partial(messages.parse_submit, max_images=max_images)),
        "Put": entrance.stream(service.put, partial(messages.parse_put, max_images=max_images)),
        "Fetch": entrance.stream(service.fetch, bytes),  # parsed once its caller is admitted
    }
