"""A handle: where rows lie in memory that processes of one host share. It contains a path and numbers, never data.

A segment is a file. It begins with a random id of 16 bytes, followed by a table of generations (uint64, little-endian)
and the pages of rows. The server writes a generation when an entry is complete, and clears it before reusing the pages.
A reader that finds the handle's generation **before and after** using the bytes has used the right bytes. The Fetch
stream that sent the handle keeps the rows in place, but it may end unnoticed, so readers check both times.

Rows on a device lie in `memory`, which the device's driver has named. Their generation is in the segment.
"""

from dataclasses import dataclass
from typing import Self

from encoder_contract.extents import Extent
from encoder_contract.v1 import encoder_pb2

SEGMENT_ID_BYTES = 16
GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Handle:
    """A window of an embedding's rows. It can be pickled any number of times, and so be broadcast."""

    segment: str
    segment_bytes: int
    segment_id: bytes
    extents: tuple[Extent, ...]
    """(offset in the segment or in `memory`, length), in bytes, in row order."""
    generation: int
    generation_offset: int
    memory: bytes = b""
    memory_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of the whole window."""
        return sum(length for _, length in self.extents)

    @classmethod
    def from_message(cls, message: encoder_pb2.Handle) -> Self:
        """Return the handle in a message of the contract."""
        return cls(
            segment=message.segment,
            segment_bytes=message.segment_bytes,
            segment_id=message.segment_id,
            extents=tuple((extent.offset, extent.length) for extent in message.extents),
            generation=message.generation,
            generation_offset=message.generation_offset,
            memory=message.memory,
            memory_bytes=message.memory_bytes,
        )

    def to_message(self) -> encoder_pb2.Handle:
        """Return this handle as a message of the contract."""
        return encoder_pb2.Handle(
            segment=self.segment,
            segment_bytes=self.segment_bytes,
            segment_id=self.segment_id,
            extents=[encoder_pb2.Extent(offset=offset, length=length) for offset, length in self.extents],
            generation=self.generation,
            generation_offset=self.generation_offset,
            memory=self.memory,
            memory_bytes=self.memory_bytes,
        )
