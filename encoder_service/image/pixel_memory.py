"""Memory that a decoder process shares with the server: files go in, pixels come out, nothing is copied to be read."""

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import count

import numpy as np

from encoder_service.image.pillow import Pixels
from encoder_service.image.source import Source

# A child that could shrink the memory could have the server killed by SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Where more than this was used, it is given back once nobody needs the pixels.
_KEPT_BYTES = 64 << 20
_SMALLEST_BYTES, _ALIGNED = 1 << 20, 64


class PixelMemory:
    """A piece of memory, used for one request at a time.

    `descriptor` is open until `close_descriptor`, or until nobody has this memory any more.
    """

    def __init__(self, size: int = _SMALLEST_BYTES) -> None:
        self.size = size
        descriptor = os.memfd_create("decoder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes = mmap.mmap(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self.close_descriptor = weakref.finalize(self, os.close, descriptor)
        self._numbers = count()
        self._lent: set[int] = set()  # one for each array that is in use

    @property
    def is_free(self) -> bool:
        """Whether nobody uses pixels in it."""
        return not self._lent

    @property
    def is_new(self) -> bool:
        """Whether nobody else has mapped it yet."""
        return self.close_descriptor.alive

    def put(self, sources: Sequence[Source]) -> list[tuple[int, int]]:
        """Write the files; return for each where it begins, and where its pixels are to go."""
        places = layout(sources)
        for source, (begin, _) in zip(sources, places, strict=True):
            self._bytes[begin : begin + len(source.data)] = source.data
        return places

    def lend(self, source: Source, begin: int) -> Pixels:
        """Return the pixels that begin there, uint8 [H, W, 3]: this memory's for as long as the array is used."""
        width, height = source.header.upright
        pixels = np.frombuffer(self._bytes, np.uint8, 3 * width * height, begin).reshape(height, width, 3)
        number = next(self._numbers)
        self._lent.add(number)
        weakref.finalize(pixels, self._returned, number).atexit = False
        return pixels

    def _returned(self, number: int) -> None:
        # Emptied before it counts as free: from then on another request may be in it.
        if self._lent == {number} and self.size > _KEPT_BYTES:
            self._bytes.madvise(mmap.MADV_REMOVE)
        self._lent.discard(number)


def layout(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Return for each file where it begins in a memory, and where its pixels do."""
    end, places = 0, []
    for source in sources:
        begin, out = end, _up(end + len(source.data), _ALIGNED)
        end = _up(out + 3 * source.header.pixels, _ALIGNED)
        places.append((begin, out))
    return places


def needed_bytes(sources: Sequence[Source]) -> int:
    """Return the size of a memory that has room for files and their pixels: a power of two."""
    _, out = layout(sources)[-1]
    needed = out + 3 * sources[-1].header.pixels
    return max(_SMALLEST_BYTES, 1 << (needed - 1).bit_length())


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
