"""Pins: a reader's hold on an embedding, which keeps its bytes in place until it is released."""

from types import TracebackType
from typing import Protocol, Self

from encoder_contract.errors import InvalidRequestError
from encoder_contract.extents import Extent, views
from encoder_contract.framing import checksum
from encoder_contract.geometry import Grid
from encoder_contract.handle import Handle
from encoder_service.store.segment import Segment
from encoder_service.store.tier import Entry, TierName


class EntryStore(Protocol):
    """What pins need from the store that created them. `Store` implements it."""

    segment: Segment

    def unpin(self, entry: Entry) -> None:
        """Undo one pin."""

    def unpin_later(self, entry: Entry) -> None:
        """Undo one pin at the store's next call. For the garbage collector, which may run while the lock is held."""

    def copy_to_host(self, entry: Entry, wait_s: float) -> Entry:
        """Return the pinned host copy of a pinned entry. If there is none, make one."""


class Pin:
    """A hold on one embedding, until `release` or the end of a `with` block. It has one owner and is not thread-safe.

    A pin on the host tier gives rows and handles at once. A pin on the device tier gives handles; for rows it needs
    `to_host` first, which copies, so call it from a worker thread.
    """

    __slots__ = ("_is_held", "_store", "address", "entry", "grid", "tier", "tokens")

    def __init__(self, store: EntryStore, entry: Entry) -> None:
        """Take over one pin of `entry` that `store` has already counted."""
        self._store = store
        self._is_held = True
        self.entry = entry
        """The pinned copy. Its bytes stay in place until the pin is released."""
        self.tier: TierName = entry.tier.name
        """The tier of the pinned copy."""
        self.address: bytes = entry.address
        """Store address of the embedding."""
        self.tokens: int = entry.tokens
        """Number of rows."""
        self.grid: Grid = entry.grid
        """(t, h, w), in patches, as given to `reserve`."""

    def to_host(self, wait_s: float = 2.0) -> None:
        """Move this pin to the copy in the host tier. If there is none, make one, which takes milliseconds.

        Raises `OverloadedError` if the host tier stays full of pins for `wait_s`. The pin is then unchanged.
        """
        if self.tier != "host":
            self.move_to(self._store.copy_to_host(self.entry, wait_s))

    def move_to(self, copy: Entry) -> None:
        """Hold `copy`, in another tier, instead. The store has already counted the pin on it."""
        assert self._is_held, "the pin was released"
        previous, self.entry, self.tier = self.entry, copy, copy.tier.name
        self._store.unpin(previous)

    def rows(self, begin: int = 0, end: int | None = None) -> list[memoryview]:
        """Return the bytes of rows [begin, end), in order, without a copy. Valid until the pin is released.

        Raises `InvalidRequestError` for a window outside the embedding.
        """
        assert self.tier == "host", "call to_host first"
        return views(self._store.segment.view, self._extents(begin, end))

    def checksum(self, begin: int = 0, end: int | None = None) -> int:
        """Return XXH3-64 over the bytes of rows [begin, end). Takes 0.1 ms per MB; that of all rows is cached."""
        entry = self.entry
        if (begin, end or entry.tokens) != (0, entry.tokens):
            return checksum(self.rows(begin, end))
        if entry.checksum is None:
            entry.checksum = checksum(self.rows())
        return entry.checksum

    @property
    def checksum_known(self) -> bool:
        """Whether `checksum` of all rows is cached."""
        return self.entry.checksum is not None

    def handle(self, begin: int = 0, end: int | None = None) -> Handle:
        """Return a handle to rows [begin, end) of the pinned copy. Valid until the pin is released.

        Raises `InvalidRequestError` for a window outside the embedding.
        """
        segment, entry = self._store.segment, self.entry
        on_device = self.tier == "device"
        assert entry.tier.shared_as or not on_device, "other processes cannot open this memory"
        return Handle(
            segment=str(segment.path),
            segment_bytes=segment.size_bytes,
            segment_id=segment.segment_id,
            extents=tuple(self._extents(begin, end)),
            generation=entry.generation,
            generation_offset=segment.generation_offset(entry.runs[0][0], on_device=on_device),
            memory=entry.tier.shared_as,
            memory_bytes=len(entry.tier.memory) if on_device else 0,
        )

    def release(self) -> None:
        """Release the pin. Idempotent."""
        if self._is_held:
            self._is_held = False
            self._store.unpin(self.entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._is_held:
            self._store.unpin_later(self.entry)

    def _extents(self, begin: int, end: int | None) -> list[Extent]:
        """Return the window's (offset, length) pairs, in bytes, in the segment or in the device's memory."""
        assert self._is_held, "the pin was released"
        entry = self.entry
        end = entry.tokens if end is None else end
        if not 0 <= begin < end <= entry.tokens:
            raise InvalidRequestError(
                f"row window [{begin}, {end}) is outside the image's {entry.tokens} rows"
            )
        base = self._store.segment.data_offset if self.tier == "host" else 0
        return [(base + offset, length) for offset, length in entry.extents(begin, end)]
