"""Peers: rows that another replica holds, fetched with the same call that an LLM server makes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, cast

import grpc
import torch
from cachetools import LRUCache
from torch import Tensor

from encoder_contract.errors import InternalError, UnavailableError, from_status
from encoder_contract.framing import checksum, parse_fetch_response
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.address import ImageKey

FETCH = "/encoder_contract.v1.EncoderService/Fetch"
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_retries", 0),
    # Also the longest that an attempt to connect may take: twenty seconds unless told otherwise.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
MAX_CHANNELS = 256  # peers talked to at a time; an idle channel costs a few hundred kilobytes
CLOSE_S = 10.0  # that calls under way have when their channel makes room for another
# A peer that is silent for so long counts as failed: encoding anew takes less.
SILENCE_S = 2.0
# Nor may rows come slower than this, over the whole transfer: a quarter of what each of the transfers under way gets on
# a gigabit link.
MIN_BYTES_PER_S = 4e6
# Until it has been measured: what one gRPC stream carries on one core.
ASSUMED_BYTES_PER_S = 1e9
RATE_WEIGHT = 0.3  # of the newest transfer in the measured rate
RATED_BYTES = 1 << 20  # what a smaller transfer takes is latency, and says nothing of the rate
CHECKSUM_ON_LOOP_BYTES = 4 << 20  # XXH3 does this in 0.2 ms; more goes to a worker thread


@dataclass(frozen=True, slots=True)
class RowType:
    """What a row of this model is; anything else that a peer sends is refused."""

    width: int
    dtype: torch.dtype
    dtype_name: str
    geometry: Geometry

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize


class Peers:
    """Channels to peers, and how fast they are. Belongs to the event loop."""

    def __init__(
        self,
        model: bytes,
        processor: bytes,
        rows: RowType,
        on_fetch: Callable[[float, bool], None] = lambda _seconds, _ok: None,
    ) -> None:
        """Fingerprints and row type are those of our model; `on_fetch` is told seconds and success of each attempt."""
        self._model = model
        self._processor = processor
        self._rows = rows
        self._on_fetch = on_fetch
        self._channels = _Channels(MAX_CHANNELS)
        self.bytes_per_s = ASSUMED_BYTES_PER_S

    def transfer_s(self, tokens: int) -> float:
        """Return how long fetching an image of so many tokens should take, seconds."""
        return tokens * self._rows.row_bytes / self.bytes_per_s

    async def fetch(self, endpoint: str, key: ImageKey) -> tuple[Grid, Tensor]:
        """Return grid and rows [tokens, width] of an image that the peer at `endpoint` holds.

        One attempt. Raises an `EncoderError` when the peer has not got it, fails, is silent or too slow, or sends what
        is not the image's rows.
        """
        began, ok = monotonic(), False
        call = self._call(endpoint, self._request(key, local_only=True))
        try:
            grid, buffer = await self._receive(call, key.address)
            ok = True
        except TimeoutError as error:
            raise UnavailableError(f"the peer {endpoint} was silent, or too slow") from error
        except grpc.aio.AioRpcError as error:
            raise from_status(error.code().value[0], f"the peer {endpoint}: {error.details()}") from error
        finally:
            call.cancel()
            self._on_fetch(monotonic() - began, ok)
        if buffer.numel() >= RATED_BYTES:
            rate = buffer.numel() / max(monotonic() - began, 1e-6)
            self.bytes_per_s += RATE_WEIGHT * (rate - self.bytes_per_s)
        return grid, buffer.view(self._rows.dtype).view(-1, self._rows.width)

    async def offer(self, endpoint: str, key: ImageKey) -> None:
        """Have the peer fetch an image from this replica, by asking it for a row. The caller bounds the time.

        Raises an `EncoderError` when it cannot.
        """
        call = self._call(endpoint, self._request(key, local_only=False))
        try:
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            raise from_status(error.code().value[0], f"the peer {endpoint}: {error.details()}") from error
        finally:
            call.cancel()
        if message is grpc.aio.EOF:
            raise InternalError("the peer ended the call without an answer")
        if not isinstance(message, tuple) and message.WhichOneof("message") == "error":
            raise from_status(message.error.code, message.error.message)

    async def close(self) -> None:
        """Close all channels."""
        for endpoint in list(self._channels):
            await self._channels.pop(endpoint).close()

    def _call(self, endpoint: str, request: pb.FetchRequest) -> Any:
        return self._channels[endpoint].unary_stream(
            FETCH,
            request_serializer=pb.FetchRequest.SerializeToString,
            response_deserializer=parse_fetch_response,
        )(request)

    def _request(self, key: ImageKey, *, local_only: bool) -> pb.FetchRequest:
        variant = pb.Variant(min_pixels=key.min_pixels, max_pixels=key.max_pixels)
        return pb.FetchRequest(
            caller=pb.Caller(
                model_fingerprint=self._model,
                processor_fingerprint=self._processor,
                tenant_salt=key.salt,
                client_id="peer",
            ),
            # All rows of what the peer holds; one row of what it shall come to hold.
            images=[pb.FetchImage(digest=key.digest, variant=variant, row_end=0 if local_only else 1)],
            local_only=local_only,
        )

    async def _receive(self, call: Any, address: bytes) -> tuple[Grid, Tensor]:
        ready = await _next(call)
        if isinstance(ready, tuple):
            raise InternalError("the peer sent rows before it said of what")
        grid = self._checked(ready.ready, address)
        buffer = torch.empty(ready.ready.row_bytes, dtype=torch.uint8)
        async with asyncio.timeout(SILENCE_S + len(buffer) / MIN_BYTES_PER_S):
            await _fill(call, buffer.numpy().data)
        await self._verify(buffer, ready.ready.checksum)
        return grid, buffer

    def _checked(self, ready: pb.ImageReady, address: bytes) -> Grid:
        """Return the grid; raises unless this can be the image asked for, which also bounds the memory it may take."""
        rows = self._rows
        grid = Grid(ready.grid.t, ready.grid.h, ready.grid.w)
        tokens = rows.geometry.tokens(grid)
        if (
            ready.address != address
            or not rows.geometry.has(grid)
            or (ready.width, ready.dtype) != (rows.width, rows.dtype_name)
            or (ready.row_begin, ready.row_end) != (0, tokens)
            or ready.row_bytes != tokens * rows.row_bytes
        ):
            raise InternalError("the peer answered with rows of another image or model")
        return grid

    async def _verify(self, buffer: Tensor, expected: int) -> None:
        views = [buffer.numpy().data]
        small = len(buffer) <= CHECKSUM_ON_LOOP_BYTES
        found = checksum(views) if small else await asyncio.to_thread(checksum, views)
        if found != expected:
            raise InternalError("the peer's rows arrived damaged")


class _Channels(LRUCache[str, grpc.aio.Channel]):
    """An open channel for each endpoint; the one used least recently is closed to make room."""

    def __missing__(self, endpoint: str) -> grpc.aio.Channel:
        channel = self[endpoint] = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        return channel

    def popitem(self) -> tuple[str, grpc.aio.Channel]:
        endpoint, channel = super().popitem()
        asyncio.get_running_loop().create_task(channel.close(CLOSE_S))
        return endpoint, channel


async def _next(call: Any) -> "pb.FetchResponse | tuple[int, memoryview]":
    """Return the next message of a Fetch call; raises the error that it carries, or `TimeoutError`."""
    async with asyncio.timeout(SILENCE_S):
        message = await call.read()
    if message is grpc.aio.EOF:
        raise InternalError("the peer ended the call before the rows were complete")
    if not isinstance(message, tuple) and message.WhichOneof("message") == "error":
        raise from_status(message.error.code, message.error.message)
    return cast("pb.FetchResponse | tuple[int, memoryview]", message)


async def _fill(call: Any, buffer: memoryview) -> None:
    """Read the rows of the one image asked for."""
    filled = 0
    while filled < len(buffer):
        message = await _next(call)
        if not isinstance(message, tuple):
            raise InternalError("the peer announced rows again before the first were complete")
        data = message[1]
        if filled + len(data) > len(buffer):
            raise InternalError("the peer sent more bytes than it announced")
        buffer[filled : filled + len(data)] = data
        filled += len(data)
