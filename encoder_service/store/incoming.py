"""Rows that arrive piece by piece: written into reserved pages, and visible to nobody until they are complete."""

import math
import os

import numpy as np
import torch

from encoder_contract.errors import InternalError, InvalidRequestError
from encoder_contract.framing import Checksum
from encoder_service.store.entry_table import EntryTable
from encoder_service.store.pin import Pin
from encoder_service.store.segment import Segment
from encoder_service.store.tiers import Entry

# What is read at a time: it is still in the processor's cache when its checksum is taken.
_READ_BYTES = 512 << 10
# Likewise, when its elements are compared.
_CHECKED_BYTES = 256 << 10


class Incoming:
    """One embedding on its way into the store; `complete` or `drop` it. Not thread-safe: one writer at a time."""

    def __init__(self, table: EntryTable, segment: Segment, entry: Entry, dtype: torch.dtype) -> None:
        """Own a reserved entry of rows of `dtype`, and the claim on its address."""
        self._dtype = dtype
        self._table = table
        self._segment = segment
        self._entry: Entry | None = entry
        base = segment.data_offset
        self._rows = [
            segment.view[base + offset : base + offset + length]
            for offset, length in entry.extents(0, entry.tokens)
        ]
        self._room = list(self._rows)
        self._left = entry.row_bytes
        self._checksum = Checksum()

    def add(self, data: memoryview) -> None:
        """Append bytes. Raises `InvalidRequestError` if there are more than the rows have."""
        if len(data) > self._left:
            raise InvalidRequestError("more bytes came than the rows of this grid have")
        self._checksum.add(data)
        self._left -= len(data)
        while data:
            room = self._room[0]
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            self._use(count)

    def read(self, file: int, offset: int, length: int) -> None:
        """Append `length` bytes from `offset` on of a file: for worker threads.

        The bytes that were read are the ones checked and kept, whatever happens to the file meanwhile. Raises
        `InvalidRequestError` if the file is too short, or the bytes are more than the rows have.
        """
        if length > self._left:
            raise InvalidRequestError("more bytes came than the rows of this grid have")
        end = offset + length
        while offset < end:
            room = self._room[0][: min(_READ_BYTES, end - offset)]
            count = os.preadv(file, [room], offset)
            if count <= 0:
                raise InvalidRequestError("the caller's segment ends before the rows do")
            self._checksum.add(room[:count])
            self._left -= count
            offset += count
            self._use(count)

    def check(self, checksum: int) -> None:
        """Raise `InvalidRequestError` if bytes are missing, `InternalError` if they are not those of the checksum."""
        if self._left:
            raise InvalidRequestError(f"{self._left} bytes of the rows are missing")
        if self._checksum.value != checksum:
            raise InternalError(
                "the rows arrived damaged: they do not have the checksum that was sent with them"
            )

    def check_finite(self) -> None:
        """Raise `InvalidRequestError` for a NaN or an infinity in the rows, all of which have arrived.

        For worker threads: it takes a tenth of a millisecond a megabyte.
        """
        entry = self._entry
        assert entry is not None, "the rows are complete, or were dropped"
        size = self._dtype.itemsize
        seen = 0
        for rows in self._rows:
            signed = np.frombuffer(rows, f"i{size}")
            unsigned = signed.view(f"u{size}")
            infinite = _infinity(self._dtype)
            negative = infinite | 1 << 8 * size - 1
            for begin in range(0, len(signed), _CHECKED_BYTES // size):
                these = slice(begin, begin + _CHECKED_BYTES // size)
                # What is not finite has an infinity's exponent: as integers, the largest of either sign.
                if signed[these].max() >= infinite or unsigned[these].max() >= negative:
                    found = np.flatnonzero((signed[these] & infinite) == infinite)[0]
                    row = (seen + (begin + int(found)) * size) // (entry.row_bytes // entry.tokens)
                    raise InvalidRequestError(
                        f"row {row} of {entry.tokens} has a NaN or an infinity: rows must be finite"
                    )
            seen += len(rows)

    def complete(self, checksum: int) -> Pin:
        """Make the rows visible and return a pin on them. Raises what `check` does."""
        self.check(checksum)
        entry = self._entry
        assert entry is not None, "the rows are complete, or were dropped"
        self._entry, self._rows = None, []
        entry.checksum = checksum
        self._table.commit(entry)
        self._table.unclaim(entry.address)
        return Pin(self._table, self._segment, entry)

    def drop(self) -> None:
        """Discard rows that are not complete; afterwards, or once they are, this does nothing."""
        entry, self._entry, self._rows = self._entry, None, []
        if entry is not None:
            self._table.abandon(entry)
            self._table.unclaim(entry.address)

    def _use(self, count: int) -> None:
        self._room[0] = self._room[0][count:]
        if not self._room[0]:
            del self._room[0]


def _infinity(dtype: torch.dtype) -> int:
    """Return the bits of infinity."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return int(torch.tensor(math.inf, dtype=dtype).view(bits).item())
