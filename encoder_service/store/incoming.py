"""Rows that arrive piece by piece: written into reserved pages, and visible to nobody until they are complete."""

import os

from encoder_contract.errors import InternalError, InvalidRequestError
from encoder_contract.framing import Checksum
from encoder_service.store.entry_table import EntryTable
from encoder_service.store.pin import Pin
from encoder_service.store.segment import Segment
from encoder_service.store.tiers import Entry

# What is read at a time: it is still in the processor's cache when its checksum is taken.
_READ_BYTES = 512 << 10


class Incoming:
    """One embedding on its way into the store; `complete` or `drop` it. Not thread-safe: one writer at a time."""

    def __init__(self, table: EntryTable, segment: Segment, entry: Entry) -> None:
        """Own a reserved entry, and the claim on its address."""
        self._table = table
        self._segment = segment
        self._entry: Entry | None = entry
        base = segment.data_offset
        self._room = [
            segment.view[base + offset : base + offset + length]
            for offset, length in entry.extents(0, entry.tokens)
        ]
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

    def complete(self, checksum: int) -> Pin:
        """Make the rows visible and return a pin on them.

        Raises `InvalidRequestError` if bytes are missing, `InternalError` if they are not those of the checksum.
        """
        if self._left:
            raise InvalidRequestError(f"{self._left} bytes of the rows are missing")
        if self._checksum.value != checksum:
            raise InternalError(
                "the rows arrived damaged: they do not have the checksum that was sent with them"
            )
        entry = self._entry
        assert entry is not None, "the rows are complete, or were dropped"
        self._entry = None
        entry.checksum = checksum
        self._table.commit(entry)
        self._table.unclaim(entry.address)
        return Pin(self._table, self._segment, entry)

    def drop(self) -> None:
        """Discard rows that are not complete; afterwards, or once they are, this does nothing."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._table.abandon(entry)
            self._table.unclaim(entry.address)

    def _use(self, count: int) -> None:
        self._room[0] = self._room[0][count:]
        if not self._room[0]:
            del self._room[0]
