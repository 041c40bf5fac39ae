"""One running call to a server: what Submit, Put and Fetch have in common."""

import asyncio
from typing import Any

import grpc

from encoder_contract.errors import EncoderError, InternalError
from prefill_client.transport.channels import ended_early, from_rpc

# How gRPC refuses an operation on a call that has ended; only the first says why it ended.
_ENDED = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class Exchange:
    """Messages go out one after the other, and messages come in. Once the call has ended, both raise its error.

    `SubmitStream` and `PutStream` have the same conversation: images are named, the server answers each, and what it
    wants is sent in pieces. `RowStream` only reads.
    """

    def __init__(self, call: Any, endpoint: str) -> None:
        self._call = call
        self._endpoint = endpoint
        self._closed = False
        self._writing = asyncio.Lock()

    def is_open(self) -> bool:
        """Whether the call is open, as far as the event loop knows; any thread may ask."""
        return not self._closed and not self._call.done()

    def close(self) -> None:
        """End the call, if it has not ended; the server releases what it held for it."""
        self._closed = True
        self._call.cancel()

    async def _read(self) -> Any:
        """Return the next message. Raises the error of the call; a call that ends here has ended early."""
        try:
            message = await self._call.read()
        except _ENDED as error:
            raise await self._why(error) from error
        if message is grpc.aio.EOF:
            raise await ended_early(self._call, self._endpoint)
        if message is None:  # bytes that gRPC could not parse
            self.close()
            raise InternalError(f"{self._endpoint}: sent what is no message of the contract")
        return message

    async def _write(self, message: Any) -> None:
        """Write a message after those before it. Cancelling a write ends the call. Raises the error of the call."""
        try:
            async with self._writing:
                await self._call.write(message)
        except _ENDED as error:
            raise await self._why(error) from error

    async def finish(self) -> None:
        """End our side of the call, so that its images stay submitted, and read what is left. Raises its error."""
        try:
            await self._call.done_writing()
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except _ENDED as error:
            raise await self._why(error) from error

    async def _why(self, error: Exception) -> EncoderError:
        if isinstance(error, grpc.aio.AioRpcError):
            return from_rpc(error, self._endpoint)
        return await ended_early(self._call, self._endpoint)
