"""The gRPC service: Describe, Submit and Fetch. No method blocks the event loop."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from time import monotonic

from encoder_contract.errors import UnavailableError
from encoder_contract.turns import Turns
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.describe import ModelForCalls
from encoder_service.api.fetch import FetchCall, owed_messages
from encoder_service.api.inbound import CallGate, CallRecord, Inbound, Methods
from encoder_service.api.messages import RawSubmit
from encoder_service.api.submit import SubmitCall, Uploads
from encoder_service.api.tenants import Tenant
from encoder_service.limits import AT_A_TIME, Budgets, Caller
from encoder_service.metrics import Metrics

SERVICE = "encoder_contract.v1.EncoderService"


class EncoderService:
    """Serves the calls of all connections, on one event loop."""

    def __init__(self, served: ModelForCalls, metrics: Metrics, budgets: Budgets) -> None:
        self._served = served
        self._retired: ModelForCalls | None = None
        self._metrics = metrics
        self._budgets = budgets
        self._turns = Turns(AT_A_TIME)
        self.draining = False

    def serve(self, served: ModelForCalls) -> None:
        """Have new calls get another model. Calls that are open keep theirs, and so do Fetches, until `end_retired`."""
        self._retired, self._served = self._served, served

    def end_retired(self) -> None:
        """Refuse calls for the model before."""
        self._retired = None

    def identify(self, caller: Caller) -> None:
        """Raise `UnauthenticatedError` unless the caller is a tenant, or everybody may call."""
        self._served.info.identity.require(None, caller)

    async def describe(self, _request: pb.DescribeRequest, caller: Caller) -> pb.DescribeResponse:
        """Describe this server, to any tenant."""
        info = self._served.info
        description = pb.DescribeResponse()
        description.CopyFrom(info.description)
        description.clock_s = monotonic()
        description.patches_per_s = self._served.images.patches_per_s
        info.transports.describe(description, is_local=caller.is_local)
        return description

    async def submit(self, inbound: Inbound[RawSubmit]) -> AsyncGenerator[pb.SubmitResponse]:
        """Accept images; return the answers to them. See the contract."""
        record = CallRecord(self._metrics, "submit", inbound)
        tenant = self._served.info.identity.require("submit", inbound.caller)  # before anything is read
        inbound.gate.admit(inbound)
        first = await inbound.requests.first()
        message = first.caller()
        caller = self._admitted(tenant, inbound.caller, message, record)
        served = self._served
        served.info.check_model(message)
        inbound.resources.enter_context(served.used())
        limits = served.info.description.limits
        uploads = Uploads(
            inbound.resources.push(self._budgets.upload_bytes.hold(caller, 0)),
            max_image_bytes=limits.max_image_bytes,
            max_video_bytes=limits.max_video_bytes,
            message_bytes=limits.max_message_bytes,
            idle_s=self._budgets.upload_idle_s,
        )
        call = SubmitCall(served.images, uploads, record, inbound.requests, caller, served.info, self._turns)
        inbound.resources.callback(call.close)
        return call.answers(replace(first, open=None))

    async def fetch(self, inbound: Inbound[bytes]) -> AsyncGenerator[bytes]:
        """Find rows; return the messages that stream them. See the contract."""
        record = CallRecord(self._metrics, "fetch", inbound)
        info, tenant, is_peer = self._served.info, None, False
        arriving = self._budgets.strangers
        # The signature of another replica can be checked only with the request: until then, it has no place.
        if not inbound.caller.signature:
            tenant = info.identity.require("fetch", inbound.caller)  # before anything is read
            inbound.gate.admit(inbound)
            arriving = self._budgets.arriving
        with arriving.hold(inbound.caller):
            raw = await inbound.requests.only()
        if inbound.caller.signature:
            is_peer = info.identity.is_peer(raw, inbound.caller)
            if not is_peer:
                tenant = info.identity.require("fetch", inbound.caller)  # before anything is parsed
            inbound.gate.admit(inbound)
        request = messages.parse_fetch(raw, info.max_images)
        caller = self._admitted(tenant, inbound.caller, request.caller, record, is_peer=is_peer)
        served = self._served_to(request.caller)
        inbound.resources.enter_context(served.used())
        messages_owed = owed_messages(request, served.info.row_bytes)
        owed = inbound.resources.push(self._budgets.fetched_messages.hold(caller, messages_owed))
        call = FetchCall(
            request, served.images, record, caller, served.info, self._turns, self._budgets, owed
        )
        return call.answers()

    def _admitted(
        self,
        tenant: Tenant | None,
        caller: Caller,
        message: pb.Caller,
        record: CallRecord,
        *,
        is_peer: bool = False,
    ) -> Caller:
        """Return the caller, completed from its `message`, and enter it in the call's record.

        Raises as `Identity.admit` does, and `UnavailableError` during a drain.
        """
        record.request_id = message.request_id or record.request_id
        record.client_id = message.client_id or record.client_id
        identity = self._served.info.identity
        caller = identity.admit_peer(caller, message) if is_peer else identity.admit(tenant, caller, message)
        record.admitted(caller)
        if self.draining:
            raise UnavailableError("the server is draining: use another server")
        return caller

    def _served_to(self, caller: pb.Caller) -> ModelForCalls:
        """Return the model that a Fetch gets: the one before, if it names that one. Raises `ModelMismatchError`."""
        if self._retired is not None and caller.model_fingerprint == self._retired.info.recipe.model:
            return self._retired
        self._served.info.check_model(caller)
        return self._served


def methods(service: EncoderService, gate: CallGate, submit_gate: CallGate, max_images: int) -> Methods:
    """Return the methods of a server whose calls name at most `max_images` images each.

    `submit_gate` admits Submit calls, `gate` all others.
    """
    return {
        "Describe": gate.unary(
            service.describe, partial(messages.parse, pb.DescribeRequest), service.identify
        ),
        "Submit": submit_gate.stream(
            service.submit, partial(messages.parse_submit, max_images=max_images), messages.submit_refusal
        ),
        # `fetch` parses its request itself, after it has checked the caller's rights.
        "Fetch": gate.stream(service.fetch, bytes),
    }
