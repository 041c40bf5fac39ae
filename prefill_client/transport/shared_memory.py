"""Rows in shared memory: maps a server's segment once, read-only, and reads rows in place."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from encoder_contract.device_memory import DeviceMemory, DeviceMemoryError, open_memory
from encoder_contract.errors import InternalError, StaleHandleError
from encoder_contract.extents import Extent, views
from encoder_contract.handle import GENERATION_BYTES, SEGMENT_ID_BYTES, Handle
from encoder_contract.segment_file import open_segment, remove_if_ownerless, segment_proof
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.receiver import Arrival, Receiver
from prefill_client.transport.rows import OwnRows, Rows, element_type

if TYPE_CHECKING:  # it imports grpc
    from prefill_client.transport.channels import Channels

_MAPPED_SEGMENTS = 16
"""Number of segments mapped at the same time. The least recently used one is unmapped first."""


class SharedRows(Rows):
    """The rows of a handle, read in place. The object keeps the segment mapped; the open Fetch call holds the rows.

    Every read checks before and after that the memory still has the handle's rows. Another process of this host needs
    only `handle`, `width` and `dtype` to read the rows.
    """

    handle: Handle

    on_device = False

    def __init__(
        self, handle: Handle, width: int, dtype: str, *, is_held: Callable[[], bool] = lambda: True
    ) -> None:
        """Map the handle's segment unless it is mapped. A row has `width` elements of type `dtype`.

        `is_held` returns whether the Fetch call is known to be open. Raises `StaleHandleError` if the segment or the
        rows are gone, and `InternalError` for an invalid handle.
        """
        if bool(handle.memory) != self.on_device:
            transport = "device" if handle.memory else "shm"
            raise InternalError(f"a handle into {handle.segment} is for the transport {transport}")
        self.handle = handle
        self._is_held = is_held
        self.dtype = dtype
        self._segment = _mapped(handle)
        self._segment.check(handle)
        self._element = element_type(dtype)
        self.shape = (handle.row_bytes // (width * self._element.itemsize), width)

    @property
    def lost(self) -> bool:
        """Whether the rows are gone: the Fetch call has ended, or the memory has other rows."""
        return not self._is_held() or not self._segment.holds(self.handle)

    @contextmanager
    def reading(self) -> Iterator[NDArray[np.generic]]:
        """Lend the rows [rows, width], read-only: in place if they are one extent, else a copy.

        Raises `StaleHandleError` on entry if the rows are gone, or on exit if they were replaced: discard results then.
        That error replaces an error of the block, which may be a consequence of it.
        """
        with self._checked():
            yield self._array()

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend the rows in place, as `reading` does."""
        with self.reading() as array:
            yield OwnRows(array)

    def own(self) -> Rows:
        """Return a copy that outlives the Fetch call. Raises `StaleHandleError`."""
        return OwnRows(self.copy())

    def copy(self) -> NDArray[np.generic]:
        """Return a copy [rows, width] that outlives the Fetch call. Raises `StaleHandleError`."""
        with self.reading() as array:
            return array if array.flags.writeable else array.copy()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Check before and after the block that the memory has the handle's rows. Raises `StaleHandleError`."""
        if not self._is_held():
            raise StaleHandleError("the call that held the rows has ended")
        self._segment.check(self.handle)
        try:
            yield
        except Exception:
            self._segment.check(self.handle)
            raise
        self._segment.check(self.handle)

    def _array(self) -> NDArray[np.generic]:
        pieces = self._segment.pieces(self.handle)
        flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return flat.view(self._element).reshape(self.shape)


class SharedMemoryReceiver(Receiver):
    """Receives handles from a server of this host whose segment this process can read."""

    transport = pb.TRANSPORT_SHM
    holds = True

    def __init__(self, proof: bytes) -> None:
        """`proof` is the beginning of the segment, which shows the server that this process can read it."""
        self._proof = proof

    @classmethod
    def from_server(
        cls,
        endpoint: str,
        description: pb.DescribeResponse,
        channels: "Channels",  # noqa: ARG003
    ) -> Self | None:
        """Return a receiver if the server is on this host and this process can read its segment."""
        proof = segment_proof(endpoint, description.shm_segment)
        return cls(proof) if proof else None

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Return whether the message has a handle into the segment."""
        return ready.HasField("handle") and not ready.handle.memory

    def ask(self, request: pb.FetchRequest) -> None:
        """Add the transport and the proof."""
        super().ask(request)
        request.shm_proof = self._proof

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:
        """Return the arrival of the rows, which is complete."""
        return _SharedArrival(ready, is_open)


class _SharedArrival(Arrival):
    def __init__(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> None:
        self._ready = ready
        self._is_open = is_open

    def rows(self) -> SharedRows:
        handle = Handle.from_message(self._ready.handle)
        return SharedRows(handle, self._ready.width, self._ready.dtype, is_held=self._is_open)


@dataclass(frozen=True, slots=True)
class _MappedSegment:
    path: str
    segment_id: bytes
    content: NDArray[np.uint8]
    memories: dict[tuple[bytes, int], DeviceMemory] = field(default_factory=dict)
    """Opened device memory, by name and GPU. It is closed with the segment."""

    def memory(self, handle: Handle, gpu: int) -> DeviceMemory:
        with _segments_lock:
            if (handle.memory, gpu) not in self.memories:
                try:
                    opened = open_memory(handle.memory, handle.memory_bytes, gpu)
                except DeviceMemoryError as error:
                    raise StaleHandleError(f"the rows of a handle into {self.path}: {error}") from error
                self.memories[handle.memory, gpu] = opened
            return self.memories[handle.memory, gpu]

    def pieces(self, handle: Handle) -> list[NDArray[np.uint8]]:
        return views(self.content, handle.extents)

    def holds(self, handle: Handle) -> bool:
        at = handle.generation_offset
        return int(self.content[at : at + GENERATION_BYTES].view("<u8")[0]) == handle.generation

    def check(self, handle: Handle) -> None:
        if not self.holds(handle):
            raise StaleHandleError(f"the rows of a handle into {self.path} are no longer held")


_segments: LRUCache[str, _MappedSegment] = LRUCache(_MAPPED_SEGMENTS)
_segments_lock = threading.Lock()


def _mapped(handle: Handle) -> _MappedSegment:
    """Return the mapping of the handle's segment; map it on first use. Raises `InternalError` for an invalid handle."""
    with _segments_lock:
        segment = _segments.get(handle.segment)
        if segment is None or segment.segment_id != handle.segment_id:
            segment = _map(handle)
            for path in [path for path in _segments if not os.path.exists(path)]:
                del _segments[path]
            _segments[handle.segment] = segment
    _check_bounds(handle, len(segment.content))
    return segment


def unmap_dead() -> None:
    """Unmap the segments of servers that have ended, and remove the files of those that were killed.

    A server that starts again on the GPU needs the memory, which the driver frees when nobody has it open. Views in
    use stay valid. Freeing memory takes up to a second per tens of GiB: call this on a thread.
    """
    for path in list(_segments):
        if not os.path.exists(path) or remove_if_ownerless(Path(path)):
            with _segments_lock:
                segment = _segments.pop(path, None)
            del segment  # without the lock, because this frees memory


def _map(handle: Handle) -> _MappedSegment:
    try:
        file = open_segment(handle.segment)
    except OSError as error:
        raise StaleHandleError(f"the segment {handle.segment} cannot be opened: {error.strerror}") from error
    try:
        # Reading a mapping beyond the end of its file raises SIGBUS.
        if not 0 < handle.segment_bytes <= os.fstat(file).st_size:
            raise InternalError(f"{handle.segment} is not a segment of {handle.segment_bytes} bytes")
        content = np.frombuffer(
            mmap.mmap(file, handle.segment_bytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
        )
    finally:
        os.close(file)
    segment_id = content[:SEGMENT_ID_BYTES].tobytes()
    if segment_id != handle.segment_id:
        raise StaleHandleError(f"{handle.segment} is not the segment of the handle: the server has restarted")
    return _MappedSegment(handle.segment, segment_id, content)


def _check_bounds(handle: Handle, segment_bytes: int) -> None:
    if not handle.generation:
        # Free pages have generation 0.
        raise InternalError(f"a handle into {handle.segment} has no generation")
    slot = (handle.generation_offset, GENERATION_BYTES)
    whole = (0, handle.memory_bytes) if handle.memory else (SEGMENT_ID_BYTES, segment_bytes)
    if not (
        handle.extents
        and _is_inside(slot, SEGMENT_ID_BYTES, segment_bytes)
        and all(_is_inside(extent, *whole) for extent in handle.extents)
    ):
        raise InternalError(f"a handle into {handle.segment} points outside its memory")


def _is_inside(extent: Extent, begin: int, end: int) -> bool:
    offset, length = extent
    return offset >= begin and length > 0 and offset + length <= end
