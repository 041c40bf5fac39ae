"""Pin: someone's hold on an embedding. While it is held, the bytes stay where they are."""

import time
from types import TracebackType
from typing import Self

from encoder_contract.errors import InvalidRequestError
from encoder_contract.framing import checksum
from encoder_contract.handle import Handle
from encoder_service.store.entry_table import EntryTable
from encoder_service.store.segment import Segment
from encoder_service.store.tiers import Entry, Grid, TierName


class Pin:
    """A hold on one embedding; release it, or leave its `with` block. One owner: not thread-safe.

    A pin on the host tier gives rows and handles at once. One on the device tier needs `to_host` first, which
    copies and so belongs in a worker thread.
    """

    __slots__ = ("_entries", "_segment", "_slot")

    def __init__(self, ledger: EntryTable, segment: Segment, slot: Entry) -> None:
        """Take over one pin of `slot` that the ledger has already counted."""
        self._entries = ledger
        self._segment = segment
        self._slot: Entry | None = slot

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
        """(t, h, w), in patches, as it was put."""
        return self._held.grid

    @property
    def tier(self) -> TierName:
        """Where the bytes are: "device" or "host"."""
        return self._held.tier.name

    def to_host(self, wait_s: float = 2.0) -> None:
        """Move this pin to a copy in the host tier, made now if there is none: takes milliseconds.

        Raises `OverloadedError` when the host tier stays full of pins for `wait_s`; the pin is as before.
        """
        slot = self._held
        host = self._entries.host
        if slot.tier is not host:
            self._slot = self._entries.copy(slot, host, time.monotonic() + wait_s)
            self._entries.unpin(slot)

    def rows(self, begin: int = 0, end: int | None = None) -> list[memoryview]:
        """Return the bytes of rows [begin, end), in order, viewed in place: valid until the pin is released.

        Raises `InvalidRequestError` for a window outside the embedding.
        """
        view = self._segment.view
        return [view[offset : offset + length] for offset, length in self._extents(begin, end)]

    def checksum(self, begin: int = 0, end: int | None = None) -> int:
        """Return XXH3-64 over the bytes of rows [begin, end): 0.1 ms a megabyte, that of all rows once only."""
        slot = self._held
        if (begin, end or slot.tokens) != (0, slot.tokens):
            return checksum(self.rows(begin, end))
        if slot.checksum is None:
            slot.checksum = checksum(self.rows())
        return slot.checksum

    @property
    def checksum_known(self) -> bool:
        """Whether `checksum` of all rows takes no time."""
        return self._held.checksum is not None

    def handle(self, begin: int = 0, end: int | None = None) -> Handle:
        """Return where rows [begin, end) lie in the segment: valid until the pin is released.

        Raises `InvalidRequestError` for a window outside the embedding.
        """
        segment, slot = self._segment, self._held
        return Handle(
            segment=str(segment.path),
            segment_bytes=segment.size_bytes,
            segment_id=segment.segment_id,
            extents=tuple(self._extents(begin, end)),
            generation=slot.generation,
            generation_offset=segment.generation_offset(slot.runs[0][0]),
        )

    def release(self) -> None:
        """End the hold; again does nothing."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._entries.unpin(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._slot is not None:
            self._entries.unpin_later(self._slot)

    @property
    def _held(self) -> Entry:
        assert self._slot is not None, "the pin was released"
        return self._slot

    def _extents(self, begin: int, end: int | None) -> list[tuple[int, int]]:
        """Where the window lies in the segment: (offset, length), bytes."""
        slot = self._held
        end = slot.tokens if end is None else end
        if not 0 <= begin < end <= slot.tokens:
            raise InvalidRequestError(
                f"row window [{begin}, {end}) is outside an image of {slot.tokens} rows"
            )
        assert slot.tier is self._entries.host, "call to_host first"
        base = self._segment.data_offset
        return [(base + offset, length) for offset, length in slot.extents(begin, end)]
