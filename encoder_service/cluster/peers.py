"""Fetches rows from other replicas, with the same Fetch call that LLM servers use."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, time
from typing import Any, NamedTuple

import grpc
from cachetools import LRUCache

from encoder_contract.certificates import Certificates
from encoder_contract.direct import channel_options
from encoder_contract.endpoint import Endpoint
from encoder_contract.errors import (
    ForbiddenError,
    InternalError,
    StaleHandleError,
    UnavailableError,
    from_status,
)
from encoder_contract.extents import Filling
from encoder_contract.fleet_key import SIGNATURE_METADATA, FleetKey
from encoder_contract.framing import parse_fetch_response
from encoder_contract.geometry import Grid, GridRule
from encoder_contract.rows_connection import RowsConnections
from encoder_contract.spans import CallSpan, SpanName, current
from encoder_contract.stream import RowReader, check_rows
from encoder_contract.traceparent import TRACEPARENT
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.cluster.cluster import Location
from encoder_service.keys import ImageKey, Recipe

log = logging.getLogger(__name__)

FETCH = "/encoder_contract.v1.EncoderService/Fetch"
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_retries", 0),
)
MAX_CHANNELS = 256  # an idle channel takes a few hundred kilobytes
CLOSE_S = 10.0  # grace period of the running calls of a channel that is closed to make room for another
# A peer that is silent for this long has failed: encoding the image again takes less.
SILENCE_S = 2.0
# The lowest average rate of a transfer: a quarter of what each concurrent transfer gets on a gigabit link.
MIN_BYTES_PER_S = 4e6
# Assumed until a rate is measured: the throughput of one gRPC stream on one core.
ASSUMED_BYTES_PER_S = 1e9
RATE_WEIGHT = 0.3  # of the newest transfer in the measured rate
RATED_BYTES = 1 << 20  # smaller transfers are not measured: their time is mostly latency


class Peers:
    """Channels to peers, and their measured rate. Not thread-safe: use from one event loop."""

    def __init__(
        self,
        recipe: Recipe,
        width: int,
        row_bytes: int,
        geometry: GridRule,
        *,
        certificates: Certificates | None = None,
        name: str = "",
        key: FleetKey | None = None,
        on_fetch: Callable[[float, bool], None] = lambda _seconds, _ok: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """A row has `width` elements of the recipe's type, `row_bytes` in all; other rows are rejected.

        `on_fetch` gets the seconds and the success of each attempt.

        With `certificates`, calls use TLS: this replica presents its certificate, and a peer's certificate must be for
        `name`, or for the peer's host if `name` is empty. With `key`, calls are signed, and unsigned rows are rejected.
        A peer fails if it is silent for `silence_s`, or if connecting takes longer.
        """
        self._recipe = recipe
        self._width, self._row_bytes = width, row_bytes
        self._geometry = geometry
        self._on_fetch = on_fetch
        self._silence_s = silence_s
        self._channels = _Channels(certificates, name, silence_s)
        self._rows_ports = _RowsPorts(certificates, name)
        self._key = key
        self.foreign = 0
        """How many times a peer sent rows without a valid signature."""
        self.bytes_per_s = ASSUMED_BYTES_PER_S

    def transfer_s(self, tokens: int) -> float:
        """Return the expected time to fetch an image of `tokens` tokens, in seconds."""
        return tokens * self._row_bytes / self.bytes_per_s

    def tokens(self, grid: Grid) -> int:
        """Return the number of rows of an image with this grid; 0 if no image of the model has this grid."""
        return self._geometry.tokens(grid) if self._geometry.has(grid) else 0

    async def fetch(self, location: Location, key: ImageKey, into: Sequence[memoryview]) -> int:
        """Write the rows of an image that a peer holds into `into`; return their checksum. One attempt.

        The views in `into` have `tokens(location.grid)` rows in all. Nothing writes to them once this has returned or
        raised. Raises an `EncoderError` if the peer does not hold the image, fails, is silent or too slow, or sends
        anything but the rows of an image with this grid: then `into` may have some of what it sent.
        """
        try:
            return await self._fetch(location, key, into)
        except StaleHandleError:  # its rows port cannot be reached: from now on, its rows come inline
            return await self._fetch(location, key, into)

    async def _fetch(self, location: Location, key: ImageKey, into: Sequence[memoryview]) -> int:
        began, ok = monotonic(), False
        endpoint, grid = location.endpoint, location.grid
        request = self._request(key, local_only=True)
        if self._rows_ports.usable(location):
            request.transports.extend((pb.TRANSPORT_TCP, pb.TRANSPORT_INLINE))
        span = CallSpan.begin(SpanName.PEER_FETCH, current.get(), **{"server.address": endpoint})
        call = self._call(location.replica_id, endpoint, request, span)
        try:
            with _naming_peer(endpoint):
                checksum = await self._receive(location, call, key.address, into)
            ok = True
        finally:
            call.cancel()
            self._on_fetch(monotonic() - began, ok)
            if span is not None:
                span.end("OK" if ok else "UNKNOWN")
        if (size := self.tokens(grid) * self._row_bytes) >= RATED_BYTES:
            rate = size / max(monotonic() - began, 1e-6)
            self.bytes_per_s += RATE_WEIGHT * (rate - self.bytes_per_s)
        return checksum

    async def offer(self, replica_id: str, endpoint: str, key: ImageKey) -> None:
        """Have a peer fetch an image from this replica, by requesting one row of it. The caller bounds the time.

        Raises an `EncoderError` if the peer fails.
        """
        call = self._call(replica_id, endpoint, self._request(key, local_only=False))
        try:
            with _naming_peer(endpoint):
                await _read(call)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close all channels and connections."""
        while self._rows_ports:
            self._rows_ports.popitem()
        for endpoint in list(self._channels):
            await self._channels.pop(endpoint).channel.close()

    def _call(
        self, replica_id: str, endpoint: str, request: pb.FetchRequest, span: CallSpan | None = None
    ) -> Any:
        raw = request.SerializeToString()
        metadata: list[tuple[str, str | bytes]] = []
        if self._key is not None:
            metadata.append((SIGNATURE_METADATA, self._key.sign_request(endpoint, raw, time())))
        if span is not None:
            metadata.append((TRACEPARENT, span.traceparent))
        fetch: Any = self._channels.to(replica_id, endpoint).unary_stream(FETCH)
        return fetch(raw, metadata=metadata)

    def _request(self, key: ImageKey, *, local_only: bool) -> pb.FetchRequest:
        variant = pb.Variant(min_pixels=key.min_pixels, max_pixels=key.max_pixels)
        frames = key.frames
        return pb.FetchRequest(
            caller=pb.Caller(
                model_fingerprint=self._recipe.model,
                processor_fingerprint=self._recipe.processor,
                tenant_salt=key.salt,
                client_id="peer",
            ),
            # `fetch` reads all rows. `offer` reads one, which makes the peer fetch them all.
            images=[
                pb.FetchImage(
                    digest=key.digest,
                    variant=variant,
                    row_end=0 if local_only else 1,
                    frames=frames and frames.to_message(),
                    grid=frames and pb.Grid(t=frames.grid.t, h=frames.grid.h, w=frames.grid.w),
                )
            ],
            local_only=local_only,
            rows_inside=True,
        )

    async def _receive(
        self, location: Location, call: Any, address: bytes, into: Sequence[memoryview]
    ) -> int:
        grid = location.grid
        message = await self._next(call)
        if isinstance(message, tuple) or len(message.ready) != 1:
            raise InternalError("the peer did not announce the rows of one image")
        ready = message.ready[0]
        self._check(ready, address, grid)
        async with asyncio.timeout(self._silence_s + ready.row_bytes / MIN_BYTES_PER_S):
            if ready.HasField("ticket"):
                port = self._rows_ports.to(location, ready.ticket.port)
                found = await port.receive(ready.ticket.secret, into)
            else:
                found = await self._fill(call, message, into)
        check_rows(ready, found)
        if self._key is not None:
            verify = self._key.verify_rows
            if not await asyncio.to_thread(verify, ready.signature, address, grid, into):
                self.foreign += 1
                log.warning("rows from a peer were ignored: they are not signed with the fleet's key")
                raise ForbiddenError("the peer's rows are not signed with the fleet's key")
        return found

    def _check(self, ready: pb.ImageReady, address: bytes, grid: Grid) -> None:
        """Raise `InternalError` unless the rows of this image, with this grid, are announced."""
        tokens = self.tokens(grid)
        if (
            ready.address != address
            or (ready.grid.t, ready.grid.h, ready.grid.w) != grid
            or (ready.width, ready.dtype) != (self._width, self._recipe.dtype)
            or (ready.row_begin, ready.row_end) != (0, tokens)
            or ready.row_bytes != tokens * self._row_bytes
        ):
            raise InternalError("the peer answered with rows of another image or model")

    async def _next(self, call: Any) -> "pb.FetchResponse | tuple[int, memoryview]":
        """Return the next message of a Fetch call; raises as `_read` does, or `TimeoutError`."""
        async with asyncio.timeout(self._silence_s):
            return await _read(call)

    async def _fill(
        self, call: Any, message: "pb.FetchResponse | tuple[int, memoryview]", into: Sequence[memoryview]
    ) -> int:
        """Read the rows of the requested image, from its announcement `message` on; return their checksum."""
        filling = Filling(into)
        reader = RowReader(lambda _ready: filling)
        while not reader.read(message):
            message = await self._next(call)
            if not isinstance(message, tuple):  # it may name more windows than the event loop can bear
                raise InternalError("the peer announced rows again before the first were complete")
        return filling.checksum


async def _read(call: Any) -> "pb.FetchResponse | tuple[int, memoryview]":
    """Return the next message of a Fetch call; raises the error in it, `InternalError` if there is no message."""
    raw = await call.read()
    if raw is grpc.aio.EOF:
        raise InternalError("the peer ended the call before its answer was complete")
    # Not passed to gRPC as its deserializer: gRPC would turn an exception into the message None.
    message = parse_fetch_response(raw)
    if not isinstance(message, tuple) and message.errors:
        raise from_status(message.errors[0].code, message.errors[0].message)
    return message


@contextmanager
def _naming_peer(endpoint: str) -> Iterator[None]:
    """Turn any failure of a call into an `EncoderError` that names the peer; let cancellation pass."""
    try:
        yield
    except TimeoutError as error:
        raise UnavailableError(
            f"the peer {endpoint} sent nothing for too long, or sent rows too slowly"
        ) from error
    except grpc.aio.AioRpcError as error:
        raise from_status(error.code().value[0], f"the peer {endpoint}: {error.details()}") from error
    except asyncio.CancelledError as error:
        # gRPC also cancels a call whose channel is closed. That must not cancel the callers that wait for its rows.
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise UnavailableError(f"the connection to the peer {endpoint} was closed") from error


class _Channel(NamedTuple):
    replica_id: str
    channel: grpc.aio.Channel


class _Channels(LRUCache[str, _Channel]):
    """An open channel to the peer at each endpoint; the least recently used one is closed to make room."""

    def __init__(self, certificates: Certificates | None, name: str, silence_s: float) -> None:
        super().__init__(MAX_CHANNELS)
        self._certificates = certificates
        self._options = (
            *CHANNEL_OPTIONS,
            # gRPC also uses these as the time limit of an attempt to connect, which is twenty seconds by default.
            ("grpc.min_reconnect_backoff_ms", int(1000 * silence_s)),
            ("grpc.max_reconnect_backoff_ms", int(1000 * silence_s)),
            # Otherwise a new channel to an endpoint waits as long as the last one would have.
            ("grpc.use_local_subchannel_pool", 1),
            *((("grpc.ssl_target_name_override", name),) if name else ()),
        )
        self._pem = certificates.pem if certificates else None

    def to(self, replica_id: str, endpoint: str) -> grpc.aio.Channel:
        """Return the channel to a peer; close all channels first if the certificates have changed.

        A channel that was refused fails at once until its next attempt to connect. So a peer that starts at the
        endpoint of an earlier one gets another channel.
        """
        if self._certificates is not None and (pem := self._certificates.pem) is not self._pem:
            self._pem = pem
            while self:
                self.popitem()
        if endpoint in self and self[endpoint].replica_id != replica_id:
            _close_later(self.pop(endpoint))
        if endpoint not in self:
            self[endpoint] = _Channel(replica_id, self._open(endpoint))
        return self[endpoint].channel

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        options = self._options + channel_options(endpoint)
        if (pem := self._pem) is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        credentials = grpc.ssl_channel_credentials(pem.ca or None, pem.key, pem.cert)
        return grpc.aio.secure_channel(endpoint, credentials, options=options)

    def popitem(self) -> tuple[str, _Channel]:
        endpoint, channel = super().popitem()
        _close_later(channel)
        return endpoint, channel


def _close_later(channel: _Channel) -> None:
    asyncio.get_running_loop().create_task(channel.channel.close(CLOSE_S))


class _RowsPort(NamedTuple):
    replica_id: str
    connections: RowsConnections


class _RowsPorts(LRUCache[str, _RowsPort]):
    """The connections to the rows port of the peer at each endpoint, as `_Channels`."""

    def __init__(self, certificates: Certificates | None, name: str) -> None:
        super().__init__(MAX_CHANNELS)
        self._context = certificates.client_context if certificates else None
        self._name = name

    def usable(self, location: Location) -> bool:
        """Return whether the port of a peer can be reached, as far as this replica knows."""
        known = self.get(location.endpoint)
        return known is None or known.replica_id != location.replica_id or known.connections.usable

    def to(self, location: Location, port: int) -> RowsConnections:
        """Return the connections to a peer's port."""
        endpoint, replica_id = location.endpoint, location.replica_id
        if endpoint in self and (self[endpoint].replica_id, self[endpoint].connections.port) != (
            replica_id,
            port,
        ):
            self.pop(endpoint).connections.close()
        if endpoint not in self:
            connections = RowsConnections(Endpoint.parse(endpoint).host, port, self._context, self._name)
            self[endpoint] = _RowsPort(replica_id, connections)
        return self[endpoint].connections

    def popitem(self) -> tuple[str, _RowsPort]:
        endpoint, port = super().popitem()
        port.connections.close()
        return endpoint, port
