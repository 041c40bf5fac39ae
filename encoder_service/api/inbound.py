"""Inbound calls: admitted, bounded in size and time before any message is parsed, and logged when they end."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    InvalidRequestError,
    OverloadedError,
    Status,
)
from encoder_contract.half_close import HALF_CLOSES
from encoder_contract.spans import CallSpan, SpanName, current
from encoder_contract.traceparent import trace_id
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.caller import caller_of
from encoder_service.api.messages import MAX_REQUEST_ID_BYTES, Context
from encoder_service.limits import REFUSAL_S, Budget, Caller
from encoder_service.logs import known_error
from encoder_service.metrics import Metrics, reason

log = logging.getLogger(__name__)

# The first request of a call has a few kilobytes; it must arrive within this time.
REQUEST_S = 10.0
# How long the end of a call waits for its caller to half-close: many round trips.
HALF_CLOSE_S = 1.0

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Methods: TypeAlias = dict[str, Handler]  # of one service, by name
Request = TypeVar("Request")
Answers: TypeAlias = "AsyncGenerator[Message | bytes]"
Parse: TypeAlias = Callable[[bytes], Request]
Refusal: TypeAlias = Callable[[EncoderError], Message]
Read: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]


class Requests(Generic[Request]):
    """The requests of one call. Each is parsed when it is read."""

    def __init__(self, read: Read, parse: Parse[Request]) -> None:
        """`read` returns the next message, or `grpc.aio.EOF` after the last."""
        self._read = read
        self._parse = parse
        self._reading: asyncio.Task[Any] | None = None
        self.have_ended = False
        """Whether the caller has half-closed, as far as this has read."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request:
        return await self.next_within(None)

    async def next_within(self, timeout_s: float | None, interrupt: asyncio.Event | None = None) -> Request:
        """Return the next request.

        Raises `TimeoutError` after `timeout_s` or once `interrupt` is set, and `StopAsyncIteration` after the last.
        """
        return self._parse(await self._raw_within(timeout_s, interrupt))

    async def half_closed(self) -> None:
        """Wait for the end of the requests, for at most `HALF_CLOSE_S`. Ignores what still comes."""
        with suppress(TimeoutError, StopAsyncIteration, grpc.aio.InternalError):
            async with asyncio.timeout(HALF_CLOSE_S):
                while True:
                    await self._raw_within(None)

    async def _raw_within(self, timeout_s: float | None, interrupt: asyncio.Event | None = None) -> bytes:
        if self.have_ended:
            raise StopAsyncIteration
        if self._reading is None:  # it is there already if the wait that began it timed out
            self._reading = asyncio.create_task(self._read())
        reading = self._reading
        interrupted = asyncio.ensure_future(interrupt.wait()) if interrupt else None
        is_read = False
        try:
            # gRPC writes into the task's buffer, so a wait that times out must not cancel the task.
            awaited = (reading, interrupted) if interrupted else (reading,)
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_read = reading.done()
        finally:
            if interrupted is not None:
                interrupted.cancel()
            if not is_read:
                # Perhaps nobody will await it. A second wait must not add the callback again.
                reading.remove_done_callback(_retrieve_exception)
                reading.add_done_callback(_retrieve_exception)
        if not is_read:
            raise TimeoutError
        self._reading = None
        try:
            raw = reading.result()
        finally:
            # An exception refers to this frame: the cycle would keep the call's messages.
            del reading, awaited
        if not isinstance(raw, bytes):
            self.have_ended = True
            raise StopAsyncIteration
        return raw

    async def first(self) -> Request:
        """Return the first request; raises `DeadlineError` if it is late, `InvalidRequestError` if there is none."""
        try:
            raw = await self._raw_within(REQUEST_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"no request arrived within {REQUEST_S:g} s of the start of the call: send the first message at once"
            ) from error
        except StopAsyncIteration as error:
            raise InvalidRequestError("the call ended before its first message: send a request") from error
        return self._parse(raw)

    async def only(self) -> Request:
        """Return the request of a call that has one. The caller must end its requests, and so sends nothing more.

        Raises as `first` does.
        """
        request = await self.first()
        try:
            await self._raw_within(REQUEST_S)
        except StopAsyncIteration:
            return request
        except TimeoutError as error:
            raise DeadlineError(
                f"the call was not half-closed within {REQUEST_S:g} s of its request: half-close it with the request"
            ) from error
        raise InvalidRequestError("the call has a second request: send one request, and half-close the call")


@dataclass(eq=False, slots=True)
class Inbound(Generic[Request]):
    """An inbound call. When it ends, `on_error` gets the error, if any, and then `resources` are released.

    Whoever serves it checks the caller's credentials, and then calls `gate.admit`: callers that are refused take no
    place.
    """

    gate: "CallGate"
    context: Context
    caller: Caller
    requests: Requests[Request]
    refusal: Refusal | None
    """Makes the last answer from an error, for a caller that half-closes after it; None for other callers."""
    resources: ExitStack
    on_error: Callable[[EncoderError], None]
    is_admitted: bool = False
    is_answered: bool = False
    """Whether gRPC has sent an answer."""


class CallGate:
    """Makes gRPC handlers that admit calls within a budget, of which each host gets a share."""

    def __init__(self, budget: Budget, arriving: Budget, refused: Budget, reader_idle_s: float) -> None:
        """A call ends if its caller takes longer than `reader_idle_s` to read one answer, of at most 1 MiB.

        Only requests are counted in `arriving`, until they are here, and delayed refusals in `refused`.
        """
        self._reader_idle_s = reader_idle_s
        self._budget = budget
        self._arriving = arriving
        self._refused = refused
        self._active: set[Inbound[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is active: the last status was sent."""
        await self._idle.wait()

    def stream(
        self,
        serve: Callable[[Inbound[Request]], Awaitable[Answers]],
        parse: Parse[Request],
        refusal: Refusal | None = None,
    ) -> Handler:
        """Return the handler of a method that reads its requests itself. `serve` and `parse` may raise `EncoderError`.

        With `refusal`, a call with the metadata `HALF_CLOSES` ends once its caller has half-closed, as it does after
        its last answer, or the message that `refusal` makes of an error. HAProxy discards the status and the last
        answers of a call that ends earlier. A call that was not admitted is told, too, but nothing more of it is read.
        """
        handle = partial(self._handle, serve, parse, refusal)
        return grpc.stream_stream_rpc_method_handler(handle, None, None)

    def one_request(
        self,
        serve: Callable[[Request, Inbound[Request]], Answers],
        parse: Parse[Request],
        identify: Callable[[Caller], object] | None = None,
    ) -> Handler:
        """Return the handler of a method that answers one request with a stream.

        `identify` raises the error of a caller that may not call it.
        """

        async def answers(call: Inbound[Request]) -> Answers:
            if identify is not None:
                identify(call.caller)
            self.admit(call)
            with self._arriving.hold(call.caller):
                request = await call.requests.only()
            return serve(request, call)

        return self.stream(answers, parse)

    def unary(
        self,
        answer: Callable[[Request, Caller], Awaitable[Message]],
        parse: Parse[Request],
        identify: Callable[[Caller], object] | None = None,
    ) -> Handler:
        """Return the handler of a method that answers one request with one message. `identify` as above."""

        async def answers(request: Request, call: Inbound[Request]) -> Answers:
            yield await answer(request, call.caller)

        return self.one_request(answers, parse, identify)

    def admit(self, call: Inbound[Any]) -> None:
        """Give a call a place among the open ones, until its status is sent. Raises `OverloadedError`."""
        hold = self._budget.hold(call.caller)
        call.is_admitted = True
        self._active.add(call)
        self._idle.clear()

        def leave(_task: "asyncio.Task[Any]") -> None:
            hold.release()
            self._deactivate(call)

        # A call counts against the budget until its status is sent, even if its caller stopped reading and the call is
        # no longer active. gRPC runs a whole call in one task. A callback on the context would be a reference cycle.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(leave)

    async def _handle(
        self,
        serve: Callable[[Inbound[Request]], Awaitable[Answers]],
        parse: Parse[Request],
        refusal: Refusal | None,
        _requests: AsyncIterator[bytes],
        context: Context,
    ) -> None:
        """Serve a call. gRPC's `_requests` is a reference cycle that keeps the last message; `context.read` is not."""
        caller = caller_of(context)
        if HALF_CLOSES not in (context.invocation_metadata() or ()):
            refusal = None
        error: EncoderError | None = None
        with ExitStack() as resources:
            requests = Requests(context.read, parse)
            call = Inbound(self, context, caller, requests, refusal, resources, partial(_log_refusal, caller))
            try:
                # When the caller disconnects, its call releases its resources now, not at garbage collection.
                async with aclosing(await serve(call)) as answers:
                    async for answer in answers:
                        await self._send(answer, call)
            except Exception as raised:  # noqa: BLE001 - logged with an id, which is sent to the caller
                # Without its traceback, which refers to this frame, which refers to the error.
                error = known_error(raised).with_traceback(None)
                call.on_error(error)
        await self._end(call, error)

    async def _end(self, call: Inbound[Any], error: EncoderError | None) -> None:
        """Wait until the status can be sent, tell the caller the error if it waits for that, and set the status."""
        if call.refusal is not None and call in self._active:  # one whose caller reads nothing cannot be told
            if error is not None and not call.requests.have_ended:
                with suppress(DeadlineError):
                    await self._send(call.refusal(error), call)
            await call.requests.half_closed()
        if call.is_admitted and not call.is_answered and call not in self._active:
            # gRPC sends no status while the first answer is unread, and keeps what the caller has sent.
            await asyncio.Event().wait()  # until the caller leaves: its call counts until then
        if error is None:
            return
        messages.end_with(call.context, error)
        with suppress(OverloadedError), self._refused.hold(call.caller):
            if call.refusal is not None and not call.is_admitted:
                await self._send(call.refusal(error), call)
            await asyncio.sleep(REFUSAL_S)

    async def _send(self, answer: Message | bytes, call: Inbound[Any]) -> None:
        """Send an answer. A caller that has no place, and does not read its refusal, counts until it leaves.

        Rows are already framed, as bytes: protobuf would copy every megabyte twice more.
        """
        framed = answer if isinstance(answer, bytes) else answer.SerializeToString()
        try:
            async with asyncio.timeout(self._reader_idle_s if call.is_admitted else None):
                await call.context.write(framed)
        except TimeoutError as error:
            self._deactivate(call)  # the status is queued behind the unread answer
            raise DeadlineError(
                f"the caller read no answer for {self._reader_idle_s:g} s: read answers as they come, or cancel"
            ) from error
        except grpc.aio.InternalError as error:  # the call has ended, and its cancellation is about to arrive
            raise asyncio.CancelledError from error
        call.is_answered = True

    def _deactivate(self, call: Inbound[Any]) -> None:
        self._active.discard(call)
        if not self._active:
            self._idle.set()


def _retrieve_exception(reading: "asyncio.Task[Any]") -> None:
    """Mark the exception of a read that nobody awaits any more as seen; asyncio would log it with a traceback."""
    if not reading.cancelled():
        reading.exception()


def _log_refusal(caller: Caller, error: EncoderError) -> None:
    log.info("refused", extra={"fields": {"client": caller.host, "error": error.message}})


CallKind: TypeAlias = Literal["submit", "fetch"]


class CallRecord:
    """The record of one Submit or Fetch: metrics while it runs, and one log line when it ends."""

    def __init__(self, metrics: Metrics, kind: CallKind, inbound: Inbound[Any]) -> None:
        """Begin the record of a call before its first message is read. It closes with the call's resources."""
        caller = inbound.caller
        self._metrics = metrics
        self._kind = kind
        self._began = monotonic()
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._stage_ms: dict[str, float] = {}
        self._bytes = 0
        # Text, not the error: its traceback refers to the call's frames, which refer to this record.
        self._status, self._error_message = "", ""
        trace = trace_id(caller.traceparent)
        self._trace = {"trace": trace} if trace else {}
        self._span: CallSpan | None = None
        self.request_id, self.client_id = caller.proxy_request_id, caller.host
        """The caller's identifiers, truncated in the log line: they may not be validated yet."""
        # Set once every image has its outcome: a caller that disconnects later has ended its call normally.
        self.complete = False
        metrics.call_began(kind)
        inbound.resources.callback(self._close)
        inbound.on_error = self._failed

    def admitted(self, caller: Caller) -> None:
        """Begin the call's span. Others than callers of this server write no spans to its operator's collector."""
        self.client_id = caller.name
        self._span = CallSpan.begin(SpanName(f"encoder.{self._kind}"), caller.traceparent)
        if self._span is not None:
            current.set(self._span.traceparent)  # for the tasks of this call

    def submitted(
        self, outcome: Literal["cached", "queued", "failed"], error: EncoderError | None = None
    ) -> None:
        """Record the answer to an image of a Submit."""
        self._metrics.submitted(outcome, self._count(outcome, error))

    def uploaded(self, size: int, seconds: float) -> None:
        """Record an image whose last byte arrived `seconds` after it was named."""
        self._bytes += size
        self._metrics.uploaded(size, seconds)

    def stages(self, began_s: Mapping[str, float], stage_ms: Mapping[str, float]) -> None:
        """Record the stages of an image that was encoded for the call."""
        if self._span is not None:
            self._span.stages(began_s, stage_ms)

    def fetched(
        self,
        outcome: Literal["device", "host", "peer", "encoded", "failed"],
        wait_s: float,
        stage_ms: Mapping[str, float],
        error: EncoderError | None = None,
    ) -> None:
        """Record one window of an image of a Fetch: where its rows came from, and how long the caller waited."""
        failure = self._count(outcome, error)
        for stage, ms in {**stage_ms, "wait": wait_s * 1000}.items():
            self._stage_ms[stage] = max(ms, self._stage_ms.get(stage, 0.0))
        self._metrics.fetched(outcome, wait_s, failure)

    def transferred(self, transport: pb.Transport.ValueType, size: int, seconds: float) -> None:
        """Record rows sent."""
        self._bytes += size
        self._metrics.transferred(transport, size, seconds)

    def _failed(self, error: EncoderError) -> None:
        """Record that the call as a whole failed."""
        self._status, self._error_message = error.status.name, error.message

    def _close(self) -> None:
        """Count the call and write its log line. Stage times are those of its slowest image."""
        name = self._status or ("OK" if self.complete else Status.CANCELLED.name)
        self._metrics.call_ended(self._kind, name)
        if self._span is not None:
            images = {f"encoder.images.{outcome}": count for outcome, count in self._outcomes.items()}
            self._span.end(name, **images)
        fields: dict[str, object] = {
            "request": self.request_id[:MAX_REQUEST_ID_BYTES],
            "client": self.client_id[:MAX_REQUEST_ID_BYTES],
            **self._trace,
            "status": name,
        }
        fields |= {"images": self._outcomes.total(), **self._outcomes, **self._reasons}
        if self._bytes:
            fields["bytes"] = self._bytes
        fields["ms"] = round((monotonic() - self._began) * 1000, 1)
        fields |= {f"{stage}_ms": round(ms, 1) for stage, ms in self._stage_ms.items()}
        if self._status:
            fields["error"] = self._error_message
        log.info(self._kind, extra={"fields": fields})

    def _count(self, outcome: str, error: EncoderError | None) -> str:
        """Count an image; return the label of its error, empty without one."""
        self._outcomes[outcome] += 1
        if error is None:
            return ""
        self._reasons[failure := reason(error)] += 1
        return failure
