"""Health, as `grpc.health.v1` has it: Check and Watch, which wait for no work, and end with the server's."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from functools import partial

import grpc
from grpc_health.v1 import health_pb2 as pb

from encoder_contract.errors import OverloadedError
from encoder_service.api import messages
from encoder_service.api.inbound import Entrance
from encoder_service.api.messages import Context

SERVICE: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
# Checks and watches at a time, besides the server's other calls: the channels of all its clients, and who probes it.
MAX_CALLS = 512
# A client watches once for each of its channels; all of a host's Unix sockets count as one connection.
MAX_WATCHES_OF_A_CONNECTION = 64
# Watchers who read hear within milliseconds that the server ends; the others are not waited for.
FAREWELL_S = 1.0
READER_IDLE_S = 30.0  # an answer has two bytes: who does not take it in this time takes none

SERVING: int = pb.HealthCheckResponse.SERVING
NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN: int = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The health of the server and of its services `names`, which is one: not serving, serving, then never again."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._status = NOT_SERVING
        self._turned = asyncio.Event()  # set and replaced at every change
        self._ending = False
        self._watches: Counter[str] = Counter()
        self._entrance = Entrance(MAX_CALLS, READER_IDLE_S)

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """Return what to add to a server."""
        parse = partial(messages.parse, pb.HealthCheckRequest)
        methods = {
            "Check": self._entrance.unary(self.check, parse),
            "Watch": self._entrance.one_request(self.watch, parse),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def begin(self) -> None:
        """Say that the server serves."""
        self._turn(SERVING)

    async def end(self) -> None:
        """Tell every watcher that it no longer does, and return when those who read have been told."""
        self._ending = True
        self._turn(NOT_SERVING)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._entrance.emptied()
        except TimeoutError:
            return

    async def check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Answer once; an unknown name is NOT_FOUND, as the protocol says."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
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
