"""Inbound calls: admitted, bounded in size and time before any message is parsed, and logged when they end."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
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
Read: TypeAlias = Callable[[], Awaitable[Any]]


class Requests(Generic[Request]):
    """The requests of one call. Each is parsed when it is read."""

    def __init__(self, read: Read, parse: Parse[Request]) -> None:
        """`read` returns the next message, or `grpc.aio.EOF` after the last."""
        self._read = read
        self._parse = parse
        self._reading: asyncio.Task[bytes | None] | None = None
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
                    await self._raw_within(None, None)

    async def _raw_within(self, timeout_s: float | None, interrupt: asyncio.Event | None) -> bytes:
        if self.have_ended:
            raise StopAsyncIteration
        reading = self._reading
        if reading is None:  # else the wait that began it timed out
            reading = self._reading = asyncio.create_task(self._next())
            reading.add_done_callback(_retrieve_exception)
        interrupted = asyncio.ensure_future(interrupt.wait()) if interrupt else None
        try:
            # gRPC writes into the task's buffer, so a wait that times out must not cancel the task.
            awaited = (reading, interrupted) if interrupted else (reading,)
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if interrupted is not None:
                interrupted.cancel()
        if not reading.done():
            raise TimeoutError
        self._reading = None
        try:
            raw = reading.result()
        finally:
            # An exception refers to this frame: the cycle would keep the call's messages.
            del reading, awaited
        if raw is None:
            self.have_ended = True
            raise StopAsyncIteration
        return raw

    async def first(self) -> Request:
        """Return the first request; raises `DeadlineError` if it is late, `InvalidRequestError` if there is none."""
        try:
            return await self.next_within(REQUEST_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"no request arrived within {REQUEST_S:g} s of the start of the call: send the first message at once"
            ) from error
        except StopAsyncIteration as error:
            raise InvalidRequestError("the call ended before its first message: send a request") from error

    async def only(self) -> Request:
        """Return the request of a call that has one. The caller must end its requests, and so sends nothing more.

        Raises as `first` does.
        """
        request = await self.first()
        try:
            await self.next_within(REQUEST_S)
        except StopAsyncIteration:
            return request
        except TimeoutError as error:
            raise DeadlineError(
                f"the call was not half-closed within {REQUEST_S:g} s of its request: half-close it with the request"
            ) from error
        raise InvalidRequestError("the call has a second request: send one request, and half-close the call")

    async def _next(self) -> bytes | None:
        message = await self._read()
        return message if isinstance(message, bytes) else None


@dataclass(eq=False, slots=True)
class Inbound(Generic[Request]):
    """An inbound call. When it ends, `on_error` gets the error, if any, and then `resources` are released.

    Whoever serves it checks the caller's credentials, and then calls `admit`: callers that are refused take no place.
    """

    caller: Caller
    requests: Requests[Request]
    resources: AsyncExitStack
    on_error: Callable[[EncoderError], None]
    enter: Callable[[], None]
    """Reserves the place that `admit` gives."""
    is_admitted: bool = False
    is_answered: bool = False
    """Whether gRPC has sent an answer."""

    def admit(self) -> None:
        """Give the call a place among the open ones, until its status is sent. Raises `OverloadedError`."""
        self.enter()
        self.is_admitted = True

    async def request(self, arriving: Budget) -> Request:
        """Admit the call, and return its only request, which counts in `arriving` until it is here."""
        self.admit()
        with arriving.hold(self.caller):
            return await self.requests.only()


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
        self._active: set[Context] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no call is active: the last status was sent."""
        await self._idle.wait()

    def stream(
        self,
        serve: Callable[[Inbound[Request]], Answers],
        parse: Parse[Request],
        refusal: Callable[[EncoderError], Message] | None = None,
    ) -> Handler:
        """Return the handler of a method that reads its requests itself. `parse` may raise `EncoderError`.

        With `refusal`, a call with the metadata `HALF_CLOSES` ends once its caller has half-closed, as it does after
        its last answer, or the message that `refusal` makes of an error. HAProxy discards the status and the last
        answers of a call that ends earlier. A call that was not admitted is told, too, but nothing more of it is read.
        """

        # gRPC's own iterator of requests is a reference cycle that keeps the last message; `context.read` is not.
        async def handle(_unread: AsyncIterator[bytes], context: Context) -> None:
            caller = caller_of(context)
            requests, known = Requests(context.read, parse), None
            tell = refusal if HALF_CLOSES in (context.invocation_metadata() or ()) else None
            async with AsyncExitStack() as resources:
                call = Inbound(
                    caller,
                    requests,
                    resources,
                    partial(_log_refusal, caller),
                    partial(self._admit, caller, context),
                )
                try:
                    # When the caller disconnects, its call releases its resources now, not at garbage collection.
                    async with aclosing(serve(call)) as answers:
                        async for answer in answers:
                            await self._send(answer, call, context)
                except Exception as error:  # noqa: BLE001 - logged with an id, which is sent to the caller
                    # Without its traceback, which refers to this frame, which refers to the error.
                    known = known_error(error).with_traceback(None)
                    call.on_error(known)
            # One whose caller reads nothing cannot be told.
            if tell is not None and context in self._active:
                if known is not None and not requests.have_ended:
                    with suppress(DeadlineError):
                        await self._send(tell(known), call, context)
                await requests.half_closed()
            if call.is_admitted and not call.is_answered and context not in self._active:
                # gRPC sends no status while the first answer is unread, and keeps what the caller has sent.
                await asyncio.Event().wait()  # until the caller leaves: its call counts until then
            if known is not None:
                messages.end_with(context, known)
            if context.code():
                with suppress(OverloadedError), self._refused.hold(caller):
                    if tell is not None and known is not None and not call.is_admitted:
                        # A caller that does not read it counts until it leaves.
                        await _write(tell(known), context)
                    await asyncio.sleep(REFUSAL_S)

        return grpc.stream_stream_rpc_method_handler(handle, None, _serialize)

    def one_request(
        self, serve: Callable[[Request, Inbound[Request]], Answers], parse: Parse[Request]
    ) -> Handler:
        """Return the handler of a method that answers one request with a stream."""

        async def answers(call: Inbound[Request]) -> Answers:
            async with aclosing(serve(await call.request(self._arriving), call)) as replies:
                async for reply in replies:
                    yield reply

        return self.stream(answers, parse)

    def unary(
        self,
        answer: Callable[[Request, Caller], Awaitable[Message]],
        parse: Parse[Request],
        identify: Callable[[Caller], object] | None = None,
    ) -> Handler:
        """Return the handler of a method that answers one request with one message.

        `identify` raises the error of a caller that may not call it.
        """

        async def answers(call: Inbound[Request]) -> Answers:
            if identify is not None:
                identify(call.caller)
            yield await answer(await call.request(self._arriving), call.caller)

        return self.stream(answers, parse)

    async def _send(self, answer: Message | bytes, call: Inbound[Any], context: Context) -> None:
        try:
            async with asyncio.timeout(self._reader_idle_s):
                await _write(answer, context)
        except TimeoutError as error:
            self._deactivate(context)  # the status is queued behind the unread answer
            raise DeadlineError(
                f"the caller read no answer for {self._reader_idle_s:g} s: read answers as they come, or cancel"
            ) from error
        call.is_answered = True

    def _admit(self, caller: Caller, context: Context) -> None:
        hold = self._budget.hold(caller)
        self._active.add(context)
        self._idle.clear()

        def leave(_task: "asyncio.Task[Any]") -> None:
            hold.release()
            self._deactivate(context)

        # A call counts against the budget until its status is sent, even if its caller stopped reading and the call is
        # no longer active. gRPC runs a whole call in one task. A callback on the context would be a reference cycle.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(leave)

    def _deactivate(self, context: Context) -> None:
        self._active.discard(context)
        if not self._active:
            self._idle.set()


async def _write(answer: Message | bytes, context: Context) -> None:
    try:
        await context.write(answer)
    except grpc.aio.InternalError as error:  # the call has ended, and its cancellation is about to arrive
        raise asyncio.CancelledError from error


def _retrieve_exception(reading: "asyncio.Task[bytes | None]") -> None:
    """Mark the exception of an ended call's last read as seen; asyncio would log it with a traceback."""
    if not reading.cancelled():
        reading.exception()


def _log_refusal(caller: Caller, error: EncoderError) -> None:
    log.info("refused", extra={"fields": {"client": caller.host, "error": error.message}})


def _serialize(message: Message | bytes) -> bytes:
    """Rows are already framed, as bytes: protobuf would copy every megabyte twice more."""
    return message if isinstance(message, bytes) else message.SerializeToString()


CallKind: TypeAlias = Literal["submit", "fetch"]


class CallRecord:
    """The record of one Submit or Fetch: metrics while it runs, and one log line when it ends.

    Always `close` it.
    """

    def __init__(self, metrics: Metrics, kind: CallKind, caller: Caller) -> None:
        """Begin the record of a call before its first message is read."""
        self._metrics = metrics
        self._kind = kind
        self._began = monotonic()
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._stage_ms: dict[str, float] = {}
        self._bytes = 0
        # Text, not the error: its traceback refers to the call's frames, which refer to this record.
        self._status, self._error_message = "", ""
        self._proxy_request_id = caller.proxy_request_id
        trace = trace_id(caller.traceparent)
        self._trace = {"trace": trace} if trace else {}
        self._span: CallSpan | None = None
        self.set_caller("", caller.host)
        # Set once every image has its outcome: a caller that disconnects later has ended its call normally.
        self.complete = False
        metrics.call_began(kind)

    def set_caller(self, request_id: str, client_id: str) -> None:
        """Set the caller's identifiers, truncated to fit a log line: they are not validated yet."""
        request_id = request_id or self._proxy_request_id
        self._caller = {
            "request": request_id[:MAX_REQUEST_ID_BYTES],
            "client": client_id[:MAX_REQUEST_ID_BYTES],
        }

    def admitted(self, caller: Caller) -> None:
        """Begin the call's span. Others than callers of this server write no spans to its operator's collector."""
        self.set_caller(caller.request_id, caller.name)
        self._span = CallSpan.begin(SpanName(f"encoder.{self._kind}"), caller.traceparent)
        if self._span is not None:
            current.set(self._span.traceparent)  # for the tasks of this call

    def submitted(
        self, outcome: Literal["cached", "queued", "failed"], error: EncoderError | None = None
    ) -> None:
        """Record the answer to an image of a Submit."""
        self._count(outcome, error)
        self._metrics.submitted(outcome, error)

    def uploaded(self, size: int, seconds: float) -> None:
        """Record an image whose last byte arrived `seconds` after it was named."""
        self._bytes += size
        self._metrics.uploaded(size, seconds)

    def stages(self, began_s: Mapping[str, float], stage_ms: Mapping[str, float]) -> None:
        """Record the stages of an image that was encoded for the call; others have none."""
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
        self._count(outcome, error)
        for stage, ms in {**stage_ms, "wait": wait_s * 1000}.items():
            self._stage_ms[stage] = max(ms, self._stage_ms.get(stage, 0.0))
        self._metrics.fetched(outcome, wait_s, error)

    def transferred(self, transport: pb.Transport.ValueType, size: int, seconds: float) -> None:
        """Record rows sent."""
        self._bytes += size
        self._metrics.transferred(transport, size, seconds)

    def failed(self, error: EncoderError) -> None:
        """Record that the call as a whole failed."""
        self._status, self._error_message = error.status.name, error.message

    def close(self) -> None:
        """Count the call and write its log line. Stage times are those of its slowest image."""
        name = self._status or ("OK" if self.complete else Status.CANCELLED.name)
        self._metrics.call_ended(self._kind, name)
        if self._span is not None:
            images = {f"encoder.images.{outcome}": count for outcome, count in self._outcomes.items()}
            self._span.end(name, **images)
        fields: dict[str, object] = {**self._caller, **self._trace, "status": name}
        fields |= {"images": self._outcomes.total(), **self._outcomes, **self._reasons}
        if self._bytes:
            fields["bytes"] = self._bytes
        fields["ms"] = round((monotonic() - self._began) * 1000, 1)
        fields |= {f"{stage}_ms": round(ms, 1) for stage, ms in self._stage_ms.items()}
        if self._status:
            fields["error"] = self._error_message
        log.info(self._kind, extra={"fields": fields})

    def _count(self, outcome: str, error: EncoderError | None) -> None:
        self._outcomes[outcome] += 1
        if error is not None:
            self._reasons[reason(error)] += 1
