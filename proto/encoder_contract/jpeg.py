"""JPEG: size, channels and orientation, from the segments before the first scan; and how many scans there are.

Bounds are what a sound file can need. The work is linear in the file, and these keep its factor small.
"""

import re
import struct
from collections.abc import Iterator

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.orientation import MAX_METADATA_BYTES, orientation

MAGIC = re.compile(rb"\xff\xd8\xff")
# 32 MiB of metadata in full 64 KiB segments are 512 of them.
_MAX_SEGMENTS = 1024
# A progressive photo has about ten scans, and the most thorough optimisers write some twenty. Each costs a decoder a
# pass over the whole image, two seconds a gigapixel, however few bytes it has: any image may have twenty, and a
# hundred if they are quick.
_USUAL_SCANS, MAX_SCANS = 20, 100
_MAX_SCANNED_PIXELS = 500_000_000
# Nothing sound has junk between its segments, but decoders take it.
_MAX_JUNK_BYTES = 65536

_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
# Frames whose scans hold whole samples; the others come in passes that refine each other.
_SEQUENTIAL_FRAMES = (0xC0, 0xC1, 0xC9)
# Restarts, start and end of image, and reserved extensions carry no length.
_BARE_MARKERS = {0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
_START_OF_SCAN, _APP1 = 0xDA, 0xE1
_EXIF_START, _XMP_START = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"


def _segments(image: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, begin, end of its payload) up to and with the first scan; junk between segments is skipped."""
    position, junk_bytes = 2, 0
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(image, position, position + _MAX_JUNK_BYTES)
        if found is None:
            raise InvalidImageError("damaged JPEG: no marker where one should be")
        junk_bytes += found.start() - position
        position, marker = found.end(), image[found.start() + 1]
        if marker != _START_OF_SCAN and (marker < 0xC0 or junk_bytes > _MAX_JUNK_BYTES):
            raise InvalidImageError("damaged JPEG: no marker where one should be")
        if marker in _BARE_MARKERS:
            continue
        if marker == _START_OF_SCAN:
            yield marker, position + 2, len(image)
            return
        # A length counts its own two bytes; libjpeg and Pillow take less than that for an empty segment.
        end = position + max(2, *struct.unpack_from(">H", image, position))
        if end > len(image):
            raise InvalidImageError(f"truncated: JPEG segment {marker:#x} runs over the end of the file")
        yield marker, position + 2, end
        position = end
    raise InvalidImageError(f"damaged JPEG: more than {_MAX_SEGMENTS} segments before the first scan")


def read(image: bytes) -> tuple[int, int, int, int]:
    """Return (width, height, orientation, channels: 4 means CMYK); the size is that of the stored pixels.

    Raises `InvalidImageError` for a damaged header, and `ImageLimitError` for too many scans.
    """
    frame: tuple[int, bytes] | None = None
    first_scan = len(image)
    exif: list[bytes] = []
    xmp = b""
    for marker, begin, end in _segments(image):
        if marker in _START_OF_FRAME:
            if frame is not None:
                raise InvalidImageError("damaged JPEG: two frame headers")
            frame = marker, image[begin : min(begin + 6, end)]
        elif marker == _START_OF_SCAN:
            first_scan = begin
        elif marker == _APP1 and image.startswith(_EXIF_START, begin, end):
            exif.append(image[begin + len(_EXIF_START) : end])
        elif marker == _APP1 and image.startswith(_XMP_START, begin, end):
            xmp = image[begin:end]
    if sum(map(len, exif)) > MAX_METADATA_BYTES:
        raise InvalidImageError(f"EXIF of more than {MAX_METADATA_BYTES} bytes")
    kind, width, height, channels = _frame(frame)
    # Decoders stop after a sequential scan of all channels.
    if kind not in _SEQUENTIAL_FRAMES or image[first_scan : first_scan + 1] != bytes([channels]):
        usual = max(_USUAL_SCANS, _MAX_SCANNED_PIXELS // max(1, width * height))
        _check_scans(image, first_scan, min(usual, MAX_SCANS))
    return width, height, orientation(b"".join(exif), xmp), channels


def _frame(frame: tuple[int, bytes] | None) -> tuple[int, int, int, int]:
    """Return (kind, width, height, channels) of a frame header: its marker and payload."""
    if frame is None:
        raise InvalidImageError("damaged JPEG: no frame header before the first scan")
    kind, payload = frame
    bits, height, width, channels = struct.unpack_from(">BHHB", payload)
    if bits != 8 or channels not in (1, 3, 4):
        raise InvalidImageError(f"unsupported JPEG: {channels} channels of {bits} bits")
    return kind, width, height, channels


def _check_scans(image: bytes, first_scan: int, most: int) -> None:
    """Raise `ImageLimitError` for more than `most` scans, counted from behind the marker of the first.

    Compressed data never hold a marker's bytes, so every scan is seen. What follows the image counts as well,
    by chance once in 64 KiB, which matters only to progressive files that carry megabytes of something else.
    """
    scans = 1
    # In pieces, between which other threads run; a marker may lie across two.
    for begin in range(first_scan, len(image), MAX_METADATA_BYTES):
        scans += image.count(b"\xff\xda", begin, begin + MAX_METADATA_BYTES + 1)
        if scans > most:
            raise ImageLimitError(f"a JPEG of this size may have at most {most} scans")
