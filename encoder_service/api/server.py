"""The gRPC port: the service's calls, admin calls, reflection and health.

Health (`grpc.health.v1`) has Check and Watch. They never queue behind work, and watches end when the server drains.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from functools import partial
from typing import cast

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection, reflection_pb2

from encoder_contract.certificates import Certificates, Pem
from encoder_contract.errors import EncoderError, OverloadedError, Status
from encoder_service.api import admin, messages, service
from encoder_service.api.admin import AdminService
from encoder_service.api.inbound import Answers, CallGate, Inbound, Methods
from encoder_service.api.service import EncoderService
from encoder_service.config import ConfigError, flag
from encoder_service.limits import MAX_CONNECTIONS, MAX_IMAGES_PER_CALL, Budgets, Caller

# Calls of a method that wait until the event loop accepts them. gRPC resets further ones, which clients take for a
# server that stops: they try again. Without this bound, the windows of a thousand calls or more could fill meanwhile.
PENDING_CALLS = 256
OPTIONS = (
    # A few kilobytes of gzip can expand to gigabytes: a compressed message is refused without being expanded.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # The window is what a call may send before anybody reads it, or asks who calls: see `unread_bytes`. By default, it
    # would grow to any size.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.server.max_pending_requests", PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
    ("grpc.max_concurrent_streams", 512),
    # Each connection takes a file descriptor, so one without a call is closed after a minute. Clients reconnect by
    # themselves, and ours keep a health watch open.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # Allow the keepalive pings of clients that detect a silent server within two seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Detect within ten seconds that a caller's machine has disappeared; the pins of its calls are then released.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # a minute by default: see the client's connection
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),  # two servers must not share a port: binding a port in use is an error
)
# The methods that engines call.
REGISTERED = ("Describe", "Submit", "Fetch", "Check", "Watch")
# After the last call, clients have this long to read their last rows and close the connection; closing it earlier would
# lose the rows. By then a client whose machine has disappeared is detected.
LAST_READ_S = 10.0


def unread_bytes(budgets: Budgets, window_bytes: int) -> int:
    """Return the most memory that data takes which callers have sent and the server has not read.

    Calls wait to be accepted, end in a refusal, or send a request: then the rest of a message comes to the window,
    which gRPC may open once more after a message was read. Only calls of Submit and reflection send after their
    request.
    """
    budget_of = budgets.submits, budgets.reflection_calls, budgets.arriving, budgets.strangers
    reading = sum(budget.size for budget in budget_of)
    waiting = budgets.refused.size + PENDING_CALLS * (len(REGISTERED) + 1)
    return (2 * reading + waiting) * window_bytes + reading * messages.max_request_bytes(MAX_IMAGES_PER_CALL)


class Listener:
    """Serves on `address` from `start` to `stop`. Construct it on the event loop that is to serve."""

    def __init__(
        self,
        address: str,
        calls: EncoderService,
        operator: AdminService,
        *,
        certificates: Certificates | None,
        budgets: Budgets,
        window_bytes: int,
    ) -> None:
        """Bind the port, for TLS if there are `certificates`. Raises `ConfigError` if the port is unavailable.

        `budgets` bounds the number of open calls, separately for Submit and for health. A call may send `window_bytes`
        before the server reads.
        """
        window = ("grpc.http2.lookahead_bytes", window_bytes)
        largest = ("grpc.max_receive_message_length", messages.max_request_bytes(MAX_IMAGES_PER_CALL))
        # At most half of the file descriptors, so that the rest is left for other files.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connections = ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, files // 2))
        self._server = grpc.aio.server(options=(*OPTIONS, window, largest, connections))
        self._gate = CallGate(budgets.calls, budgets.arriving, budgets.refused, budgets.reader_idle_s)
        self._submit_gate = CallGate(
            budgets.submits, budgets.arriving, budgets.refused, budgets.reader_idle_s
        )
        self._health = Health(("", service.SERVICE), budgets)
        self._serve(
            service.SERVICE, service.methods(calls, self._gate, self._submit_gate, MAX_IMAGES_PER_CALL)
        )
        self._serve(admin.SERVICE, admin.methods(operator, self._gate))
        self._serve(SERVICE, self._health.methods())
        self._serve(reflection.SERVICE_NAME, _reflection(budgets))
        try:
            if certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(certificates))
        except RuntimeError as error:
            raise ConfigError(
                f"{flag('listen')} {address}: the address is taken, or does not belong to this host; "
                "port 0 picks a free port"
            ) from error
        host = address.rpartition(":")[0]
        self.endpoint = address if address.startswith("unix:") else f"{host}:{port}"

    def _serve(self, name: str, methods: Methods) -> None:
        """Serve the methods of a service.

        gRPC accepts calls one at a time for each registered method, and one at a time for all unregistered methods
        together. So engines' methods are registered: a burst of Fetch calls must not delay Describe or health.
        """
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
        registered = {method: handler for method, handler in methods.items() if method in REGISTERED}
        self._server.add_registered_method_handlers(name, registered)

    async def start(self) -> None:
        """Start to answer calls, and report health as serving."""
        await self._server.start()
        self._health.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        """Report health as serving or not, until `stop`."""
        self._health.set_serving(serving)

    def abort_calls(self) -> None:
        """End running calls now, regardless of the grace period passed to `stop`."""
        self._aborting = asyncio.create_task(self._server.stop(0), name="abort-calls")

    async def stop(self, grace_s: float) -> None:
        """Report health as not serving, refuse new calls, and let running calls finish for at most `grace_s`.

        Wait up to `LAST_READ_S` more for health watchers, and for callers that do not read.
        """
        async with asyncio.TaskGroup() as group:
            try:
                await self._health.stop()
                stopping = group.create_task(self._server.stop(grace_s), name="stop")
                idle = group.create_task(self._wait_idle(), name="idle")
                await asyncio.wait({stopping, idle}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({stopping}, timeout=LAST_READ_S)
                idle.cancel()
            finally:
                await self._server.stop(0)  # this also ends `stopping`

    async def _wait_idle(self) -> None:
        await self._submit_gate.wait_idle()
        await self._gate.wait_idle()


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that are reloaded when their files change: gRPC asks for newer ones at every handshake."""
    in_use = certificates.pem

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal in_use
        before, in_use = in_use, certificates.pem
        return configuration(in_use) if in_use.version != before.version else None

    # gRPC accepts None for "no newer ones", which its type stubs lack.
    fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], newer)
    return grpc.dynamic_ssl_server_credentials(
        configuration(in_use), fetcher, require_client_authentication=bool(in_use.ca)
    )


def _reflection(budgets: Budgets) -> Methods:
    gate = CallGate(budgets.reflection_calls, budgets.strangers, budgets.refused, budgets.reader_idle_s)
    names = (service.SERVICE, admin.SERVICE, SERVICE, reflection.SERVICE_NAME)
    answers = cast(
        "Callable[[object, None], Answers]", reflection.aio.ReflectionServicer(names).ServerReflectionInfo
    )

    async def reflect(call: Inbound[Message]) -> Answers:
        gate.admit(call)
        return answers(call.requests, None)

    return {
        "ServerReflectionInfo": gate.stream(
            reflect, partial(messages.parse, reflection_pb2.ServerReflectionRequest)
        )
    }


SERVICE: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
# A client has one watch per channel; all Unix-socket connections of the host count as one.
MAX_WATCHES_PER_CONNECTION = 64
# How long `Health.stop` waits for watchers to be notified; a watcher that reads is notified within milliseconds.
NOTIFY_S = 1.0
READER_IDLE_S = (
    30.0  # an answer has two bytes, so a caller that does not read it in this time has stopped reading
)

SERVING: int = pb.HealthCheckResponse.SERVING
NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN: int = pb.HealthCheckResponse.SERVICE_UNKNOWN


class UnknownServiceError(EncoderError):
    """The server has no service of this name."""

    status, retryable = Status.NOT_FOUND, False


class Health:
    """The health of the server and its services `names`: not serving before `set_serving`, and again from `stop` on."""

    def __init__(self, names: Collection[str], budgets: Budgets) -> None:
        self._names = frozenset(names)
        self._status = NOT_SERVING
        self._changed = asyncio.Event()  # set, and replaced by a new event, at every change
        self._stopping = False
        self._watches: Counter[str] = Counter()
        self._gate = CallGate(budgets.health_calls, budgets.strangers, budgets.refused, READER_IDLE_S)

    def methods(self) -> Methods:
        """Return the methods of the service."""
        parse = partial(messages.parse, pb.HealthCheckRequest)
        return {
            "Check": self._gate.unary(self.check, parse),
            "Watch": self._gate.one_request(self.watch, parse),
        }

    def set_serving(self, serving: bool) -> None:
        """Report whether the server is serving. Does nothing from `stop` on."""
        if not self._stopping:
            self._set_status(SERVING if serving else NOT_SERVING)

    async def stop(self) -> None:
        """Report to every watcher that the server no longer serves, and wait until all that read are notified."""
        self._stopping = True
        self._set_status(NOT_SERVING)
        try:
            async with asyncio.timeout(NOTIFY_S):
                await self._gate.wait_idle()
        except TimeoutError:
            return

    async def check(self, request: pb.HealthCheckRequest, _caller: Caller) -> pb.HealthCheckResponse:
        """Answer once; an unknown name is NOT_FOUND, as the protocol requires."""
        if request.service not in self._names:
            raise UnknownServiceError(f"this server has no service {request.service[:128]!r}")
        return pb.HealthCheckResponse(status=self._status)

    async def watch(
        self, request: pb.HealthCheckRequest, call: Inbound[pb.HealthCheckRequest]
    ) -> AsyncGenerator[pb.HealthCheckResponse]:
        """Answer now and at every change, until the server stops."""
        connection = call.caller.connection
        if self._watches[connection] >= MAX_WATCHES_PER_CONNECTION:
            raise OverloadedError(
                f"a connection may have at most {MAX_WATCHES_PER_CONNECTION} health watches: end others first"
            )
        self._watches[connection] += 1
        try:
            async for status in self._changes(request.service):
                yield pb.HealthCheckResponse(status=status)
        finally:
            self._watches -= Counter({connection: 1})

    async def _changes(self, name: str) -> AsyncGenerator[int]:
        while True:
            changed, stopping = self._changed, self._stopping
            yield self._status if name in self._names else UNKNOWN
            if stopping:
                return
            await changed.wait()

    def _set_status(self, status: int) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()
