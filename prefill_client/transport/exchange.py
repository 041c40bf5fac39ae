"""A running call to a server: the base class of Submit and Fetch calls."""

import asyncio
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

import grpc

from encoder_contract.errors import EncoderError, InternalError
from prefill_client.transport.channels import LOCAL_FAILURE, ended_early, from_rpc

# The errors of gRPC operations on a call that has ended. Only the first one says why it ended.
_ENDED = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


# How long the status of a call may take to arrive after a write has failed, and how often to look: no event tells it.
STATUS_S, LOOK_AGAIN_S = 1.0, 0.005

Result = TypeVar("Result")


class Exchange:
    """A running call that writes one message at a time and reads messages. Once it has ended, both raise its error.

    In a `SubmitStream`, the client names images, the server answers each, and the client sends the files that the
    server needs. A `RowStream` only reads.
    """

    def __init__(self, call: Any, endpoint: str) -> None:
        self._call = call
        self._endpoint = endpoint
        self._closed = False
        self._writing = asyncio.Lock()
        self._status: tuple[grpc.StatusCode, str | None] | None = None
        call.add_done_callback(self._note_status)

    def is_open(self) -> bool:
        """Whether the call is open, as far as the event loop knows. Thread-safe."""
        return not self._closed and not self._call.done()

    def close(self) -> None:
        """End the call if it has not ended. The server releases everything that it holds for the call."""
        self._closed = True
        self._call.cancel()

    async def _read(self) -> Any:
        """Return the next message. Raises the error of the call. A call that ends here has ended too early."""
        message = await self._read_or_end()
        if message is grpc.aio.EOF:
            raise await self._ended_early()
        return message

    async def _read_or_end(self) -> Any:
        """Return the next message, or `grpc.aio.EOF` if the server has ended the call. Raises the error of the call."""
        try:
            message = await self._call.read()
        except _ENDED as error:
            raise await self._why(error) from error
        if message is grpc.aio.EOF and await self._call.code() is not grpc.StatusCode.OK:
            raise await self._ended_early()
        if message is None:  # bytes that gRPC could not parse
            self.close()
            raise InternalError(f"{self._endpoint}: the server sent a message that cannot be parsed")
        return message

    async def _write(self, message: Any) -> None:
        """Write a message, after earlier writes. Cancelling a write ends the call. Raises the error of the call."""
        try:
            async with self._writing:
                await self._call.write(message)
        except _ENDED as error:
            raise await self._why(error) from error

    async def finish(self) -> None:
        """Read the rest of a call that the server ends. Raises its error."""
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except _ENDED as error:
            raise await self._why(error) from error
        if await self._call.code() is not grpc.StatusCode.OK:
            raise await self._ended_early()

    async def _half_close(self) -> None:
        """Write nothing more, after earlier writes. Raises the error of the call."""
        try:
            async with self._writing:
                await self._call.done_writing()
        except _ENDED as error:
            raise await self._why(error) from error

    async def _why(self, error: Exception) -> EncoderError:
        if isinstance(error, grpc.aio.AioRpcError) and error.details() != LOCAL_FAILURE:
            return from_rpc(error, self._endpoint)
        return await self._ended_early()

    async def _ended_early(self) -> EncoderError:
        """Return the error of a call that has ended before every image had an outcome."""
        deadline = monotonic() + STATUS_S
        while (details := await self._call.details()) == LOCAL_FAILURE and monotonic() < deadline:
            if self._status is not None:
                return ended_early(*self._status, self._endpoint)
            await asyncio.sleep(LOOK_AGAIN_S)
        return ended_early(await self._call.code(), details, self._endpoint)

    def _note_status(self, call: Any) -> None:
        """Note the received status. A write that fails then replaces it by `LOCAL_FAILURE`."""
        if (details := _now(call.details())) != LOCAL_FAILURE:
            self._status = _now(call.code()), details


def _now(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        result: Result = returned.value
        return result
    raise AssertionError("it waits")
