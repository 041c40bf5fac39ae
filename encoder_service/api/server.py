"""The gRPC port, with the service's calls, admin calls, reflection and health.

Health (`grpc.health.v1`) has Check and Watch, which never queue behind work and end when the server drains.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from functools import partial
from typing import cast

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection, reflection_pb2

from encoder_contract.certificates import Certificates, Pem
from encoder_contract.errors import EncoderError, OverloadedError, Status
from encoder_service.api import admin, messages, service
from encoder_service.api.admin import AdminService
from encoder_service.api.connections import keep_room
from encoder_service.api.inbound import Answers, Entrance, Inbound, Methods
from encoder_service.api.service import EncoderService
from encoder_service.config import ConfigError, flag
from encoder_service.limits import Budget, Budgets, Caller

OPTIONS = (
    # A few kilobytes of gzip can expand to gigabytes: a compressed message is refused without being expanded.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # The unread data of a call, and the calls of a connection: with the size of a message and the number of open calls,
    # they bound the memory that is not counted elsewhere. Otherwise the window would grow to megabytes.
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", 512),
    # Each connection takes a file descriptor. One without a call is closed after a minute; clients connect again by
    # themselves, and ours keep a call to health open.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # Allow the keepalive pings of clients that detect a silent server within two seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # A caller whose machine disappears is detected within ten seconds, and the pins of its calls are released.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # a minute by default: see the client's connection
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),  # a taken port is an error: two servers must not share it
)
# More than a cluster needs. Half of the file descriptors are left for all else.
MAX_CONNECTIONS = 4096
# After the last call, a client has this long to take its last rows and close the connection. Cut before, it would lose
# them. One whose machine disappeared is detected by then.
GOODBYE_S = 10.0


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
        max_images: int,
        piece_bytes: int,
    ) -> None:
        """Bind the port, for TLS with `certificates`. Raises `ConfigError` if it is unavailable.

        How many calls may be open is in `budgets`; those of Submit and of health have places of their own. Each names
        at most `max_images` and sends pieces of at most `piece_bytes`.
        """
        largest = ("grpc.max_receive_message_length", messages.max_request_bytes(max_images, piece_bytes))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_connections = min(MAX_CONNECTIONS, files // 2)
        connections = ("grpc.max_allowed_incoming_connections", self._most_connections)
        self._server = grpc.aio.server(options=(*OPTIONS, largest, connections))
        self._entrance = Entrance(budgets.calls, budgets.reader_idle_s)
        self._submits = Entrance(budgets.submits, budgets.reader_idle_s)
        self._health = Health(("", service.SERVICE), budgets.health_calls)
        self._offer(service.SERVICE, service.methods(calls, self._entrance, self._submits, max_images))
        self._offer(admin.SERVICE, admin.methods(operator, self._entrance))
        self._offer(SERVICE, self._health.methods())
        self._offer(reflection.SERVICE_NAME, _reflection(self._entrance))
        try:
            if certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(certificates))
        except RuntimeError as error:
            raise ConfigError(
                f"{flag('listen')} {address}: the address is taken or not one of this host; port 0 picks a free port"
            ) from error
        self._port = port
        host = address.rpartition(":")[0]
        self.endpoint = address if address.startswith("unix:") else f"{host}:{port}"

    def _offer(self, name: str, methods: Methods) -> None:
        """Serve the methods of a service.

        gRPC accepts one call after the other of each method that is registered, and of all others together: a burst of
        Fetch calls must not keep Describe and health waiting. Releases that cannot register take the generic handler.
        """
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
        self._server.add_registered_method_handlers(name, methods)

    async def start(self) -> None:
        """Start to answer calls, and report health as serving."""
        await self._server.start()
        self._keeping_room = asyncio.create_task(
            keep_room(self._port, self._most_connections), name="connections"
        )
        self._health.begin()

    def cut(self) -> None:
        """End running calls now, regardless of the grace that `stop` was given."""
        self._cutting = asyncio.create_task(self._server.stop(0), name="cut")

    async def stop(self, grace_s: float) -> None:
        """Report health as not serving, refuse new calls, and let running calls finish for at most `grace_s`.

        Health watchers and callers that do not read are waited for `GOODBYE_S`.
        """
        try:
            await self._health.end()
            stopping = asyncio.create_task(self._server.stop(grace_s), name="stop")
            emptied = asyncio.create_task(self._emptied(), name="emptied")
            await asyncio.wait({stopping, emptied}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({stopping}, timeout=GOODBYE_S)
            emptied.cancel()
        finally:
            self._keeping_room.cancel()
            await self._server.stop(0)

    async def _emptied(self) -> None:
        await self._submits.emptied()
        await self._entrance.emptied()


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that follow the files: gRPC asks at every handshake whether there are newer ones."""
    in_use = certificates.pem

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal in_use
        before, in_use = in_use, certificates.pem
        return configuration(in_use) if in_use.version != before.version else None

    # gRPC takes None for "no newer ones"; its stubs do not say so.
    fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], newer)
    return grpc.dynamic_ssl_server_credentials(
        configuration(in_use), fetcher, require_client_authentication=bool(in_use.ca)
    )


def _reflection(entrance: Entrance) -> Methods:
    names = (service.SERVICE, admin.SERVICE, SERVICE, reflection.SERVICE_NAME)
    answers = cast(
        "Callable[[object, None], Answers]", reflection.aio.ReflectionServicer(names).ServerReflectionInfo
    )
    parse = partial(messages.parse, reflection_pb2.ServerReflectionRequest)
    return {"ServerReflectionInfo": entrance.stream(lambda call: answers(call.requests, None), parse)}


SERVICE: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
# A client has one watch per channel; all Unix-socket connections of the host count as one.
MAX_WATCHES_OF_A_CONNECTION = 64
# Watchers that read are notified within milliseconds that the server ends; others are not waited for.
FAREWELL_S = 1.0
READER_IDLE_S = 30.0  # an answer has two bytes: a caller that does not read it in this time reads nothing

SERVING: int = pb.HealthCheckResponse.SERVING
NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN: int = pb.HealthCheckResponse.SERVICE_UNKNOWN


class UnknownServiceError(EncoderError):
    """The server has no service of this name."""

    status, retryable = Status.NOT_FOUND, False


class Health:
    """The health of the server and its services `names`: not serving, then serving, then not serving for good."""

    def __init__(self, names: Collection[str], places: Budget) -> None:
        self._names = frozenset(names)
        self._status = NOT_SERVING
        self._turned = asyncio.Event()  # set, and replaced by a new event, at every change
        self._ending = False
        self._watches: Counter[str] = Counter()
        self._entrance = Entrance(places, READER_IDLE_S)

    def methods(self) -> Methods:
        """Return the methods of the service."""
        parse = partial(messages.parse, pb.HealthCheckRequest)
        return {
            "Check": self._entrance.unary(self.check, parse),
            "Watch": self._entrance.one_request(self.watch, parse),
        }

    def begin(self) -> None:
        """Report that the server is serving."""
        self._turn(SERVING)

    async def end(self) -> None:
        """Report to every watcher that the server no longer serves; return when those that read have been notified."""
        self._ending = True
        self._turn(NOT_SERVING)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._entrance.emptied()
        except TimeoutError:
            return

    async def check(self, request: pb.HealthCheckRequest, _caller: Caller) -> pb.HealthCheckResponse:
        """Answer once; an unknown name is NOT_FOUND, as the protocol requires."""
        if request.service not in self._names:
            raise UnknownServiceError("no such service")
        return pb.HealthCheckResponse(status=self._status)

    async def watch(
        self, request: pb.HealthCheckRequest, call: Inbound[pb.HealthCheckRequest]
    ) -> AsyncGenerator[pb.HealthCheckResponse]:
        """Answer now and at every change, until the server ends."""
        connection = call.caller.connection
        if self._watches[connection] >= MAX_WATCHES_OF_A_CONNECTION:
            raise OverloadedError(
                f"a connection may have at most {MAX_WATCHES_OF_A_CONNECTION} health watches"
            )
        self._watches[connection] += 1
        try:
            async for status in self._changes(request.service):
                yield pb.HealthCheckResponse(status=status)
        finally:
            self._watches -= Counter({connection: 1})

    async def _changes(self, name: str) -> AsyncGenerator[int]:
        while True:
            turned, ending = self._turned, self._ending
            yield self._status if name in self._names else UNKNOWN
            if ending:
                return
            await turned.wait()

    def _turn(self, status: int) -> None:
        self._status = status
        self._turned.set()
        self._turned = asyncio.Event()
