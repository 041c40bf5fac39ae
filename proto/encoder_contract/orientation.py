"""An image's orientation: the EXIF (or XMP) value, 1 to 8, as Pillow's `exif_transpose` reads it.

Parsed by hand, because both sides of the contract must survive malicious files: this looks for one tag in a bounded
number of steps, where a general EXIF parser reads and keeps every tag.
"""

import re
import struct

UPRIGHT = 1
# Orientations 5 to 8 swap width and height.
FIRST_SWAPPED = 5

ORIENTATION_TAG = 0x0112
# EXIF with a thumbnail fits into one 64 KiB segment of a JPEG, and XMP into another. Some writers need a few.
MAX_METADATA_BYTES = 1 << 20
_BYTE_ORDERS = {b"MM\x00\x2a": ">", b"II\x2a\x00": "<", b"MM\x2a\x00": ">", b"II\x00\x2a": "<"}
# The first directory of a real photo has a few dozen tags.
_MAX_TAGS = 512
# Bytes per value of each type, and the `struct` formats of the integer types.
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_INTEGER_FORMATS = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 13: "L", 16: "Q"}
_EXIF_PREFIX = re.compile(rb"(?:Exif\x00\x00){0,2}")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: bytes = b"", xmp: bytes = b"") -> int:
    """Return the orientation, 1 to 8, of an EXIF block (with or without its `Exif` prefix), else of XMP, else 1.

    A damaged block or a value out of range counts as absent: the photo is shown as it is stored.
    """
    value = from_exif(exif)
    if value is None:
        found = _XMP_ORIENTATION.search(xmp)
        value = int(found[1]) if found else UPRIGHT
    return value if UPRIGHT <= value <= 8 else UPRIGHT


def from_exif(exif: bytes) -> int | None:
    """Return the orientation tag of the first directory; 0 if it is not an integer, None if there is none."""
    prefix = _EXIF_PREFIX.match(exif)
    tiff = memoryview(exif)[prefix.end() if prefix else 0 :]
    order = _BYTE_ORDERS.get(bytes(tiff[:4]))
    if order is None or len(tiff) < 8:
        return None
    try:
        return _orientation_tag(tiff, order)
    except struct.error:  # the block is truncated
        return None


def _orientation_tag(tiff: memoryview, order: str) -> int | None:
    """Return the tag as Pillow finds it: the first with its number, up to where the directory is damaged."""
    (position,) = struct.unpack_from(f"{order}L", tiff, 4)
    (tags,) = struct.unpack_from(f"{order}H", tiff, position)
    position += 2
    out_of_line_bytes, seen = 0, set[int]()
    for _ in range(min(tags, _MAX_TAGS)):
        number, kind, count = struct.unpack_from(f"{order}HHL", tiff, position)
        at, size = position + 8, _TYPE_BYTES.get(kind, 0) * count
        position += 12
        if position > len(tiff):
            return None
        if number in seen or not size:
            continue
        if size > 4:
            (at,) = struct.unpack_from(f"{order}L", tiff, at)
            # Skip values that together are larger than the block, because they overlap. A value outside the block ends
            # the directory.
            out_of_line_bytes += size
            if out_of_line_bytes > len(tiff):
                continue
            if at + size > len(tiff):
                return None
        if number == ORIENTATION_TAG:
            integer = _INTEGER_FORMATS.get(kind)
            return int(struct.unpack_from(order + integer, tiff, at)[0]) if integer else 0
        seen.add(number)
    return None
