"""How rows arrive: the interface of a transport's receiving side, and inline, which works with every server."""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import InternalError
from encoder_contract.framing import Checksum
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.rows import OwnRows, Rows, element_type

# Bytes kept for reuse: two images of 2560x1440 in Qwen3-VL-8B.
MAX_IDLE_BYTES = 256 << 20
# For smaller blocks the allocator's own reuse is as good.
MIN_POOLED_BYTES = 1 << 20


class Buffers:
    """Hands out byte arrays and takes each back once nothing refers to it or to a view of it.

    A fresh block of 29 MB costs more in page faults than the copy into it.
    """

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.RLock()  # the garbage collector may give a block back during `take`
        self._idle: list[bytearray] = []
        self._idle_bytes = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an uninitialized array, uint8 [size]."""
        if size < MIN_POOLED_BYTES:
            return np.empty(size, np.uint8)
        block = self._reuse(size) or bytearray(size)
        whole = np.frombuffer(block, np.uint8)
        # Every view, and every view of a view, keeps `whole` alive.
        weakref.finalize(whole, self._give_back, block).atexit = False
        return whole[:size]

    def _reuse(self, size: int) -> bytearray | None:
        """Return the smallest idle block of at least `size` and at most twice `size` bytes."""
        with self._lock:
            fitting = [block for block in self._idle if size <= len(block) <= 2 * size]
            if not fitting:
                return None
            block = min(fitting, key=len)
            self._idle.remove(block)
            self._idle_bytes -= len(block)
            return block

    def _give_back(self, block: bytearray) -> None:
        with self._lock:
            self._idle.append(block)
            self._idle_bytes += len(block)
            while self._idle_bytes > self._max_idle_bytes:
                self._idle_bytes -= len(self._idle.pop(0))


class Arrival(ABC):
    """The rows of one image that are arriving."""

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return True

    def add(self, data: memoryview) -> None:  # noqa: ARG002
        """Append the next bytes of the rows. Raises `InternalError` if there are too many."""
        raise InternalError("the server sent bytes of rows that stay in its memory")

    @abstractmethod
    def rows(self) -> Rows:
        """Return the rows once they are complete.

        Raises `InternalError` if they are damaged, and `StaleHandleError` if they are gone or cannot be reached.
        """


class Receiver(ABC):
    """One transport from one server; the server's `Sender` is its counterpart. One instance serves all calls.

    Who holds what, and until when: the server holds rows until it has sent them or, with `holds`, until the Fetch call
    ends. Such a call is kept open until the caller closes its stream; what the caller wants longer, it copies.

    Who decides: `from_server`, by what the server says; then `usable`, by what this process can do, which a receiver
    may find out only when it is asked for, or when rows come.

    What is checked: by `rows` or by reading them, that these are all the bytes of the image asked for: a checksum over
    bytes that travelled, before and after each use of bytes that are shared. No check is left to the caller.

    What is always safe: to end a call at any point, and to read rows after it: they are right, or a `StaleHandleError`.
    Nothing here blocks for longer than mapping memory takes.
    """

    usable: bool = True
    """Whether this process can use it, as far as is known. A call asks for those that are usable when it begins."""

    transport: ClassVar[pb.Transport.ValueType]
    holds: ClassVar[bool]
    """Whether the rows stay at the server, so that the call must stay open while they are read."""
    by_default: ClassVar[bool] = True
    """Whether it is used for callers that name no transports."""

    @classmethod
    @abstractmethod
    def from_server(cls, endpoint: str, description: pb.DescribeResponse) -> Self | None:
        """Return a receiver for a server; None if it does not offer this transport or this process cannot use it."""

    @staticmethod
    @abstractmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Return whether the rows that this message announces come by this transport."""

    def ask(self, request: pb.FetchRequest) -> None:
        """Add the transport to a request, and the proof that this process may use it."""
        request.transports.append(self.transport)

    @abstractmethod
    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:
        """Return the arrival of the rows that are announced. `is_open` tells whether the call is known to be open."""


_buffers = Buffers()


class InlineReceiver(Receiver):
    """Receives rows in messages of the call, into memory of this process, and checks their checksum."""

    transport = pb.TRANSPORT_INLINE
    holds = False

    @classmethod
    def from_server(cls, endpoint: str, description: pb.DescribeResponse) -> Self:  # noqa: ARG003
        """Return a receiver."""
        return cls()

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:  # noqa: ARG004
        """Return True: rows come inline if they come by no other transport."""
        return True

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:  # noqa: ARG002
        """Return the arrival of the rows, which are still to come."""
        return _InlineArrival(ready)


class _InlineArrival(Arrival):
    """One buffer that is filled in order."""

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
