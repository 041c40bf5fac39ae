"""Inbound calls: counted, and bounded in size and time, before any message is parsed."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from encoder_contract.errors import DeadlineError, EncoderError, InvalidRequestError
from encoder_service.api import messages
from encoder_service.api.messages import Context
from encoder_service.limits import Shares

log = logging.getLogger(__name__)

# The first request of a call has a few kilobytes; it must arrive within this time.
REQUEST_S = 10.0

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Methods: TypeAlias = dict[str, Handler]  # of one service, by name
Request = TypeVar("Request")
Answers: TypeAlias = "AsyncGenerator[Message | bytes]"
Parse: TypeAlias = Callable[[bytes], Request]
Read: TypeAlias = Callable[[], Awaitable[Any]]
Serve: TypeAlias = "Callable[[Requests[Any], Context], Answers]"


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


class Entrance:
    """Admits at most `max_calls` calls at a time, and from each host only its share of them."""

    def __init__(self, max_calls: int, reader_idle_s: float) -> None:
        """A call ends if its caller takes longer than `reader_idle_s` to read one answer, of at most 1 MiB."""
        self._reader_idle_s = reader_idle_s
        # A call counts until its status is sent; one whose caller does not read counts, but is no longer served.
        self._places = Shares(max_calls, "open calls")
        self._served: set[Context] = set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    async def emptied(self) -> None:
        """Return when no call is being served: the last status was sent."""
        await self._emptied.wait()

    def stream(
        self, serve: Callable[[Requests[Request], Context], Answers], parse: Parse[Request]
    ) -> Handler:
        """Return the handler of a method that reads its requests itself. `parse` may raise `EncoderError`."""

        # gRPC's own iterator of requests is a reference cycle that keeps the last message: `read` is none.
        async def handle(_unread: AsyncIterator[bytes], context: Context) -> None:
            with messages.Border(context, partial(_refused, context)):
                self._enter(context)
                # When the caller disconnects, its call releases what it holds now, not at garbage collection.
                async with aclosing(serve(Requests(context.read, parse), context)) as answers:
                    async for answer in answers:
                        await self._send(answer, context)

        return grpc.stream_stream_rpc_method_handler(handle, None, _serialize)

    def one_request(self, serve: Callable[[Request, Context], Answers], parse: Parse[Request]) -> Handler:
        """Return the handler of a method that answers one request with a stream."""

        async def answers(requests: Requests[Request], context: Context) -> Answers:
            async with aclosing(serve(await requests.first(), context)) as messages:
                async for message in messages:
                    yield message

        return self.stream(answers, parse)

    def unary(
        self, answer: Callable[[Request, Context], Awaitable[Message]], parse: Parse[Request]
    ) -> Handler:
        """Return the handler of a method that answers one request with one message."""

        async def answers(requests: Requests[Request], context: Context) -> Answers:
            yield await answer(await requests.first(), context)

        return self.stream(answers, parse)

    async def _send(self, answer: Message | bytes, context: Context) -> None:
        try:
            async with asyncio.timeout(self._reader_idle_s):
                await context.write(answer)
        except TimeoutError as error:
            self._serve_no_more(context)  # the status is queued behind the unread answer
            raise DeadlineError(
                f"the caller read nothing for {self._reader_idle_s:g} s (--reader-idle-s)"
            ) from error
        except grpc.aio.InternalError as error:  # the call has ended, and its cancellation is about to arrive
            raise asyncio.CancelledError from error

    def _enter(self, context: Context) -> None:
        holders = (messages.host(context),)
        self._places.take(holders)
        self._served.add(context)
        self._emptied.clear()

        def leave(_task: "asyncio.Task[Any]") -> None:
            self._places.give_back(holders)
            self._serve_no_more(context)

        # gRPC serves a call, to its status, in one task. A callback of the context would be a reference cycle.
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


def _refused(context: Context, error: EncoderError) -> None:
    log.info("refused", extra={"fields": {"client": messages.host(context), "error": error.message}})


def _serialize(message: Message | bytes) -> bytes:
    """Rows are already framed, as bytes: protobuf would copy every megabyte twice more."""
    return message if isinstance(message, bytes) else message.SerializeToString()
