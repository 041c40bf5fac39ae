"""Inbound calls: counted, and bounded in size and time, before any message is parsed."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from encoder_contract.errors import DeadlineError, EncoderError, InvalidRequestError
from encoder_service.api import messages
from encoder_service.api.caller import caller_of
from encoder_service.api.messages import Context
from encoder_service.limits import REFUSAL_S, Budget, Caller
from encoder_service.logs import known_error

log = logging.getLogger(__name__)

# The first request of a call has a few kilobytes; it must arrive within this time.
REQUEST_S = 10.0

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Methods: TypeAlias = dict[str, Handler]  # of one service, by name
Request = TypeVar("Request")
Answers: TypeAlias = "AsyncGenerator[Message | bytes]"
Parse: TypeAlias = Callable[[bytes], Request]
Read: TypeAlias = Callable[[], Awaitable[Any]]


class Requests(Generic[Request]):
    """The requests of one call, each parsed when it is read."""

    def __init__(self, read: Read, parse: Parse[Request]) -> None:
        """`read` returns the next message, or `grpc.aio.EOF` after the last."""
        self._read = read
        self._parse = parse
        self._reading: asyncio.Task[bytes | None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request:
        return await self.within(None)

    async def within(self, seconds: float | None, unless: asyncio.Event | None = None) -> Request:
        """Return the next request; raises `TimeoutError`, also once `unless` is set, or `StopAsyncIteration`."""
        reading = self._begun()
        other = asyncio.ensure_future(unless.wait()) if unless else None
        try:
            # gRPC writes into the task's buffer, so a wait that times out must not cancel the task.
            awaited = (reading, other) if other else (reading,)
            await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if other is not None:
                other.cancel()
        if not reading.done():
            raise TimeoutError
        self._reading = None
        try:
            raw = reading.result()
        finally:
            del reading, awaited  # its exception refers to this frame: a cycle would keep the call's messages
        if raw is None:
            raise StopAsyncIteration
        return self._parse(raw)

    async def begin_next(self) -> None:
        """Begin to read the next request: gRPC takes it off the wire while the one before is being served."""
        self._begun()
        await asyncio.sleep(0)  # a task that has not had its first turn has asked for nothing

    async def first(self) -> Request:
        """Return the first request; raises `DeadlineError` if it is late, `InvalidRequestError` if there is none."""
        try:
            return await self.within(REQUEST_S)
        except TimeoutError as error:
            raise DeadlineError(f"no request arrived within {REQUEST_S:g} s") from error
        except StopAsyncIteration as error:
            raise InvalidRequestError("the call ended before its first message") from error

    def _begun(self) -> "asyncio.Task[bytes | None]":
        if self._reading is None:
            self._reading = asyncio.create_task(self._next())
            self._reading.add_done_callback(_heard)
        return self._reading

    async def _next(self) -> bytes | None:
        message = await self._read()
        return message if isinstance(message, bytes) else None


@dataclass(eq=False, slots=True)
class Inbound(Generic[Request]):
    """A call that came in. However it ends, `on_error` hears why it failed, and then all in `held` is released."""

    caller: Caller
    requests: Requests[Request]
    held: AsyncExitStack
    on_error: Callable[[EncoderError], None]


class Entrance:
    """Admits as many calls as its budget has places for, and from each host only its share of them."""

    def __init__(self, places: Budget, reader_idle_s: float) -> None:
        """A call ends if its caller takes longer than `reader_idle_s` to read one answer, of at most 1 MiB."""
        self._reader_idle_s = reader_idle_s
        self._places = places
        self._served: set[Context] = set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    async def emptied(self) -> None:
        """Return when no call is being served: the last status was sent."""
        await self._emptied.wait()

    def stream(self, serve: Callable[[Inbound[Request]], Answers], parse: Parse[Request]) -> Handler:
        """Return the handler of a method that reads its requests itself. `parse` may raise `EncoderError`."""

        # gRPC's own iterator of requests is a reference cycle that keeps the last message: `read` is none.
        async def handle(_unread: AsyncIterator[bytes], context: Context) -> None:
            caller = caller_of(context)
            async with AsyncExitStack() as held:
                call = Inbound(caller, Requests(context.read, parse), held, partial(_refused, caller))
                try:
                    self._enter(caller, context)
                    # When the caller disconnects, its call releases what it holds now, not at garbage collection.
                    async with aclosing(serve(call)) as answers:
                        async for answer in answers:
                            await self._send(answer, context)
                except Exception as error:  # noqa: BLE001 - an unexpected one is logged under the id that its caller is told
                    known = known_error(error)
                    call.on_error(known)
                    messages.end_with(context, known)
            if context.code():
                await asyncio.sleep(REFUSAL_S)

        return grpc.stream_stream_rpc_method_handler(handle, None, _serialize)

    def one_request(
        self, serve: Callable[[Request, Inbound[Request]], Answers], parse: Parse[Request]
    ) -> Handler:
        """Return the handler of a method that answers one request with a stream."""

        async def answers(call: Inbound[Request]) -> Answers:
            async with aclosing(serve(await call.requests.first(), call)) as messages:
                async for message in messages:
                    yield message

        return self.stream(answers, parse)

    def unary(
        self, answer: Callable[[Request, Caller], Awaitable[Message]], parse: Parse[Request]
    ) -> Handler:
        """Return the handler of a method that answers one request with one message."""

        async def answers(call: Inbound[Request]) -> Answers:
            yield await answer(await call.requests.first(), call.caller)

        return self.stream(answers, parse)

    async def _send(self, answer: Message | bytes, context: Context) -> None:
        try:
            async with asyncio.timeout(self._reader_idle_s):
                await context.write(answer)
        except TimeoutError as error:
            self._serve_no_more(context)  # the status is queued behind the unread answer
            raise DeadlineError(f"the caller read nothing for {self._reader_idle_s:g} s") from error
        except grpc.aio.InternalError as error:  # the call has ended, and its cancellation is about to arrive
            raise asyncio.CancelledError from error

    def _enter(self, caller: Caller, context: Context) -> None:
        place = self._places.hold(caller)
        self._served.add(context)
        self._emptied.clear()

        def leave(_task: "asyncio.Task[Any]") -> None:
            place.release()
            self._serve_no_more(context)

        # A call counts until its status is sent, also if its caller does not read and it is no longer served. gRPC
        # serves a call, to its status, in one task. A callback of the context would be a reference cycle.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(leave)

    def _serve_no_more(self, context: Context) -> None:
        self._served.discard(context)
        if not self._served:
            self._emptied.set()


def _heard(reading: "asyncio.Task[bytes | None]") -> None:
    """Ignore how the last read of an ended call failed: asyncio would log it with a traceback."""
    if not reading.cancelled():
        reading.exception()


def _refused(caller: Caller, error: EncoderError) -> None:
    log.info("refused", extra={"fields": {"client": caller.host, "error": error.message}})


def _serialize(message: Message | bytes) -> bytes:
    """Rows are already framed, as bytes: protobuf would copy every megabyte twice more."""
    return message if isinstance(message, bytes) else message.SerializeToString()
