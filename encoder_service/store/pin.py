"""A reader's hold on an embedding: until it is released, the bytes stay in place."""

import time
from types import TracebackType
from typing import Self

from encoder_contract.errors import InvalidRequestError
from encoder_contract.framing import checksum
from encoder_contract.handle import Handle
from encoder_service.store.entry_table import EntryTable
from encoder_service.store.segment import Segment
from encoder_service.store.tiers import Entry, Grid, Tier, TierName


class Pin:
    """A hold on one embedding; release it, or leave its `with` block. One owner: not thread-safe.

    A pin on the host tier gives rows and handles at once. One on the device tier gives handles; for rows it needs
    `to_host` first, which copies: call it from a worker thread.
    """

    __slots__ = ("_entry", "_segment", "_table")

    def __init__(self, table: EntryTable, segment: Segment, entry: Entry) -> None:
        """Own one pin of `entry` that `table` has already counted."""
        self._table = table
        self._segment = segment
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
        entry = self._held
        host = self._table.host
        if entry.tier is not host:
            self._entry = self._table.copy(entry, host, time.monotonic() + wait_s)
            self._table.unpin(entry)

    def move_to(self, tier: Tier) -> bool:
        """Move this pin to the copy in `tier` if there is one; return whether it is there now. Takes microseconds."""
        held = self._held
        if held.tier is tier:
            return True
        if (copy := self._table.pin_in(tier, held.address)) is None:
            return False
        self._entry = copy
        self._table.unpin(held)
        return True

    def rows(self, begin: int = 0, end: int | None = None) -> list[memoryview]:
        """Return the bytes of rows [begin, end), in order, viewed in place: valid until the pin is released.

        Raises `InvalidRequestError` for a window outside the embedding.
        """
        assert self.tier == "host", "call to_host first"
        view = self._segment.view
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
        segment, entry = self._segment, self._held
        on_device = entry.tier.name == "device"
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
            self._table.unpin(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._entry is not None:
            self._table.unpin_later(self._entry)

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
                f"row window [{begin}, {end}) is outside an image of {entry.tokens} rows"
            )
        base = self._segment.data_offset if entry.tier.name == "host" else 0
        return [(base + offset, length) for offset, length in entry.extents(begin, end)]
