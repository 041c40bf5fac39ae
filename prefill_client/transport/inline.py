"""Inline: rows arrive in messages of the call itself, into our own memory. Works with every server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import InternalError
from encoder_contract.framing import Checksum
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.buffers import Buffers
from prefill_client.transport.elements import element_type
from prefill_client.transport.transport import Arrival, Receiver, Rows

_buffers = Buffers()


class OwnRows(Rows):
    """Rows in memory of this process."""

    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array = array
        self.shape = array.shape

    @contextmanager
    def reading(self) -> Iterator[NDArray[np.generic]]:
        """Lend the rows."""
        yield self._array

    def copy(self) -> NDArray[np.generic]:
        """Return the rows themselves: nobody else writes to them."""
        return self._array

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend the rows themselves."""
        yield self

    def own(self) -> "OwnRows":
        """Return the rows themselves."""
        return self


class InlineReceiver(Receiver):
    """Gathers the bytes of the rows and checks them."""

    transport = pb.TRANSPORT_INLINE
    holds = False

    @classmethod
    def from_server(cls, endpoint: str, description: pb.DescribeResponse) -> Self:  # noqa: ARG003
        """Return a receiver."""
        return cls()

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:  # noqa: ARG004
        """Whether the rows come inline: so do all that come by no other transport."""
        return True

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:  # noqa: ARG002
        """Return the rows, none of which have arrived yet."""
        return _InlineArrival(ready)


class _InlineArrival(Arrival):
    """One buffer, filled in order."""

    def __init__(self, ready: pb.ImageReady) -> None:
        self._ready = ready
        self._filled = 0
        self._checksum = Checksum()
        self._buffer = _buffers.take(ready.row_bytes)

    @property
    def complete(self) -> bool:
        return self._filled == self._ready.row_bytes

    def add(self, data: memoryview) -> None:
        end = self._filled + len(data)
        if end > self._ready.row_bytes:
            raise InternalError(f"image {self._ready.index}: more bytes than its {self._ready.row_bytes}")
        self._checksum.add(data)
        self._buffer[self._filled : end] = np.frombuffer(data, np.uint8)
        self._filled = end

    def rows(self) -> OwnRows:
        ready = self._ready
        if self._checksum.value != ready.checksum:
            raise InternalError(f"the rows of the image at address {ready.address.hex()} arrived damaged")
        elements = self._buffer.view(element_type(ready.dtype))
        return OwnRows(elements.reshape(ready.row_end - ready.row_begin, ready.width))
