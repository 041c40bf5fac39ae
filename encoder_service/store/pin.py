"""Pins: a reader's hold on an embedding (`Pin`) and a writer's (`Incoming`).

Until a `Pin` is released, the bytes stay in place. Rows that are `Incoming` arrive piece by piece in reserved pages; no
reader sees them until they are complete.
"""

import math
import os
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch

from encoder_contract.errors import InternalError, InvalidRequestError
from encoder_contract.framing import Checksum, checksum
from encoder_contract.handle import Handle
from encoder_service.store.arena import Entry, Grid, TierName
from encoder_service.store.segment import Segment


class EntryStore(Protocol):
    """What pins need of the store that made them."""

    segment: Segment

    def unpin(self, entry: Entry) -> None:
        """Undo one pin."""

    def unpin_later(self, entry: Entry) -> None:
        """Undo one pin at the next call. For the garbage collector, which may run while the lock is held."""

    def copy_to_host(self, entry: Entry, wait_s: float) -> Entry:
        """Return a pinned copy of a pinned entry in the host tier, made now if there is none."""

    def commit(self, entry: Entry) -> None:
        """Make a reserved entry visible whose bytes are written; it stays pinned once."""

    def abandon(self, entry: Entry) -> None:
        """Free the pages of a reserved entry whose bytes will not be complete."""


class Pin:
    """A hold on one embedding; release it, or leave its `with` block. One owner: not thread-safe.

    A pin on the host tier gives rows and handles at once. One on the device tier gives handles; for rows it needs
    `to_host` first, which copies: call it from a worker thread.
    """

    __slots__ = ("_entry", "_store")

    def __init__(self, store: EntryStore, entry: Entry) -> None:
        """Own one pin of `entry` that `store` has already counted."""
        self._store = store
        self._entry: Entry | None = entry

    @property
    def address(self) -> bytes:
        """Store address of the embedding."""
        return self._held.address

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return self._held.tokens

    @property
    def grid(self) -> Grid:
        """(t, h, w), in patches, as given to `put`."""
        return self._held.grid

    @property
    def tier(self) -> TierName:
        """The tier of the pinned copy: "device" or "host"."""
        return self._held.tier.name

    def to_host(self, wait_s: float = 2.0) -> None:
        """Move this pin to a copy in the host tier, made now if there is none: takes milliseconds.

        Raises `OverloadedError` if the host tier stays full of pins for `wait_s`; the pin is then unchanged.
        """
        if self.tier != "host":
            self.move_to(self._store.copy_to_host(self._held, wait_s))

    def move_to(self, copy: Entry) -> None:
        """Own a pin of a copy in another tier, which the store has already counted, instead."""
        held, self._entry = self._held, copy
        self._store.unpin(held)

    def rows(self, begin: int = 0, end: int | None = None) -> list[memoryview]:
        """Return the bytes of rows [begin, end), in order, viewed in place: valid until the pin is released.

        Raises `InvalidRequestError` for a window outside the embedding.
        """
        assert self.tier == "host", "call to_host first"
        view = self._store.segment.view
        return [view[offset : offset + length] for offset, length in self._extents(begin, end)]

    def checksum(self, begin: int = 0, end: int | None = None) -> int:
        """Return XXH3-64 over the bytes of rows [begin, end): 0.1 ms per MB; that of all rows is cached."""
        entry = self._held
        if (begin, end or entry.tokens) != (0, entry.tokens):
            return checksum(self.rows(begin, end))
        if entry.checksum is None:
            entry.checksum = checksum(self.rows())
        return entry.checksum

    @property
    def checksum_known(self) -> bool:
        """Whether `checksum` of all rows is cached."""
        return self._held.checksum is not None

    def handle(self, begin: int = 0, end: int | None = None) -> Handle:
        """Return a handle to rows [begin, end) where they are pinned: valid until the pin is released.

        Raises `InvalidRequestError` for a window outside the embedding.
        """
        segment, entry = self._store.segment, self._held
        on_device = entry.tier.name == "device"
        assert entry.tier.shared_as or not on_device, "nobody else can open this memory"
        return Handle(
            segment=str(segment.path),
            segment_bytes=segment.size_bytes,
            segment_id=segment.segment_id,
            extents=tuple(self._extents(begin, end)),
            generation=entry.generation,
            generation_offset=segment.generation_offset(entry.runs[0][0], on_device=on_device),
            memory=entry.tier.shared_as,
            memory_bytes=entry.tier.memory.numel() if on_device else 0,
        )

    def release(self) -> None:
        """Release the pin; idempotent."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._store.unpin(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._entry is not None:
            self._store.unpin_later(self._entry)

    @property
    def entry(self) -> Entry:
        """The pinned copy."""
        return self._held

    @property
    def _held(self) -> Entry:
        assert self._entry is not None, "the pin was released"
        return self._entry

    def _extents(self, begin: int, end: int | None) -> list[tuple[int, int]]:
        """Return the (offset, length) pairs, in bytes, of the window in the segment, or in the device's memory."""
        entry = self._held
        end = entry.tokens if end is None else end
        if not 0 <= begin < end <= entry.tokens:
            raise InvalidRequestError(
                f"row window [{begin}, {end}) is outside the image's {entry.tokens} rows"
            )
        base = self._store.segment.data_offset if entry.tier.name == "host" else 0
        return [(base + offset, length) for offset, length in entry.extents(begin, end)]


# What is read at a time: it is still in the processor's cache when its checksum is taken.
_READ_BYTES = 512 << 10
# Likewise, when its elements are compared.
_CHECKED_BYTES = 256 << 10


class Incoming:
    """One embedding on its way into the store; `complete` or `drop` it. Not thread-safe: one writer at a time."""

    def __init__(self, store: EntryStore, entry: Entry, dtype: torch.dtype) -> None:
        """Own a reserved entry of rows of `dtype`, in the host tier."""
        self._dtype = dtype
        self._store = store
        self._entry: Entry | None = entry
        view, base = store.segment.view, store.segment.data_offset
        self._rows = [
            view[base + offset : base + offset + length] for offset, length in entry.extents(0, entry.tokens)
        ]
        self._room = list(self._rows)
        self._left = entry.row_bytes
        self._checksum = Checksum()

    def add(self, data: memoryview) -> None:
        """Append bytes. Raises `InvalidRequestError` if there are more than the rows have."""
        if len(data) > self._left:
            raise InvalidRequestError("more bytes arrived than the rows of this grid have")
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

        The bytes that were read are the ones checked and kept, even if the file changes during the read. Raises
        `InvalidRequestError` if the file is too short, or the bytes are more than the rows have.
        """
        if length > self._left:
            raise InvalidRequestError("more bytes arrived than the rows of this grid have")
        end = offset + length
        while offset < end:
            room = self._room[0][: min(_READ_BYTES, end - offset)]
            count = os.preadv(file, [room], offset)
            if count <= 0:
                raise InvalidRequestError("the caller's segment ends before the end of the rows")
            self._checksum.add(room[:count])
            self._left -= count
            offset += count
            self._use(count)

    def check(self, checksum: int) -> None:
        """Raise `InvalidRequestError` if bytes are missing, `InternalError` if they are not those of the checksum."""
        if self._left:
            raise InvalidRequestError(f"{self._left} bytes of the rows are missing")
        if self._checksum.value != checksum:
            raise InternalError("the rows arrived damaged: their checksum does not match")

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
                        f"row {row} of {entry.tokens} contains a NaN or an infinity: rows must be finite"
                    )
            seen += len(rows)

    def complete(self, checksum: int) -> Pin:
        """Make the rows visible and return a pin on them. Raises what `check` does."""
        self.check(checksum)
        entry = self._entry
        assert entry is not None, "the rows are complete, or were dropped"
        self._entry, self._rows = None, []
        entry.checksum = checksum
        self._store.commit(entry)
        return Pin(self._store, entry)

    def drop(self) -> None:
        """Discard rows that are not complete; afterwards, or once they are, this does nothing."""
        entry, self._entry, self._rows = self._entry, None, []
        if entry is not None:
            self._store.abandon(entry)

    def _use(self, count: int) -> None:
        self._room[0] = self._room[0][count:]
        if not self._room[0]:
            del self._room[0]


def _infinity(dtype: torch.dtype) -> int:
    """Return the bits of infinity."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return int(torch.tensor(math.inf, dtype=dtype).view(bits).item())
