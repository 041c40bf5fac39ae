"""Shared memory: a server's segment mapped read-only into this process, once, and rows viewed in place."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from encoder_contract.device_memory import DeviceMemory, DeviceMemoryError, open_memory
from encoder_contract.errors import InternalError, StaleHandleError
from encoder_contract.handle import GENERATION_BYTES, SEGMENT_ID_BYTES, Handle
from encoder_contract.segment_file import open_segment, segment_proof
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.receiver import Arrival, Receiver
from prefill_client.transport.rows import OwnRows, Rows, element_type

_MAPPED_SEGMENTS = 16
"""Replicas on one host that a process reads from; one more and the least recently used is unmapped."""


class SharedRows(Rows):
    """Rows of a handle, where they lie. Holds the mapping, not the rows: the open Fetch stream does that.

    There are two ways to them, and both check that they are still the handle's rows after they were read.
    """

    handle: Handle

    on_device = False

    def __init__(
        self, handle: Handle, width: int, dtype: str, *, is_held: Callable[[], bool] = lambda: True
    ) -> None:
        """Map the handle's segment unless it is mapped. `width`, `dtype`: a row, as in `ImageReady`.

        `is_held` says whether the stream is known to be open. Raises `StaleHandleError` when the segment or the rows
        are gone, `InternalError` for a senseless handle.
        """
        if bool(handle.memory) != self.on_device:
            raise InternalError(f"the rows of a handle into {handle.segment} lie in other memory")
        self.handle = handle
        self._is_held = is_held
        self.dtype = dtype
        self._segment = _mapped(handle)
        self._segment.check(handle)
        self._element = element_type(dtype)
        self.shape = (handle.row_bytes // (width * self._element.itemsize), width)

    @property
    def lost(self) -> bool:
        """Whether the rows can no longer be read: their stream has ended, or others lie there."""
        return not self._is_held() or not self._segment.holds(self.handle)

    @contextmanager
    def reading(self) -> Iterator[NDArray[np.generic]]:
        """Lend the rows: in place when they lie in one extent, else a copy.

        Raises `StaleHandleError` on entering, and on leaving: then what was read, and any error over it, is void.
        """
        with self._checked():
            yield self._array()

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend the rows in place, as `reading` does."""
        with self.reading() as array:
            yield OwnRows(array)

    def own(self) -> Rows:
        """Return a copy, as `copy` does."""
        return OwnRows(self.copy())

    def copy(self) -> NDArray[np.generic]:
        """Return a copy [rows, width] that outlives the Fetch stream. Raises `StaleHandleError`."""
        with self.reading() as array:
            return array if array.flags.writeable else array.copy()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Make sure before and after that these are the handle's rows; if they are not, any error over them is void."""
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
    """Receives handles from a server of this host and user, whose segment we can read."""

    transport = pb.TRANSPORT_SHM
    holds = True

    def __init__(self, proof: bytes) -> None:
        """`proof` is the first bytes of the segment."""
        self._proof = proof

    @classmethod
    def from_server(cls, endpoint: str, description: pb.DescribeResponse) -> Self | None:
        """Return a receiver if the server is on this host and its segment can be read."""
        proof = segment_proof(endpoint, description.shm_segment)
        return cls(proof) if proof else None

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Whether the message has a handle into the segment."""
        return ready.HasField("handle") and not ready.handle.memory

    def ask(self, request: pb.FetchRequest) -> None:
        """Add the transport, and the proof."""
        super().ask(request)
        request.shm_proof = self._proof

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:
        """Return the rows, which are there already."""
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
    """Device memory that was opened for a handle into it, by name and GPU; closed with the segment."""

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
        return [self.content[offset : offset + length] for offset, length in handle.extents]

    def holds(self, handle: Handle) -> bool:
        at = handle.generation_offset
        return int(self.content[at : at + GENERATION_BYTES].view("<u8")[0]) == handle.generation

    def check(self, handle: Handle) -> None:
        if not self.holds(handle):
            raise StaleHandleError(f"the rows of a handle into {self.path} are no longer held")


_segments: LRUCache[str, _MappedSegment] = LRUCache(_MAPPED_SEGMENTS)
_segments_lock = threading.Lock()


def _mapped(handle: Handle) -> _MappedSegment:
    """Return the mapping of the handle's segment, made on first use, after checking the handle against it."""
    with _segments_lock:
        segment = _segments.get(handle.segment)
        if segment is None or segment.segment_id != handle.segment_id:
            segment = _map(handle)
            _unmap_dead()
            _segments[handle.segment] = segment
    _check_bounds(handle, len(segment.content))
    return segment


def _unmap_dead() -> None:
    """Unmap segments whose server has gone, as a mapping keeps their memory allocated. Views in use stay valid."""
    for path in [path for path in _segments if not os.path.exists(path)]:
        del _segments[path]


def _map(handle: Handle) -> _MappedSegment:
    try:
        file = open_segment(handle.segment)
    except OSError as error:
        raise StaleHandleError(f"the segment {handle.segment} cannot be opened: {error.strerror}") from error
    try:
        # A mapping beyond the end of its file is a SIGBUS at some later read.
        if not 0 < handle.segment_bytes <= os.fstat(file).st_size:
            raise InternalError(f"{handle.segment} is not a segment of {handle.segment_bytes} bytes")
        content = np.frombuffer(
            mmap.mmap(file, handle.segment_bytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
        )
    finally:
        os.close(file)
    segment_id = content[:SEGMENT_ID_BYTES].tobytes()
    if segment_id != handle.segment_id:
        raise StaleHandleError(
            f"{handle.segment} is another segment than the handle's: the server has restarted"
        )
    return _MappedSegment(handle.segment, segment_id, content)


def _check_bounds(handle: Handle, segment_bytes: int) -> None:
    if not handle.generation:
        # 0 is what free pages have.
        raise InternalError(f"a handle into {handle.segment} names no generation")
    slot = (handle.generation_offset, GENERATION_BYTES)
    whole = (0, handle.memory_bytes) if handle.memory else (SEGMENT_ID_BYTES, segment_bytes)
    if not (
        handle.extents
        and _is_inside(slot, SEGMENT_ID_BYTES, segment_bytes)
        and all(_is_inside(extent, *whole) for extent in handle.extents)
    ):
        raise InternalError(f"a handle into {handle.segment} reaches outside of what it names")


def _is_inside(extent: tuple[int, int], begin: int, end: int) -> bool:
    offset, length = extent
    return offset >= begin and length > 0 and offset + length <= end
