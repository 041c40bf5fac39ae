"""A running Fetch call: outcomes as they arrive. The open call holds rows that stay at the server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeAlias

import grpc

from encoder_contract.errors import DeadlineError, InternalError, StaleHandleError
from encoder_contract.geometry import Grid
from encoder_contract.stream import RowReader
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.images import FetchedRows, RowRequest, ServerClock
from prefill_client.transport import Receiver, transport_of
from prefill_client.transport.channels import from_message
from prefill_client.transport.exchange import Exchange
from prefill_client.transport.receiver import Arrival

_SOURCES = {
    pb.SOURCE_DEVICE: "device",
    pb.SOURCE_HOST: "host",
    pb.SOURCE_PEER: "peer",
    pb.SOURCE_ENCODED: "encoded",
}


_Arriving: TypeAlias = tuple[pb.ImageReady, Arrival]


class RowStream(Exchange):
    """A running Fetch call. Iterate it for one outcome per request, in the order in which they become ready.

    The server holds shared rows until `close`. Therefore the call has no deadline; `timeout_s` bounds the wait for the
    outcomes.
    """

    def __init__(
        self,
        call: Any,
        requests: Sequence[RowRequest],
        receivers: Mapping[str, Receiver],
        endpoint: str,
        clock: ServerClock,
        timeout_s: float,
    ) -> None:
        super().__init__(call, endpoint)
        self._deadline = monotonic() + timeout_s
        self._holds = False
        self._requests = requests
        self._receivers = receivers
        self._clock = clock
        self._reader = RowReader(self._announced)
        # Images that arrive beside the call, and the read of the next message meanwhile.
        self._filling: dict[asyncio.Task[None], _Arriving] = {}
        self._reading: asyncio.Future[Any] | None = None
        self._has_ended = False

    async def __aiter__(self) -> AsyncIterator[FetchedRows]:
        left = {*range(len(self._requests))}
        try:
            while left:
                for outcome in await self._next():
                    if outcome.index in left:
                        left.discard(outcome.index)
                        yield outcome
        finally:
            for filling in self._filling:
                filling.cancel()
            if self._reading is not None and not self._holds:
                self.close()  # the server may still offer rows that could not be reached

    async def _next(self) -> list[FetchedRows]:
        """Return the next outcomes, which may be none."""
        if not self._filling and self._reading is None:
            return self._process(await self._read_in_time())
        if self._reading is None and not self._has_ended:
            self._reading = asyncio.ensure_future(self._read_or_end())
            self._reading.add_done_callback(_retrieve_exception)
        awaited: set[asyncio.Future[Any]] = {*self._filling, *([self._reading] if self._reading else [])}
        left_s = max(0.0, self._deadline - monotonic())
        done, _ = await asyncio.wait(awaited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise DeadlineError(f"{self._endpoint}: the deadline passed")
        failures = {filling: _failure(filling) for filling in self._filling if filling in done}
        if arrived := [filling for filling, error in failures.items() if error is None]:
            return [self._outcome(*self._filling.pop(filling)) for filling in arrived]
        for error in filter(None, failures.values()):
            # The server offers further images only once these are sent: another call has to fetch them all.
            raise error
        assert self._reading is not None
        message, self._reading = self._reading.result(), None
        if message is not grpc.aio.EOF:
            return self._process(message)
        if not self._filling:
            raise await self._ended_early()
        self._has_ended = True  # the last bytes are on their way
        return []

    async def _read_in_time(self) -> Any:
        reading: Awaitable[Any] = self._read()
        if self._holds:
            # Cancelling a read would end the call, which holds the rows that have arrived.
            reading = asyncio.ensure_future(reading)
            reading.add_done_callback(_retrieve_exception)
            reading = asyncio.shield(reading)
        try:
            async with asyncio.timeout(self._deadline - monotonic()):
                return await reading
        except TimeoutError:
            if not self._holds:
                self.close()
            raise DeadlineError(f"{self._endpoint}: the deadline passed") from None

    def _process(self, message: pb.FetchResponse | tuple[int, memoryview]) -> list[FetchedRows]:
        """Process a message. Return the outcomes that it completes."""
        outcomes = [] if isinstance(message, tuple) else self._failed(message.errors)
        for ready, arrival in self._reader.read(message):
            if arrival.beside:
                filling = asyncio.create_task(arrival.fill())
                filling.add_done_callback(_retrieve_exception)
                self._filling[filling] = ready, arrival
            else:
                outcomes.append(self._outcome(ready, arrival))
        return outcomes

    def _failed(self, errors: Sequence[pb.ImageError]) -> list[FetchedRows]:
        """Return the outcomes of images that failed. Their transfers beside the call end."""
        failed = {error.index for error in errors}
        for filling in [each for each, (ready, _) in self._filling.items() if ready.index in failed]:
            del self._filling[filling]
            filling.cancel()
        return [
            FetchedRows(error.index, self._request_of(error.index).digest, error=from_message(error))
            for error in errors
        ]

    def _request_of(self, window: int) -> RowRequest:
        """Return the request of a window. Raises `InternalError` if there is none."""
        if window >= len(self._requests):
            raise InternalError(
                f"{self._endpoint}: the server answers window {window}, but {len(self._requests)} were requested"
            )
        return self._requests[window]

    def _announced(self, ready: pb.ImageReady) -> Arrival:
        self._request_of(ready.index)
        transport = transport_of(ready)
        if transport not in self._receivers:
            raise InternalError(
                f"{self._endpoint}: rows arrived by {transport}, which the client did not request"
            )
        receiver = self._receivers[transport]
        self._holds |= receiver.holds
        return receiver.receive(ready, self.is_open)

    def _outcome(self, ready: pb.ImageReady, arrival: Arrival) -> FetchedRows:
        """Return the outcome of complete rows. If they are gone or cannot be read, only this image fails."""
        digest = self._request_of(ready.index).digest
        try:
            rows = arrival.rows()
        except StaleHandleError as error:
            return FetchedRows(ready.index, digest, error=error)
        began_s = {name: self._clock.to_local(server_s) for name, server_s in ready.stage_began_s.items()}
        return FetchedRows(
            index=ready.index,
            digest=digest,
            rows=rows,
            dtype=ready.dtype,
            grid=Grid(ready.grid.t, ready.grid.h, ready.grid.w),
            address=ready.address,
            source=_SOURCES.get(ready.source, "unknown"),
            transport=transport_of(ready),
            stage_ms=dict(ready.stage_ms),
            stage_began_s=began_s,
            endpoint=self._endpoint,
            clock=self._clock,
        )


def _retrieve_exception(reading: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of a read that has no waiter, so that asyncio does not log it."""
    if not reading.cancelled():
        reading.exception()


def _failure(filling: "asyncio.Task[None]") -> BaseException | None:
    """Return why the rows of an image did not arrive; None if they did. The task is done."""
    if filling.cancelled():
        return StaleHandleError("the connection for rows was closed")
    return filling.exception()
