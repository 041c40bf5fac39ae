"""JPEG: read size, channels and orientation from the segments before the first scan, and count the scans.

The bounds are the most that an intact file can need. The work is linear in the file size, and the bounds keep its
factor small.
"""

import re
import struct
from collections.abc import Iterator

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.orientation import MAX_METADATA_BYTES, orientation

MAGIC = re.compile(rb"\xff\xd8\xff")
# 32 MiB of metadata fill 512 segments of 64 KiB.
_MAX_SEGMENTS = 1024
# A progressive photo has about ten scans, and the most thorough optimisers write about twenty. Each scan costs the
# decoder a pass over the whole image (two seconds per gigapixel), however few bytes it has. So any image may have
# twenty scans, and a small one up to a hundred.
_USUAL_SCANS, MAX_SCANS = 20, 100
_MAX_SCANNED_PIXELS = 500_000_000
# An intact file has no junk between its segments, but decoders accept it.
_MAX_JUNK_BYTES = 65536

_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
# Frames whose scans contain whole samples. In all others, scans refine each other.
_SEQUENTIAL_FRAMES = (0xC0, 0xC1, 0xC9)
# Restarts, start and end of image, and reserved extensions carry no length.
_BARE_MARKERS = {0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
_START_OF_SCAN, _APP1 = 0xDA, 0xE1
_EXIF_START, _XMP_START = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"


def _segments(image: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, begin and end of its payload), up to the first scan, included. Skips junk in between."""
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
        # A length includes its own two bytes. libjpeg and Pillow treat a smaller one as an empty segment.
        end = position + max(2, *struct.unpack_from(">H", image, position))
        if end > len(image):
            raise InvalidImageError(f"truncated: JPEG segment {marker:#x} runs over the end of the file")
        yield marker, position + 2, end
        position = end
    raise InvalidImageError(f"damaged JPEG: more than {_MAX_SEGMENTS} segments before the first scan")


def read(image: bytes) -> tuple[int, int, int, int]:
    """Return (width, height, orientation, channels). The size is in stored pixels; 4 channels mean CMYK.

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
    # Decoders stop after a sequential scan with all channels.
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
    """Raise `ImageLimitError` for more than `most` scans, counted from after the marker of the first.

    Compressed data never contains the bytes of a marker, so this counts every scan. Data after the image counts, too,
    if it has these bytes by chance: once in 64 KiB. That affects only progressive files with megabytes of appended
    data.
    """
    scans = 1
    # Counted in pieces, so that other threads run in between. A marker may span two pieces.
    for begin in range(first_scan, len(image), MAX_METADATA_BYTES):
        scans += image.count(b"\xff\xda", begin, begin + MAX_METADATA_BYTES + 1)
        if scans > most:
            raise ImageLimitError(f"a JPEG of this size may have at most {most} scans")
