"""One server: its channel, its description, and single attempts at Submit and Fetch."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, Self

import grpc

from encoder_contract.endpoint import is_local
from encoder_contract.errors import DeadlineError, InternalError, UnavailableError
from encoder_contract.framing import parse_fetch_response
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.traceparent import TRACEPARENT
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client.images import Image, RowRequest, Submitted
from prefill_client.transport import INLINE, TRANSPORTS, Receiver, receivers
from prefill_client.transport.row_stream import RowStream, ended_early, from_message, from_rpc
from prefill_client.transport.server_clock import ServerClock

# An error so close to the deadline is the deadline, in whatever words grpc tells it.
NEARLY_S = 0.05
FETCH = "/encoder_contract.v1.EncoderService/Fetch"
# Two disciplined clocks part by less than 0.1 ms in this time.
CLOCK_S = 60.0

# A silent peer is noticed within about two seconds: without ping_timeout_ms, keepalive_timeout_ms has no effect
# and it takes a minute.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the longest that an attempt to connect may take: twenty seconds unless told otherwise.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

# The W3C trace context that goes out with every call of this task, for servers to log; empty: none.
traceparent: ContextVar[str] = ContextVar("traceparent", default="")


@dataclass(frozen=True, slots=True)
class Description:
    """What a server said it is; `geometry` lets the client lay prompts out by itself."""

    version: str
    model_type: str
    model_name: str
    model_fingerprint: bytes
    processor_fingerprint: bytes
    dtype: str
    width: int
    hidden: int
    deepstack_levels: int
    geometry: Geometry
    max_image_bytes: int
    max_image_pixels: int
    max_images_per_call: int
    max_message_bytes: int
    max_grace_ms: int
    replica_id: str

    @classmethod
    def from_message(cls, message: pb.DescribeResponse) -> Self:
        """Return the description that `Describe` answered."""
        geometry = message.geometry
        return cls(
            version=message.version,
            model_type=message.model_type,
            model_name=message.model_name,
            model_fingerprint=message.model_fingerprint,
            processor_fingerprint=message.processor_fingerprint,
            dtype=message.dtype,
            width=message.width,
            hidden=message.hidden,
            deepstack_levels=message.deepstack_levels,
            geometry=Geometry(
                geometry.patch_size, geometry.merge_size, geometry.min_pixels, geometry.max_pixels
            ),
            max_image_bytes=message.limits.max_image_bytes,
            max_image_pixels=message.limits.max_image_pixels,
            max_images_per_call=message.limits.max_images_per_call,
            max_message_bytes=message.limits.max_message_bytes,
            max_grace_ms=message.limits.max_grace_ms,
            replica_id=message.replica_id,
        )


class Connection:
    """A channel to one server. Every method is one attempt; who retries is the client."""

    def __init__(
        self,
        endpoint: str,
        channel: grpc.aio.Channel,
        description: Description,
        receivers: Mapping[str, Receiver],
        clock: ServerClock,
    ) -> None:
        self.endpoint = endpoint
        self.description = description
        self.channel = channel
        self.receivers = receivers
        self.clock = clock
        self._clock_task: asyncio.Task[None] | None = None
        self._stub = EncoderServiceStub(channel)
        self._fetch = channel.unary_stream(
            FETCH,
            request_serializer=pb.FetchRequest.SerializeToString,
            response_deserializer=parse_fetch_response,
        )

    @classmethod
    async def open(cls, endpoint: str, timeout_s: float = 10.0, *, wait: bool = True) -> Self:
        """Connect and ask the server what it is. Raises `UnavailableError` when it cannot be reached.

        `wait` is for a server that is being started: who refuses the connection is tried again until `timeout_s`.
        """
        # No proxy stands between a server of this host and us: it is told things that others are not.
        direct = (("grpc.enable_http_proxy", 0),) if is_local(endpoint) else ()
        channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS + direct)
        try:
            message = await EncoderServiceStub(channel).Describe(
                pb.DescribeRequest(), timeout=timeout_s, wait_for_ready=wait
            )
            # The first answer waited for the connection: it says nothing about the time of a question.
            clock = await _clock_of(channel, timeout_s)
        except grpc.aio.AioRpcError as error:
            await channel.close()
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise UnavailableError(f"{endpoint}: no server answered within {timeout_s:g} s") from error
            raise from_rpc(error, endpoint) from error
        except BaseException:
            await channel.close()
            raise
        description = Description.from_message(message)
        return cls(endpoint, channel, description, receivers(endpoint, message), clock)

    async def close(self) -> None:
        """Close the channel; running calls end."""
        if self._clock_task is not None:
            self._clock_task.cancel()
        await self.channel.close()

    async def submit(
        self, images: Sequence[Image], caller: pb.Caller, timeout_s: float | None = None
    ) -> list[Submitted]:
        """Name the images, send the bytes of those the server lacks, and return its word on each, in order."""
        call = self._stub.Submit(timeout=timeout_s, metadata=_metadata())
        deadline = inf if timeout_s is None else monotonic() + timeout_s
        try:
            return await _converse(call, images, caller, self.description.max_message_bytes)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            # A write to a call that has ended is told in one of several ways, none of which says why it ended.
            if monotonic() >= deadline - NEARLY_S:
                raise DeadlineError(f"{self.endpoint}: the deadline passed") from error
            if isinstance(error, grpc.aio.AioRpcError):
                raise from_rpc(error, self.endpoint) from error
            raise await ended_early(call, self.endpoint) from error
        finally:
            call.cancel()

    def fetch(
        self,
        requests: Sequence[RowRequest],
        caller: pb.Caller,
        *,
        grace_ms: int,
        transports: Sequence[str] = TRANSPORTS,
        timeout_s: float | None = None,
    ) -> RowStream:
        """Start a Fetch call; rows come by the first of `transports` that both sides can use, or inline.

        `timeout_s` bounds the wait for the last outcome; the call itself has no deadline, because it may hold rows.
        """
        asked = {name: self.receivers[name] for name in (*transports, INLINE) if name in self.receivers}
        message = pb.FetchRequest(
            caller=caller,
            images=[_fetch_image(index, request) for index, request in enumerate(requests)],
            grace_ms=grace_ms,
        )
        for receiver in asked.values():
            receiver.ask(message)
        call = self._fetch(message, metadata=_metadata())
        if monotonic() - self.clock.estimated_at_s > CLOCK_S and self._clock_task is None:
            self._clock_task = asyncio.create_task(self._estimate_again(), name="clock")
        return RowStream(call, requests, asked, self.endpoint, self.clock, timeout_s)

    async def _estimate_again(self) -> None:
        with suppress(grpc.aio.AioRpcError):  # whoever fetches hears of it too
            self.clock = await _clock_of(self.channel, CLOCK_S)
        self._clock_task = None


async def _clock_of(channel: grpc.aio.Channel, timeout_s: float) -> ServerClock:
    asked_s = monotonic()
    message = await EncoderServiceStub(channel).Describe(pb.DescribeRequest(), timeout=timeout_s)
    return ServerClock.estimate(asked_s, message.clock_s, monotonic())


def _metadata() -> tuple[tuple[str, str], ...]:
    given = traceparent.get()
    return ((TRACEPARENT, given),) if given else ()


async def _converse(
    call: Any, images: Sequence[Image], caller: pb.Caller, piece_bytes: int
) -> list[Submitted]:
    await call.write(pb.SubmitRequest(open=caller))
    names = [
        pb.ImageName(
            index=index,
            digest=image.digest,
            grid=pb.Grid(t=image.grid.t, h=image.grid.h, w=image.grid.w),
            size_bytes=len(image.data),
        )
        for index, image in enumerate(images)
    ]
    await call.write(pb.SubmitRequest(names=pb.ImageNames(names=names)))
    answers: dict[int, Submitted] = {}
    sent_s: dict[int, float] = {}
    while len(answers) < len(images):
        response = await call.read()
        if response is grpc.aio.EOF:
            raise InternalError("the server ended the Submit call before it answered every image")
        state = response.state
        image = images[state.index]
        if state.state == pb.STATE_NEEDS_BYTES:
            sent_s[state.index] = monotonic()
            await _send(call, state.index, image.data, piece_bytes)
        else:
            began_s = sent_s.get(state.index)
            upload_s = (began_s, monotonic()) if began_s is not None else None
            answers[state.index] = _submitted(image, state, upload_s)
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    return [answers[index] for index in range(len(images))]


async def _send(call: Any, index: int, data: bytes, piece_bytes: int) -> None:
    view = memoryview(data)
    for begin in range(0, max(1, len(view)), piece_bytes):
        piece = bytes(view[begin : begin + piece_bytes])
        last = begin + piece_bytes >= len(view)
        await call.write(pb.SubmitRequest(bytes=pb.ImageBytes(index=index, data=piece, last=last)))


def _submitted(image: Image, state: pb.ImageState, upload_s: tuple[float, float] | None) -> Submitted:
    if state.state == pb.STATE_FAILED:
        return Submitted(image.digest, error=from_message(state.error))
    return Submitted(
        image.digest,
        Grid(state.grid.t, state.grid.h, state.grid.w),
        state.tokens,
        state.address,
        cached=state.state == pb.STATE_CACHED,
        upload_s=upload_s,
    )


def _fetch_image(index: int, request: RowRequest) -> pb.FetchImage:
    return pb.FetchImage(
        index=index,
        digest=request.digest,
        variant=pb.Variant(min_pixels=request.min_pixels, max_pixels=request.max_pixels),
        row_begin=request.row_begin,
        row_end=request.row_end,
        chunk=request.chunk,
        needed_in_ms=request.needed_in_ms,
    )
