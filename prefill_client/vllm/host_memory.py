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

from encoder_contract.arena import Arena
from encoder_contract.extents import Extent, pairs, views


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
        self._space = Arena(size_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        return self._space.free_pages

    def allocate(self, size: int) -> tuple[Extent, ...] | None:
        """Return extents of `size` bytes in total; None if there is not enough free memory."""
        return self._space.allocate(size, max_runs=self._space.free_runs)

    def release(self, extents: Sequence[Extent]) -> None:
        """Free extents."""
        self._space.free(extents)

    def write(self, extents: Sequence[Extent], content: NDArray[np.uint8]) -> None:
        """Copy `content`, uint8 [bytes], into extents of the same total length. Thread-safe."""
        for target, source in pairs(views(self._bytes, extents), [content]):
            target[:] = source

    def read(self, extents: Sequence[Extent]) -> NDArray[np.uint8]:
        """Return the bytes of extents, uint8 [bytes]: a view of one extent, a copy of several. Thread-safe."""
        pieces = views(self._bytes, extents)
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
