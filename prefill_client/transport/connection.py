"""The connection to one server: its channel, its description, and single attempts at Submit and Fetch."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self

import grpc

from encoder_contract.credentials import why_unconnected
from encoder_contract.errors import EncoderError, UnavailableError
from encoder_contract.framing import parse_fetch_response
from encoder_contract.geometry import Geometry
from encoder_contract.half_close import HALF_CLOSES
from encoder_contract.spans import CallSpan, SpanName
from encoder_contract.traceparent import TRACEPARENT
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from prefill_client.images import Image, RowRequest, ServerClock
from prefill_client.transport import Receiver, Receivers, receivers, select_receivers
from prefill_client.transport.channels import Channels, from_rpc
from prefill_client.transport.row_stream import RowStream
from prefill_client.transport.rows import element_type
from prefill_client.transport.submit_stream import SubmitStream

SUBMIT = "/encoder_contract.v1.EncoderService/Submit"
FETCH = "/encoder_contract.v1.EncoderService/Fetch"
# How long an estimate of the server's clock is used. Two synchronized clocks drift by less than 0.1 ms in this time.
CLOCK_S = 60.0
WHY_S = 1.0  # how much longer than its timeout an attempt to connect may take, to learn why it has failed

# The W3C trace context that the calls of this task carry, for servers to log. Empty means none.
traceparent: ContextVar[str] = ContextVar("traceparent", default="")


@dataclass(frozen=True, slots=True)
class Description:
    """A server's description of itself: model, fingerprints, geometry and limits.

    A row has `width` elements of type `dtype`: `hidden` elements for the language model's input, and as many for each
    of `deepstack_levels`. `geometry` computes an image's grid and token count from its size, so that a client lays out
    prompts without a call. It is None if only the server can count rows; then the answer to Submit has both. The limits
    are in bytes, pixels, images and milliseconds. `video_decoder` names the decoder of videos. It is empty, and
    `max_video_bytes` is 0, if the server accepts no videos.
    """

    version: str
    model_type: str
    model_name: str
    model_fingerprint: bytes
    processor_fingerprint: bytes
    dtype: str
    width: int
    hidden: int
    deepstack_levels: int
    geometry: Geometry | None
    max_image_bytes: int
    max_image_pixels: int
    max_images_per_call: int
    max_message_bytes: int
    max_grace_ms: int
    replica_id: str
    video_decoder: str = ""
    max_video_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * element_type(self.dtype).itemsize

    @classmethod
    def from_message(cls, message: pb.DescribeResponse) -> Self:
        """Return the description in a `DescribeResponse`."""
        geometry = None
        if message.HasField("geometry"):
            sizes = message.geometry
            geometry = Geometry(sizes.patch_size, sizes.merge_size, sizes.min_pixels, sizes.max_pixels)
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
            geometry=geometry,
            max_image_bytes=message.limits.max_image_bytes,
            max_image_pixels=message.limits.max_image_pixels,
            max_images_per_call=message.limits.max_images_per_call,
            max_message_bytes=message.limits.max_message_bytes,
            max_grace_ms=message.limits.max_grace_ms,
            replica_id=message.replica_id,
            video_decoder=message.video_decoder,
            max_video_bytes=message.limits.max_video_bytes,
        )


class Connection:
    """The connection to one server. Every method makes one attempt; `prefill_client.fleet` retries."""

    def __init__(
        self,
        endpoint: str,
        channel: grpc.aio.Channel,
        described: pb.DescribeResponse,
        receivers: Mapping[str, Receiver],
        clock: ServerClock,
        channels: Channels,
        version: int,
    ) -> None:
        """`version` is the value of `channels.version` when `channel` was opened."""
        self.endpoint = endpoint
        self.version = version
        self._channels = channels
        self.description = Description.from_message(described)
        self.patches_per_s = described.patches_per_s
        """The server's measured rate when the connection was opened; 0 is unknown."""
        self.channel = channel
        self.receivers = receivers
        self.clock = clock
        self._clock_task: asyncio.Task[None] | None = None
        self._submit: grpc.aio.StreamStreamMultiCallable[bytes, pb.SubmitResponse] = channel.stream_stream(
            SUBMIT,  # of messages that are serialised already
            response_deserializer=pb.SubmitResponse.FromString,
        )
        self._fetch = channel.unary_stream(
            FETCH,
            request_serializer=pb.FetchRequest.SerializeToString,
            response_deserializer=parse_fetch_response,
        )

    @classmethod
    async def open(
        cls,
        endpoint: str,
        channels: Channels,
        timeout_s: float = 10.0,
        *,
        wait: bool = True,
        receivers: Receivers = receivers,
    ) -> Self:
        """Connect, and ask the server for its description. Raises `UnavailableError` if it cannot be reached.

        With `wait`, a refused connection is tried again until `timeout_s`, because the server may be starting.
        `receivers` creates the receivers for the server.
        """
        version, metadata = channels.version, channels.metadata(endpoint)
        channel = channels.open(endpoint)
        try:
            described = await EncoderServiceStub(channel).Describe(
                pb.DescribeRequest(), timeout=timeout_s, wait_for_ready=wait, metadata=metadata
            )
            # Estimate the clock by a second call, because the first one includes the time to connect.
            clock = await _estimate_clock(channel, timeout_s, metadata)
        except grpc.aio.AioRpcError as error:
            try:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    why = await _why_unconnected(channel, channels, metadata) if wait else ""
                    raise UnavailableError(
                        f"{endpoint}: no server answered within {timeout_s:g} s{why}"
                    ) from error
                raise from_rpc(error, endpoint, channels.credentials) from error
            finally:
                await channel.close()
        except BaseException:  # also when cancelled: the caller gets no connection to close
            await channel.close()
            raise
        by_transport = receivers(endpoint, described, channels)
        return cls(endpoint, channel, described, by_transport, clock, channels, version)

    async def close(self, after_s: float = 0.0) -> None:
        """Close the channel after `after_s`, or at once if cancelled. This ends calls that still run."""
        if self._clock_task is not None:
            self._clock_task.cancel()
        try:
            await asyncio.sleep(after_s)  # gRPC's own grace period would refuse new calls
        finally:
            try:
                await self.channel.close()
            finally:
                for receiver in self.receivers.values():
                    receiver.close()

    def submit(self, images: Sequence[Image], caller: pb.Caller, new: Collection[int] = ()) -> SubmitStream:
        """Start a Submit call. The caller ends it, and may leave it open to keep the images submitted.

        `new` are the indexes of images that the server probably lacks.
        """
        metadata, span = self._traced(SpanName.CLIENT_SUBMIT, len(images))
        call = self._submit(metadata=(*metadata, HALF_CLOSES))
        _end_with(call, span)
        return SubmitStream(call, images, caller, self.endpoint, self.description.max_message_bytes, new)

    def fetch(
        self,
        requests: Sequence[RowRequest],
        caller: pb.Caller,
        *,
        grace_ms: int,
        transports: Sequence[str],
        timeout_s: float,
    ) -> RowStream:
        """Start a Fetch call. Rows arrive by the first of `transports` that both sides can use, else inline.

        `timeout_s` bounds the wait for the last outcome. The call itself has no deadline, because it may hold rows.
        """
        receivers = select_receivers(transports, self.receivers)
        message = pb.FetchRequest(
            caller=caller,
            images=[request.to_message(index) for index, request in enumerate(requests)],
            grace_ms=grace_ms,
        )
        for receiver in receivers.values():
            receiver.ask(message)
        metadata, span = self._traced(SpanName.CLIENT_FETCH, len(requests))
        call = self._fetch(message, metadata=metadata)
        _end_with(call, span)
        if monotonic() - self.clock.estimated_at_s > CLOCK_S and self._clock_task is None:
            self._clock_task = asyncio.create_task(self._update_clock(), name="clock")
        return RowStream(call, requests, receivers, self.endpoint, self.clock, timeout_s)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call: the client's token, and the trace context of the current task."""
        token, context = self._channels.metadata(self.endpoint), traceparent.get()
        return (*token, (TRACEPARENT, context)) if context else token

    def _traced(self, name: SpanName, images: int) -> tuple[tuple[tuple[str, str], ...], CallSpan | None]:
        """Return the metadata of a call, and its span if the current task's trace is sampled."""
        attributes: dict[str, str | int] = {"server.address": self.endpoint, "encoder.images": images}
        if (span := CallSpan.begin(name, traceparent.get(), **attributes)) is None:
            return self.metadata(), None
        return (*self._channels.metadata(self.endpoint), (TRACEPARENT, span.traceparent)), span

    async def _update_clock(self) -> None:
        with suppress(grpc.aio.AioRpcError, EncoderError):  # the next Fetch reports the error
            self.clock = await _estimate_clock(self.channel, CLOCK_S, self._channels.metadata(self.endpoint))
        self._clock_task = None


def _end_with(call: Any, span: CallSpan | None) -> None:
    """End the span when the call ends."""
    if span is not None:
        call.add_done_callback(lambda ended: span.end("CANCELLED" if ended.cancelled() else "OK"))


async def _why_unconnected(
    channel: grpc.aio.Channel, channels: Channels, metadata: tuple[tuple[str, str], ...]
) -> str:
    """Return why a channel does not connect. gRPC tells that only to calls that do not wait for the connection."""
    try:
        await EncoderServiceStub(channel).Describe(pb.DescribeRequest(), timeout=WHY_S, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f": {why_unconnected(error.details() or '', channels.credentials)}"
    return ""


async def _estimate_clock(
    channel: grpc.aio.Channel, timeout_s: float, metadata: tuple[tuple[str, str], ...]
) -> ServerClock:
    sent_s = monotonic()
    message = await EncoderServiceStub(channel).Describe(
        pb.DescribeRequest(), timeout=timeout_s, metadata=metadata
    )
    return ServerClock.estimate(sent_s, message.clock_s, monotonic())
