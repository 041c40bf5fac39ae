"""Host memory for rows that enter the engine: the scheduler's process writes it, and every worker maps it.

The service has no access to it, so it cannot change a row between the scheduler's decision to use it and the worker's
read. The memory is a memfd: it leaves no file behind and needs no space in /dev/shm. The workers are processes of the
same user on the same host, and open it through /proc.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Extent = tuple[int, int]
"""(offset, length), bytes."""


@dataclass(frozen=True, slots=True)
class RowLoad:
    """One image to load: from host memory, or from the worker's own copy with the number `staged` if that is not 0.

    Pickles to a few hundred bytes.
    """

    identifier: str
    extents: tuple[Extent, ...]
    staged: int = 0


class HostMemory:
    """Allocates extents of a fixed number of bytes. Not thread-safe, except `write` and `read`."""

    def __init__(self, size_bytes: int) -> None:
        self._file = os.memfd_create("encoder-service-rows", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size_bytes)
        self.size_bytes = size_bytes
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes = np.frombuffer(mmap.mmap(self._file, size_bytes), np.uint8)
        # Free extents, never adjacent: length by begin, begin by end. All operations take the same time at any size.
        self._free = {0: size_bytes}
        self._ends = {size_bytes: 0}
        self.free_bytes = size_bytes
        """Bytes that are not allocated."""

    def allocate(self, size: int) -> tuple[Extent, ...] | None:
        """Return extents of `size` bytes in total; None if there is not enough free memory."""
        if size > self.free_bytes:
            return None
        self.free_bytes -= size
        extents: list[Extent] = []
        while size:
            offset, length = self._free.popitem()
            del self._ends[offset + length]
            if length > size:
                self._add(offset, length - size)
                offset, length = offset + length - size, size
            extents.append((offset, length))
            size -= length
        return tuple(extents)

    def release(self, extents: Sequence[Extent]) -> None:
        """Free extents."""
        for offset, length in extents:
            self.free_bytes += length
            if (before := self._ends.pop(offset, None)) is not None:
                length += self._free.pop(before)
                offset = before
            if (after := self._free.pop(offset + length, None)) is not None:
                del self._ends[offset + length + after]
                length += after
            self._add(offset, length)

    def _add(self, offset: int, length: int) -> None:
        self._free[offset] = length
        self._ends[offset + length] = offset

    def write(self, extents: Sequence[Extent], content: NDArray[np.uint8]) -> None:
        """Copy `content`, uint8 [bytes], into extents of the same total length. Thread-safe."""
        begin = 0
        for offset, length in extents:
            self._bytes[offset : offset + length] = content[begin : begin + length]
            begin += length

    def read(self, extents: Sequence[Extent]) -> NDArray[np.uint8]:
        """Return the bytes of extents, uint8 [bytes]: a view of one extent, a copy of several. Thread-safe."""
        pieces = [self._bytes[offset : offset + length] for offset, length in extents]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def close(self) -> None:
        """Close the memory; the kernel frees it when no process maps it."""
        os.close(self._file)


class MappedMemory:
    """A `HostMemory` mapped in a worker; read-only unless `writable`."""

    def __init__(self, path: str, *, writable: bool = False) -> None:
        file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            size = os.fstat(file).st_size
            self.whole = np.frombuffer(mmap.mmap(file, size, mmap.MAP_SHARED, access), np.uint8)
        finally:
            os.close(file)
        self.path = path

    def pieces(self, extents: Sequence[Extent]) -> list[NDArray[np.uint8]]:
        """Return a view of each extent, uint8 [length]."""
        return [self.whole[offset : offset + length] for offset, length in extents]
