"""Health (`grpc.health.v1`): Check and Watch, which never queue behind work and end when the server drains."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from functools import partial

from grpc_health.v1 import health_pb2 as pb

from encoder_contract.errors import OverloadedError, Status
from encoder_service.api import messages
from encoder_service.api.inbound import Entrance, Methods
from encoder_service.api.messages import Context

SERVICE: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
# Concurrent checks and watches, not counted as other calls: the channels of all clients, and probes.
MAX_CALLS = 512
# A client has one watch per channel; all Unix-socket connections of the host count as one.
MAX_WATCHES_OF_A_CONNECTION = 64
# Watchers that read are notified within milliseconds that the server ends; others are not waited for.
FAREWELL_S = 1.0
READER_IDLE_S = 30.0  # an answer has two bytes: a caller that does not read it in this time reads nothing

SERVING: int = pb.HealthCheckResponse.SERVING
NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN: int = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The health of the server and its services `names`: not serving, then serving, then not serving for good."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._status = NOT_SERVING
        self._turned = asyncio.Event()  # set, and replaced by a new event, at every change
        self._ending = False
        self._watches: Counter[str] = Counter()
        self._entrance = Entrance(MAX_CALLS, READER_IDLE_S)

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

    async def check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Answer once; an unknown name is NOT_FOUND, as the protocol requires."""
        if request.service not in self._names:
            messages.end_with(context, Status.NOT_FOUND, "no such service")
        return pb.HealthCheckResponse(status=self._status)

    async def watch(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[pb.HealthCheckResponse]:
        """Answer now and at every change, until the server ends."""
        connection: str = context.peer()
        if self._watches[connection] >= MAX_WATCHES_OF_A_CONNECTION:
            raise OverloadedError(f"a connection has at most {MAX_WATCHES_OF_A_CONNECTION} health watches")
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
