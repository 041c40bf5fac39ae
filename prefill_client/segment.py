"""Rows in shared memory: a server's segment mapped read-only into this process, once, and viewed in place."""

import mmap
import os
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from encoder_contract.errors import InternalError, StaleHandleError
from encoder_contract.handle import GENERATION_BYTES, SEGMENT_ID_BYTES, Handle
from prefill_client.images import element_type, tensor_view

if TYPE_CHECKING:
    import torch

_MAPPED_SEGMENTS = 16
"""Replicas on one host that a process reads from; one more and the least recently used is unmapped."""


class SharedRows:
    """Rows of a handle, where they lie. Holds the mapping, not the rows: the open Fetch stream does that.

    Whoever reads in place after the stream may have ended calls `check` when done: if it passes, all that was
    read was right.
    """

    def __init__(self, handle: Handle, width: int, dtype: str) -> None:
        """Map the handle's segment unless it is mapped. `width`, `dtype`: a row, as in `ImageReady`.

        Raises `StaleHandleError` when the segment or the rows are gone, `InternalError` for a senseless handle.
        """
        self.dtype = dtype
        self._handle = handle
        self._segment = _mapped(handle)
        self._row_shape = (-1, width)
        self.check()

    @property
    def arrays(self) -> list[NDArray[np.generic]]:
        """One read-only view [rows, width] for each extent, in row order; bfloat16 as its bits in uint16."""
        element = element_type(self.dtype)
        return [piece.view(element).reshape(self._row_shape) for piece in self._segment.pieces(self._handle)]

    @property
    def contiguous(self) -> bool:
        """Whether `array` needs no copy."""
        return len(self._handle.extents) == 1

    def array(self, *, gather: bool = False) -> NDArray[np.generic]:
        """Return all rows as one array [rows, width]: a read-only view when they lie in one extent.

        When they do not: a copy with `gather`, else `ValueError`. Raises `StaleHandleError`.
        """
        if self.contiguous:
            return self.arrays[0]
        if not gather:
            raise ValueError(
                f"the rows lie in {len(self._handle.extents)} extents: ask for a copy with gather"
            )
        return self.copy()

    def copy(self) -> NDArray[np.generic]:
        """Return a copy [rows, width] that outlives the Fetch stream. Raises `StaleHandleError`."""
        rows = np.concatenate(self.arrays)
        self.check()
        return rows

    def tensor(self, *, gather: bool = False) -> "torch.Tensor":
        """Return what `array` does as a torch tensor of the real type; a view must not be written to."""
        return tensor_view(self.array(gather=gather), self.dtype)

    def check(self) -> None:
        """Raise `StaleHandleError` unless the rows are still those that the handle names."""
        self._segment.check(self._handle)


def map_rows(handle: Handle) -> NDArray[np.uint8]:
    """Return the bytes of a handle's rows, flat: a read-only view when they lie in one extent, else a copy.

    Raises `StaleHandleError` when the segment or the rows are gone.
    """
    segment = _mapped(handle)
    segment.check(handle)
    pieces = segment.pieces(handle)
    if len(pieces) == 1:
        return pieces[0]
    copied = np.concatenate(pieces)
    segment.check(handle)
    return copied


@dataclass(frozen=True, slots=True)
class _MappedSegment:
    path: str
    segment_id: bytes
    content: NDArray[np.uint8]

    def pieces(self, handle: Handle) -> list[NDArray[np.uint8]]:
        return [self.content[offset : offset + length] for offset, length in handle.extents]

    def check(self, handle: Handle) -> None:
        at = handle.generation_offset
        found = int(self.content[at : at + GENERATION_BYTES].view("<u8")[0])
        if found != handle.generation:
            raise StaleHandleError(f"the rows of a handle into {self.path} are no longer held")


_segments: OrderedDict[str, _MappedSegment] = OrderedDict()
_segments_lock = threading.Lock()


def _mapped(handle: Handle) -> _MappedSegment:
    """Return the mapping of the handle's segment, made on first use, after checking the handle against it."""
    with _segments_lock:
        segment = _segments.get(handle.segment)
        if segment is None or segment.segment_id != handle.segment_id:
            segment = _map(handle)
            _unmap_dead()
            _segments[handle.segment] = segment
        _segments.move_to_end(handle.segment)
    _check_bounds(handle, len(segment.content))
    return segment


def _unmap_dead() -> None:
    """Let go of segments whose server has gone, lest a mapping keep memory, and of the oldest over the bound.

    Views that someone still has keep their mapping alive.
    """
    for path in [path for path in _segments if not os.path.exists(path)]:
        del _segments[path]
    while len(_segments) >= _MAPPED_SEGMENTS:
        _segments.popitem(last=False)


def _map(handle: Handle) -> _MappedSegment:
    try:
        file = os.open(handle.segment, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StaleHandleError(f"the segment {handle.segment} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(file)
        # A mapping beyond the end of its file is a SIGBUS at some later read.
        if not stat.S_ISREG(status.st_mode) or not 0 < handle.segment_bytes <= status.st_size:
            raise InternalError(f"{handle.segment} is no segment of {handle.segment_bytes} bytes")
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
    spans = (*handle.extents, (handle.generation_offset, GENERATION_BYTES))
    if not handle.extents or any(
        offset < SEGMENT_ID_BYTES or length <= 0 or offset + length > segment_bytes
        for offset, length in spans
    ):
        raise InternalError(f"a handle reaches outside its segment {handle.segment}")
