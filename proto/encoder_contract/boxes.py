"""The boxes of which JPEG 2000 and AVIF files are made: a length, a type of four letters, and what is inside."""

import struct
from collections.abc import Iterator

from encoder_contract.errors import InvalidImageError

# A sound file has some ten at each level; a few writers put one around each property of each tile.
_MAX_BOXES = 2048

_BOX = struct.Struct(">L4s")


def boxes(image: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, begin, end of the content) of each box between `begin` and `end`; none is entered.

    Raises `InvalidImageError` for boxes that run over the end, and for more than a sound file has.
    """
    for _ in range(_MAX_BOXES):
        if begin + _BOX.size > end:
            return
        length, kind = _BOX.unpack_from(image, begin)
        content = begin + _BOX.size
        if length == 0:  # to the end
            length = end - begin
        elif length == 1:
            (length,) = struct.unpack_from(">Q", image, content)
            content += 8
        if begin + length < content or begin + length > end:
            raise InvalidImageError(f"damaged or truncated: its part {kind!r} has a length of {length}")
        yield kind, content, begin + length
        begin += length
    raise InvalidImageError(f"damaged: more than {_MAX_BOXES} parts")


def find(image: bytes, kind: bytes, begin: int, end: int) -> tuple[int, int] | None:
    """Return (begin, end) of the content of the first box of a type, None when there is none."""
    return next((place[1:] for place in boxes(image, begin, end) if place[0] == kind), None)
