"""The gRPC edge: Describe, Submit and Fetch over an `Encoder`. Nothing here blocks the event loop."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import monotonic
from uuid import uuid4

import grpc

from encoder_contract.errors import InvalidRequestError, ModelMismatchError, UnavailableError
from encoder_contract.geometry import Geometry
from encoder_contract.traceparent import TRACEPARENT, trace_id
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.address import ImageKey, Recipe
from encoder_service.api import messages
from encoder_service.api.call_log import Call
from encoder_service.api.fetch import RowFormat, RowRequest, fetch, rows_anywhere, rows_of_this_replica
from encoder_service.api.inbound import Entrance, Requests
from encoder_service.api.messages import Context
from encoder_service.api.pin_budget import PinRoom
from encoder_service.api.submit import SubmitCall
from encoder_service.api.upload_budget import Uploads
from encoder_service.encoder import Encoder
from encoder_service.engine.row_finder import RowFinder
from encoder_service.observability.metrics import Metrics
from encoder_service.scheduler import Claim
from encoder_service.scheduler.shares import Shares
from encoder_service.scheduler.turns import Turns
from encoder_service.transport import Transports

SERVICE = "encoder_contract.v1.EncoderService"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the edge needs to know of the server: its description, limits and transports."""

    description: pb.DescribeResponse
    recipe: Recipe
    geometry: Geometry
    rows: RowFormat
    transports: Transports
    max_upload_bytes: int
    upload_idle_s: float
    max_pinned_bytes: int
    max_fetched_images: int


class EncoderService:
    """The three calls. One instance serves all connections, on one event loop."""

    def __init__(self, encoder: Encoder, finder: RowFinder, edge: ServerInfo, metrics: Metrics) -> None:
        self._encoder = encoder
        self._finder = finder
        self._edge = edge
        self._metrics = metrics
        self._upload_room = Shares(edge.max_upload_bytes, "uploads")
        self._pin_room = PinRoom(edge.max_pinned_bytes)
        # Refused as a whole, and before anything is done for it: that has to cost less than asking again.
        self._fetch_room = Shares(edge.max_fetched_images, "images in Fetch calls")
        self._turns = Turns()
        self.draining = False

    @property
    def held_upload_bytes(self) -> int:
        """Bytes set aside for images on their way up."""
        return self._upload_room.held

    @property
    def pinned_bytes(self) -> int:
        """Bytes of rows that running Fetches keep pinned, by what they have counted."""
        return self._pin_room.held_bytes

    async def describe(self, _request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Say what this server is."""
        description = pb.DescribeResponse()
        description.CopyFrom(self._edge.description)
        description.clock_s = monotonic()
        self._edge.transports.describe(description, is_local=messages.is_local(context))
        return description

    async def submit(
        self, requests: Requests[pb.SubmitRequest], context: Context
    ) -> AsyncGenerator[pb.SubmitResponse]:
        """Take images over; see the contract."""
        submitting: SubmitCall | None = None
        call = Call(self._metrics, "submit")
        call.traced(_trace_id(context))
        try:
            async with messages.Border(context, call.failed):
                caller = await self._opened(requests)
                call.made_by(_request_id(caller, context), caller.client_id or messages.host(context))
                submitting = self._submitting(caller, call, context)
                async for answer in submitting.answers(requests):
                    yield answer
                # The requests of a call that was cancelled end as those of one that is complete do, a moment before
                # anything else is heard of it. But only who is still there can be told something.
                yield pb.SubmitResponse()
                call.complete = True
        finally:
            if submitting is not None:
                submitting.close(withdraw=not call.complete)
            call.close()

    async def fetch(
        self, request: pb.FetchRequest, context: Context
    ) -> AsyncGenerator[pb.FetchResponse | bytes]:
        """Stream rows; see the contract."""
        caller = request.caller
        call = Call(self._metrics, "fetch")
        call.made_by(_request_id(caller, context), caller.client_id or messages.host(context))
        call.traced(_trace_id(context))
        client, held = (caller.client_id or messages.host(context),), 0
        try:
            async with messages.Border(context, call.failed):
                self._admit(caller)
                self._fetch_room.take(client, len(request.images))
                held = len(request.images)
                # A caller who left releases its pins now, not when memory is collected.
                async with aclosing(await self._fetching(request, call, context)) as answers:
                    async for message in answers:
                        yield message
        finally:
            self._fetch_room.give_back(client, held)
            call.close()

    def _submitting(self, caller: pb.Caller, call: Call, context: Context) -> SubmitCall:
        limits = self._edge.description.limits
        return SubmitCall(
            self._encoder,
            self._uploads(caller, context),
            call,
            new_claim=partial(_claim, caller, uuid4().hex, context),
            new_key=partial(self._key, caller),
            tokens=self._edge.geometry.tokens,
            max_images=limits.max_images_per_call,
        )

    async def _fetching(
        self, request: pb.FetchRequest, call: Call, context: Context
    ) -> AsyncGenerator[pb.FetchResponse | bytes]:
        wanted = self._wanted(request, context)
        grace_ms = min(request.grace_ms, self._edge.description.limits.max_grace_ms)
        rows_of = (
            rows_of_this_replica(self._finder)
            if request.local_only
            else await rows_anywhere(self._finder, wanted, grace_ms / 1000)
        )
        return fetch(
            rows_of,
            wanted,
            call,
            sender=self._edge.transports.choose(request, is_local=messages.is_local(context)),
            rows=self._edge.rows,
            pin_room=self._pin_room,
            turns=self._turns,
        )

    async def _opened(self, requests: Requests[pb.SubmitRequest]) -> pb.Caller:
        first = await requests.first()
        if first.WhichOneof("message") != "open":
            raise InvalidRequestError("the first message of a Submit call is `open`")
        self._admit(first.open)
        return first.open

    def _uploads(self, caller: pb.Caller, context: Context) -> Uploads:
        host = messages.host(context)  # a name costs nothing: who invents many has the share of one host
        return Uploads(
            self._upload_room,
            {f"client {caller.client_id or host}", f"host {host}"},
            max_image_bytes=self._edge.description.limits.max_image_bytes,
            idle_s=self._edge.upload_idle_s,
        )

    def _admit(self, caller: pb.Caller) -> None:
        if self.draining:
            raise UnavailableError("the server is draining: use another one")
        messages.check_caller(caller)
        ours = self._edge.description
        for what, theirs, expected in (
            ("model", caller.model_fingerprint, ours.model_fingerprint),
            ("processor", caller.processor_fingerprint, ours.processor_fingerprint),
        ):
            if theirs and theirs != expected:
                raise ModelMismatchError(
                    f"{what} fingerprint: the call is for {theirs.hex()}, this server has {expected.hex()}"
                )

    def _wanted(self, request: pb.FetchRequest, context: Context) -> list[RowRequest]:
        most = self._edge.description.limits.max_images_per_call
        if not 0 < len(request.images) <= most:
            raise InvalidRequestError(f"a Fetch call names 1 to {most} images, got {len(request.images)}")
        if len({image.index for image in request.images}) < len(request.images):
            raise InvalidRequestError("two images of the call have the same index")
        now = monotonic()
        call_id = uuid4().hex
        return [
            RowRequest(
                image.index,
                self._key(request.caller, image),
                image.row_begin,
                image.row_end,
                _claim(request.caller, call_id, context, image.chunk, now + image.needed_in_ms / 1000),
            )
            for image in request.images
        ]

    def _key(self, caller: pb.Caller, image: pb.ImageName | pb.FetchImage) -> ImageKey:
        return messages.image_key(self._edge.recipe, image.digest, image.variant, caller.tenant_salt)


def _claim(
    caller: pb.Caller,
    call_id: str,
    context: Context,
    chunk: int = 0,
    needed_at: float | None = None,
) -> Claim:
    """Return a claim of a call: demanded when it says by when (a Fetch), else speculative (a Submit)."""
    return Claim(
        request_id=caller.request_id or call_id,
        client_id=caller.client_id or messages.host(context),
        priority=caller.priority,
        chunk=chunk,
        needed_at=needed_at,
        demanded=needed_at is not None,
    )


def _request_id(caller: pb.Caller, context: Context) -> str:
    """Return the request's name for the log: the caller's, or what a proxy or framework put into the metadata."""
    if caller.request_id:
        return caller.request_id
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get("x-request-id", ""))


def _trace_id(context: Context) -> str:
    """Return the id of the OpenTelemetry trace that the call belongs to, or nothing."""
    return trace_id(str(dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")))


def generic_handler(service: EncoderService, entrance: Entrance, max_images: int) -> grpc.GenericRpcHandler:
    """Return the handler to add to a server whose calls name at most `max_images` images."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Describe": entrance.unary(service.describe, partial(messages.parse, pb.DescribeRequest)),
            "Submit": entrance.stream(service.submit, partial(messages.parse_submit, max_images=max_images)),
            "Fetch": entrance.one_request(
                service.fetch,
                partial(messages.parse, pb.FetchRequest, max_bytes=messages.names_bytes(max_images)),
            ),
        },
    )
