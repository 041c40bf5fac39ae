"""Which way up an image is: the EXIF (or XMP) orientation, 1 to 8, as Pillow's `exif_transpose` reads it.

Read by hand, because both sides of the contract must survive what strangers send: one tag is looked for in a
bounded number of steps, where a general EXIF parser reads and keeps every tag.
"""

import re
import struct

from encoder_contract.tiff_tags import Directory

UPRIGHT = 1
# Orientations 5 to 8 swap width and height.
FIRST_SWAPPED = 5

ORIENTATION_TAG = 0x0112
# EXIF with a thumbnail fits one 64 KiB segment of a JPEG, and XMP another; some writers need a few.
MAX_METADATA_BYTES = 1 << 20
BYTE_ORDERS = {b"MM\x00\x2a": ">", b"II\x2a\x00": "<", b"MM\x2a\x00": ">", b"II\x00\x2a": "<"}
_EXIF_PREFIX = re.compile(rb"(?:Exif\x00\x00){0,2}")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: bytes = b"", xmp: bytes = b"") -> int:
    """Return 1 to 8 from an EXIF block (with or without its `Exif` prefix), else from XMP, else 1.

    What is damaged or out of range counts as absent: such a photo is shown as it is stored.
    """
    return of_value(from_exif(exif), xmp)


def of_value(value: int | None, xmp: bytes = b"") -> int:
    """Return 1 to 8: a tag's value, or what XMP says when there is no such tag."""
    if value is None:
        found = _XMP_ORIENTATION.search(xmp)
        value = int(found[1]) if found else UPRIGHT
    return value if UPRIGHT <= value <= 8 else UPRIGHT


def from_exif(exif: bytes) -> int | None:
    """Return the orientation tag of the first directory, 0 when it is no integer, None when there is none."""
    prefix = _EXIF_PREFIX.match(exif)
    tiff = memoryview(exif)[prefix.end() if prefix else 0 :]
    order = BYTE_ORDERS.get(bytes(tiff[:4]))
    if order is None or len(tiff) < 8:
        return None
    (position,) = struct.unpack_from(f"{order}L", tiff, 4)
    directory = Directory(tiff, position, order)
    if directory.get(ORIENTATION_TAG) is None:
        return None
    return next(iter(directory.integers(ORIENTATION_TAG)), 0)
