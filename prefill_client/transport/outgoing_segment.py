"""A file in shared memory through which rows go to a server of this host; one image at a time."""

import asyncio
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar, TypeVarTuple

import numpy as np

from encoder_contract.errors import UnavailableError
from encoder_contract.framing import Checksum
from encoder_contract.owned_file import create_owned, remove_ownerless
from encoder_contract.segment_file import CALLERS_PREFIX
from encoder_contract.v1 import encoder_pb2 as pb

# What is copied at a time: it is still in the processor's cache when its checksum is taken.
_COPY_BYTES = 512 << 10

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class OutgoingSegment:
    """Belongs to one Put call. It grows to the largest image, and its memory is used again for the next.

    It has a name only until the server has opened it, and no memory before: a process that is killed leaves at worst an
    empty file, which the next caller or server of this user and folder removes.
    """

    def __init__(self, path: str, file: int) -> None:
        self.path = path
        self._file = file
        self._map: mmap.mmap | None = None

    @classmethod
    def beside(cls, segment: str) -> Self | None:
        """Return an empty one in the folder of a server's segment; None if we cannot write there.

        Those of callers that were killed before they had removed the name are swept away.
        """
        folder = Path(segment).parent
        remove_ownerless(folder, CALLERS_PREFIX)
        try:
            path, file = create_owned(folder, CALLERS_PREFIX)
        except OSError:
            return None
        return cls(str(path), file)

    def unlink(self) -> None:
        """Remove its name: who has opened it keeps it."""
        Path(self.path).unlink(missing_ok=True)

    def reserve(self, size: int) -> bool:
        """Make room for an image of `size` bytes; False if shared memory is full. For a worker thread."""
        if self._map is None or len(self._map) < size:
            try:
                os.posix_fallocate(self._file, 0, size)  # a hole could be a SIGBUS at a later write
                self._map = mmap.mmap(self._file, size)
            except OSError:
                return False
        return True

    def write(self, data: memoryview, begin: int, end: int, checksum: Checksum) -> pb.Extent:
        """Copy bytes [begin, end) of an image's rows to the same place here, and go on with their checksum.

        Returns where they are, for the server. There must be room for the image: `reserve` it first. For a worker
        thread: it takes 0.2 ms per MB, and more in fresh memory. Raises `UnavailableError` once it is closed.
        """
        if (mapped := self._map) is None:
            raise UnavailableError("the Put call was closed")
        target, source = np.frombuffer(mapped, np.uint8), np.frombuffer(data, np.uint8)
        for place in range(begin, end, _COPY_BYTES):
            piece = slice(place, min(place + _COPY_BYTES, end))
            target[piece] = source[piece]
            checksum.add(memoryview(target[piece]))  # type: ignore[arg-type]
        return pb.Extent(offset=begin, length=end - begin)

    def close(self) -> None:
        """Give its memory back; not while a thread reserves or writes."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._map = None


async def whole(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Do work on a thread. A caller that is cancelled leaves when the thread has: others write to the same place."""
    working = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):  # once more: it leaves with the first one
                await asyncio.wait([working])
        working.exception()  # nobody is left to hear it, and asyncio would log it
        raise
