"""The tags of one TIFF directory, in an EXIF block or a TIFF file, found as Pillow finds them and not read.

A directory is a list of tags, each with a type, a count and a value, or the place where the value is. No more than
512 of them are looked at, whatever a directory says.
"""

import struct
from dataclasses import dataclass

# The first directory of a real photo has a few dozen tags.
MAX_TAGS = 512

# Bytes per value of each type, and how those that are numbers are unpacked. Rationals are left out.
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_INTEGER_FORMATS = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 13: "L", 16: "Q"}
_BYTE_TYPES = (1, 7)


@dataclass(frozen=True, slots=True)
class Tag:
    """Where a tag's value is: `count` values of a type, `size` bytes from `at` on."""

    kind: int
    count: int
    at: int
    size: int


class Directory:
    """The tags of the directory at `position` of `tiff`; those up to where the directory is damaged.

    `order` is struct's sign of the byte order, `is_big` BigTIFF's wider numbers. `said` is how many tags there are
    by the directory's own word.
    """

    def __init__(self, tiff: bytes | memoryview, position: int, order: str, *, is_big: bool = False) -> None:
        self._tiff = tiff
        self._order = order
        self._tags: dict[int, Tag] = {}
        self.said = 0
        try:
            self._find(position, is_big)
        except (struct.error, OverflowError):  # the file ends here
            return

    def _find(self, position: int, is_big: bool) -> None:
        self.said = struct.unpack_from(self._order + ("Q" if is_big else "H"), self._tiff, position)[0]
        head = struct.Struct(self._order + ("HHQ" if is_big else "HHL"))
        inline_bytes = 8 if is_big else 4
        position += 8 if is_big else 2
        out_of_line_bytes = 0
        for _ in range(min(self.said, MAX_TAGS)):
            number, kind, count = head.unpack_from(self._tiff, position)
            at, size = position + head.size, _TYPE_BYTES.get(kind, 0) * count
            position = at + inline_bytes
            if position > len(self._tiff):
                return
            if number in self._tags or not size:
                continue
            if size > inline_bytes:
                (at,) = struct.unpack_from(self._order + ("Q" if is_big else "L"), self._tiff, at)
                # As Pillow: values that overlap so much that they outgrow the file are passed over, and one that
                # points outside ends the directory.
                out_of_line_bytes += size
                if out_of_line_bytes > len(self._tiff):
                    continue
                if at + size > len(self._tiff):
                    return
            self._tags[number] = Tag(kind, count, at, size)

    def get(self, number: int) -> Tag | None:
        """Return where the value of a tag is, None when there is no such tag."""
        return self._tags.get(number)

    def integers(self, number: int, most: int = 1) -> tuple[int, ...]:
        """Return the first `most` values of a tag; none when it is missing or no integer."""
        tag = self.get(number)
        if tag is None or tag.kind not in _INTEGER_FORMATS:
            return ()
        values = f"{self._order}{min(tag.count, most)}{_INTEGER_FORMATS[tag.kind]}"
        return struct.unpack_from(values, self._tiff, tag.at)

    def text(self, number: int, most: int) -> bytes:
        """Return the first `most` bytes of a tag that holds bytes; none when it is missing or holds something else."""
        tag = self.get(number)
        if tag is None or tag.kind not in _BYTE_TYPES:
            return b""
        return bytes(self._tiff[tag.at : tag.at + min(tag.size, most)])
