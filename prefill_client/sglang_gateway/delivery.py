"""Rows on their way to SGLang: one ZeroMQ message a receiver, sent out of the memory in which the rows lie."""

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from encoder_contract.errors import DeadlineError, UnavailableError
from prefill_client.sglang_gateway.parts import Address

# A receiver is bound before its request is sent: it accepts at once or is gone.
CONNECT_S = 10.0
# 4 GB, which 64 images of 1080p have in the largest models, take this long at half a gigabit a second.
TRANSFER_S = 60.0
# A small message is copied by ZeroMQ, and may still wait to be written when its rows are no longer read.
_LINGER_MS = 10_000
# What ZeroMQ's thread may take to drop a message whose socket was closed.
_DROP_S = 5.0


class Delivery:
    """Sends messages of two frames. Belongs to one event loop; one thread of ZeroMQ writes to the sockets."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))

    def close(self) -> None:
        """Close all sockets; what is being sent is dropped."""
        self._context.destroy(linger=0)

    async def deliver(self, receivers: Sequence[Address], frame: bytes, rows: NDArray[np.generic]) -> None:
        """Send `frame` and `rows` to every receiver; a message arrives whole or not at all.

        The rows must be C-contiguous. They are not copied, but read until this returns. Raises `UnavailableError` if a
        receiver accepts no connection, and `DeadlineError` if it reads too slowly.
        """
        sending = [asyncio.create_task(self._send(receiver, frame, rows)) for receiver in receivers]
        try:
            await asyncio.gather(*sending)
        finally:
            for each in sending:
                each.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def _send(self, receiver: Address, frame: bytes, rows: NDArray[np.generic]) -> None:
        # One socket a message: a receiver of zmq_to_tokenizer lives as long as its request.
        socket = self._context.socket(zmq.PUSH)
        released = asyncio.Event()
        linger_ms = 0
        try:
            socket.set(zmq.IMMEDIATE, 1)  # a message waits for its connection here, where it can be cancelled
            socket.set(zmq.IPV6, int(":" in receiver.host))
            socket.connect(receiver.url)
            try:
                async with asyncio.timeout(CONNECT_S):
                    await socket.send_multipart([frame, _lent(rows, released)], copy=False)
            except TimeoutError:
                raise UnavailableError(f"{receiver.url} accepts no rows") from None
            try:
                async with asyncio.timeout(TRANSFER_S):
                    await released.wait()
            except TimeoutError:
                raise DeadlineError(f"{receiver.url} did not read its rows in {TRANSFER_S:g} s") from None
            linger_ms = _LINGER_MS
        finally:
            socket.close(linger=linger_ms)  # a message that is not to be sent is dropped
            with suppress(TimeoutError):
                async with asyncio.timeout(_DROP_S):
                    await released.wait()


def _lent(rows: NDArray[np.generic], released: asyncio.Event) -> NDArray[np.uint8]:
    """Return the bytes of the rows as an object of its own; `released` is set when ZeroMQ has dropped it.

    ZeroMQ drops a message, on a thread of its own, once its last byte was written to the socket or copied.
    """
    lent = rows.reshape(-1).view(np.uint8)
    weakref.finalize(lent, asyncio.get_running_loop().call_soon_threadsafe, released.set).atexit = False
    return lent
