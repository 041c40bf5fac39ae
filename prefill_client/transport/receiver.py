"""The receiving side of a transport: its interface, and the inline transport, which works with every server."""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import InternalError
from encoder_contract.extents import Filling
from encoder_contract.stream import check_rows
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.rows import OwnRows, Rows, element_type

if TYPE_CHECKING:  # it imports grpc
    from prefill_client.transport.channels import Channels

# Bytes kept for reuse: two images of 2560x1440 in Qwen3-VL-8B.
MAX_IDLE_BYTES = 256 << 20
# The allocator reuses smaller blocks just as well.
MIN_POOLED_BYTES = 1 << 20


class Buffers:
    """A pool of byte arrays. An array returns to the pool once nothing refers to it or to a view of it.

    Reuse matters because the page faults of a new block of 29 MB take longer than the copy into it.
    """

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.RLock()  # the garbage collector may release a block during `acquire`
        self._idle: list[bytearray] = []
        self._idle_bytes = 0

    def acquire(self, size: int) -> NDArray[np.uint8]:
        """Return an uninitialized array, uint8 [size]."""
        if size < MIN_POOLED_BYTES:
            return np.empty(size, np.uint8)
        block = self._reuse(size) or bytearray(size)
        whole = np.frombuffer(block, np.uint8)
        # Every view, and every view of a view, keeps `whole` alive.
        weakref.finalize(whole, self._release, block).atexit = False
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

    def _release(self, block: bytearray) -> None:
        with self._lock:
            self._idle.append(block)
            self._idle_bytes += len(block)
            while self._idle_bytes > self._max_idle_bytes:
                self._idle_bytes -= len(self._idle.pop(0))


class Arrival(ABC):
    """The rows of one image while they arrive."""

    @property
    def complete(self) -> bool:
        """Whether the call has no more bytes for it."""
        return True

    @property
    def beside(self) -> bool:
        """Whether the bytes arrive beside the call: `fill` receives them."""
        return False

    async def fill(self) -> None:  # noqa: B027 - nothing is the default
        """Receive all bytes. Raises `StaleHandleError` if they cannot be reached. Cancelling it ends the transfer."""

    def add(self, data: memoryview) -> None:  # noqa: ARG002
        """Append the next bytes of the rows. Raises `InternalError` if there are too many."""
        raise InternalError("the server sent the bytes of rows that should stay in its memory")

    @abstractmethod
    def rows(self) -> Rows:
        """Return the rows once they are complete.

        Raises `InternalError` if they are damaged, and `StaleHandleError` if they are gone or cannot be reached.
        """


class Receiver(ABC):
    """One transport from one server; the counterpart of the server's `Sender`. One instance serves all calls.

    Who holds what, and until when: the server holds rows until it has sent them or, with `holds`, until the Fetch call
    ends. Such a call stays open until the caller closes its stream. The caller copies rows that it needs longer.

    Who decides: `from_server`, by the server's description; then `usable`, by what this process can do. A receiver may
    learn the latter only when a call first selects it, or when rows arrive.

    What is checked: `rows`, or reading them, verifies that these are all bytes of the requested image. Bytes that were
    sent have a checksum; shared bytes are checked before and after each use. The caller checks nothing.

    What is always safe: ending a call at any point, and reading rows after it, which are correct or raise
    `StaleHandleError`. Nothing here blocks for longer than it takes to map memory.
    """

    usable: bool = True
    """Whether this process can use the transport, as far as it knows. Calls request only usable transports."""

    transport: ClassVar[pb.Transport.ValueType]
    holds: ClassVar[bool]
    """Whether the rows stay at the server, so that the call must stay open while they are read."""
    by_default: ClassVar[bool] = True
    """Whether callers use the transport by default."""

    @classmethod
    @abstractmethod
    def from_server(
        cls, endpoint: str, description: pb.DescribeResponse, channels: "Channels"
    ) -> Self | None:
        """Return a receiver for a server; None if the server does not offer it or this process cannot use it.

        `channels` has the credentials for further connections.
        """

    @staticmethod
    @abstractmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Return whether the announced rows arrive by this transport."""

    def ask(self, request: pb.FetchRequest) -> None:
        """Add the transport to a request, with the proof that this process may use it."""
        request.transports.append(self.transport)

    @abstractmethod
    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:
        """Return the arrival of the announced rows. `is_open` returns whether the call is known to be open."""

    def close(self) -> None:  # noqa: B027 - nothing is the default
        """Close what the receiver has opened. Calls have ended."""


_buffers = Buffers()


def acquire_buffer(size: int) -> NDArray[np.uint8]:
    """Return memory for the rows of one image, from the pool of this process: see `Buffers`."""
    return _buffers.acquire(size)


class InlineReceiver(Receiver):
    """Receives rows in messages of the call, into memory of this process, and checks their checksum."""

    transport = pb.TRANSPORT_INLINE
    holds = False

    @classmethod
    def from_server(cls, endpoint: str, description: pb.DescribeResponse, channels: "Channels") -> Self:  # noqa: ARG003
        """Return a receiver."""
        return cls()

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:  # noqa: ARG004
        """Return True, because rows arrive inline unless another transport announces them."""
        return True

    def ask(self, request: pb.FetchRequest) -> None:
        """Add the transport, and take small rows inside their announcement."""
        super().ask(request)
        request.rows_inside = True

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:  # noqa: ARG002
        """Return the arrival of rows whose bytes are in the announcement, or follow."""
        return _InlineArrival(ready)


class _InlineArrival(Arrival):
    def __init__(self, ready: pb.ImageReady) -> None:
        self._ready = ready
        self._buffer = acquire_buffer(ready.row_bytes)
        self._filling = Filling([self._buffer.data])

    @property
    def complete(self) -> bool:
        return self._filling.complete

    def add(self, data: memoryview) -> None:
        self._filling.add(data)

    def rows(self) -> OwnRows:
        ready = self._ready
        check_rows(ready, self._filling.checksum)
        elements = self._buffer.view(element_type(ready.dtype))
        return OwnRows(elements.reshape(ready.row_end - ready.row_begin, ready.width))
