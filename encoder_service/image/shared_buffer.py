"""Memory that the server shares with a decoder process."""

import ctypes
import fcntl
import math
import mmap
import os
import weakref
from itertools import count

import numpy as np

from encoder_service.image.pillow import Pixels
from encoder_service.image.source import Source

# A child that could shrink the memory could have the server killed by SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# A buffer larger than this gives its pages back as soon as its pixels are no longer in use.
_KEPT_BYTES = 64 << 20
_SMALLEST_BYTES, _ALIGNMENT = 1 << 20, 64
_libc = ctypes.CDLL(None, use_errno=True)


class SharedBuffer:
    """Memory shared with a decoder process, for one request at a time: the file goes in, the pixels come out.

    `descriptor` stays open until `close_descriptor` is called or this object is garbage-collected.
    """

    def __init__(self, needed_bytes: int = 0) -> None:
        size = self.size = max(_SMALLEST_BYTES, 1 << (needed_bytes - 1).bit_length())
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
        self._lent: set[int] = set()  # one number for each array that is still in use

    @property
    def is_free(self) -> bool:
        """Whether no array of its pixels is in use."""
        return not self._lent

    @property
    def is_new(self) -> bool:
        """Whether the decoder process has not received it yet."""
        return self.close_descriptor.alive

    def write(self, file: bytes) -> None:
        """Write a file to the beginning."""
        self._bytes[: len(file)] = file

    def lend(self, shape: tuple[int, ...], offset: int) -> Pixels:
        """Return the pixels at `offset`, uint8 of this shape. The buffer is in use for as long as the array lives."""
        pixels = np.frombuffer(self._bytes, np.uint8, math.prod(shape), offset).reshape(shape)
        number = next(self._numbers)
        self._lent.add(number)
        weakref.finalize(pixels, self._take_back, number).atexit = False
        return pixels

    def _take_back(self, number: int) -> None:
        # Free the pages first: once the buffer counts as free, another request may use it.
        if self._lent == {number} and self.size > _KEPT_BYTES:
            self._free_pages()
        self._lent.discard(number)

    def _free_pages(self) -> None:
        """Give the pages back to the kernel. `mmap.madvise` would hold the GIL for about 25 ms per 100 MB."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.size), mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "a decoder's memory cannot be given back")


def pixels_offset(source: Source) -> int:
    """Return where the pixels of an image begin in its buffer: behind the file."""
    return -(-len(source.data) // _ALIGNMENT) * _ALIGNMENT
