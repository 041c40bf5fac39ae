"""WebP: read size, channels and orientation from its chunks. The bounds are the most that an intact file can need."""

import re
import struct

from encoder_contract.errors import InvalidImageError
from encoder_contract.orientation import MAX_METADATA_BYTES, orientation

MAGIC = re.compile(rb"RIFF....WEBP", re.DOTALL)
_MAX_CHUNKS = 16384  # as in a PNG. An animation has a chunk for each frame

_EXIF_FLAG, _XMP_FLAG, _ALPHA_FLAG = 0x08, 0x04, 0x10
_CHUNK = struct.Struct("<4sL")


def read(image: bytes) -> tuple[int, int, int, int]:
    """Return (width, height, orientation, channels). The size is in stored pixels; 4 channels: with transparency.

    Raises `InvalidImageError` for a damaged header.
    """
    kind = image[12:16]
    if kind == b"VP8 ":
        start_code, width, height = struct.unpack_from("<3sHH", image, 23)
        if start_code != b"\x9d\x01\x2a":
            raise InvalidImageError("damaged WebP: no key frame")
        return width & 0x3FFF, height & 0x3FFF, orientation(), 3
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BL", image, 20)
        if signature != 0x2F:
            raise InvalidImageError("damaged WebP: no lossless signature")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        return width, height, orientation(), 4 if bits >> 28 & 1 else 3
    if kind != b"VP8X":
        raise InvalidImageError("damaged WebP: no image chunk")
    flags, width, height = struct.unpack_from("<B3x3s3s", image, 20)
    chunks = _metadata(image) if flags & (_EXIF_FLAG | _XMP_FLAG) else {}
    return (
        int.from_bytes(width, "little") + 1,
        int.from_bytes(height, "little") + 1,
        orientation(
            chunks.get(b"EXIF", b"") if flags & _EXIF_FLAG else b"",
            chunks.get(b"XMP ", b"") if flags & _XMP_FLAG else b"",
        ),
        4 if flags & _ALPHA_FLAG else 3,
    )


def _metadata(image: bytes) -> dict[bytes, bytes]:
    """Return the first EXIF and the first XMP chunk."""
    chunks: dict[bytes, bytes] = {}
    position, stop = 12, len(image) - 8
    for _ in range(_MAX_CHUNKS):
        if position > stop or len(chunks) == 2:
            return chunks
        kind, length = _CHUNK.unpack_from(image, position)
        position += 8
        if kind in (b"EXIF", b"XMP ") and kind not in chunks:
            chunks[kind] = image[position : position + min(length, MAX_METADATA_BYTES)]
        position += length + (length & 1)
    raise InvalidImageError(f"damaged WebP: more than {_MAX_CHUNKS} chunks")
