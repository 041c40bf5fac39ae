"""Delivers rows to SGLang: one ZeroMQ message per receiver, sent from the rows' memory without a copy."""

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from encoder_contract.errors import DeadlineError, UnavailableError
from encoder_contract.turns import Room
from prefill_client.sglang_gateway.parts import Address
from prefill_client.sglang_gateway.together import in_time, together

# Sockets that are open at the same time, two or three descriptors each. More receivers wait.
_MAX_SOCKETS = 128
# SGLang binds a receiver before it sends the request, so the receiver accepts at once or is gone.
CONNECT_S = 10.0
# How long 4 GB take at half a gigabit per second: 64 images of 1080p in the largest models.
TRANSFER_S = 60.0
# ZeroMQ copies a small message, which may still have to be written after ZeroMQ has dropped its rows.
_LINGER_MS = 10_000
# How long ZeroMQ's thread may take to drop a message whose socket was closed.
_DROP_S = 5.0


class Delivery:
    """Sends messages of two frames. Use it from one event loop; a thread of ZeroMQ writes to the sockets."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._sockets = Room(_MAX_SOCKETS)

    def close(self) -> None:
        """Close all sockets. Messages that are being sent are dropped."""
        self._context.destroy(linger=0)

    async def deliver(self, receivers: Sequence[Address], frame: bytes, rows: NDArray[np.generic]) -> None:
        """Send `frame` and `rows` to every receiver. A message arrives complete or not at all.

        The rows must be C-contiguous. They are not copied, but read until this returns. Raises `UnavailableError` if a
        receiver does not accept a connection, and `DeadlineError` if it reads too slowly.
        """
        await together(self._send(receiver, frame, rows) for receiver in receivers)

    async def _send(self, receiver: Address, frame: bytes, rows: NDArray[np.generic]) -> None:
        async with self._sockets.taken():
            await self._send_by_own_socket(receiver, frame, rows)

    async def _send_by_own_socket(self, receiver: Address, frame: bytes, rows: NDArray[np.generic]) -> None:
        # One socket per message: a receiver of zmq_to_tokenizer lives only as long as its request.
        socket = self._context.socket(zmq.PUSH)
        released = asyncio.Event()
        linger_ms = 0
        try:
            socket.set(
                zmq.IMMEDIATE, 1
            )  # send waits for the connection, so that it can be cancelled until then
            socket.set(zmq.IPV6, int(":" in receiver.host))
            socket.connect(receiver.url)
            sending = socket.send_multipart([frame, _lent(rows, released)], copy=False)
            if not await in_time(CONNECT_S, sending):
                raise UnavailableError(f"{receiver.url} does not accept a connection for rows")
            if not await in_time(TRANSFER_S, released.wait()):
                raise DeadlineError(f"{receiver.url} did not read its rows in {TRANSFER_S:g} s")
            linger_ms = _LINGER_MS
        finally:
            socket.close(linger=linger_ms)  # 0 drops the message after an error
            with suppress(TimeoutError):
                async with asyncio.timeout(_DROP_S):
                    await released.wait()


def _lent(rows: NDArray[np.generic], released: asyncio.Event) -> NDArray[np.uint8]:
    """Return the bytes of the rows as a new array object. `released` is set once ZeroMQ has dropped the object.

    ZeroMQ drops a message, on its own thread, once the last byte was written to the socket or copied.
    """
    lent = rows.reshape(-1).view(np.uint8)
    weakref.finalize(lent, asyncio.get_running_loop().call_soon_threadsafe, released.set).atexit = False
    return lent
