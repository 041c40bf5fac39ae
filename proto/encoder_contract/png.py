"""PNG: read size, channels and orientation from its chunks. The bounds are the most that an intact file can need."""

import re
import struct
import zlib
from collections.abc import Iterator

from encoder_contract.errors import InvalidImageError
from encoder_contract.orientation import MAX_METADATA_BYTES, orientation

MAGIC = re.compile(rb"\x89PNG\r\n\x1a\n")
# 32 MiB in the usual pieces of 8 KiB have 4096 chunks.
_MAX_CHUNKS = 16384
# 64 KiB of EXIF as lines of hexadecimal text, which ImageMagick writes, are less than 160 KiB. A few bytes can inflate
# to this, so it bounds what a small file may cost.
_MAX_INFLATED_BYTES = 160 << 10

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_EXIF_TEXT, _XMP_TEXT = b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"
_CHUNK = struct.Struct(">L4s")


def read(image: bytes) -> tuple[int, int, int, int]:
    """Return (width, height, orientation, channels). The size is in stored pixels; a palette has 1 channel.

    Raises `InvalidImageError` for a damaged header.
    """
    length, name, width, height, bits, colour = struct.unpack_from(">L4sLLBB", image, 8)
    if name != b"IHDR" or length != 13 or colour not in _CHANNELS:
        raise InvalidImageError(f"damaged PNG: bad header chunk (colour type {colour}, {bits} bits)")
    last = _metadata(image)
    exif = last[b"eXIf"][1] if b"eXIf" in last else b""
    if not exif and _EXIF_TEXT in last:
        exif = _hexadecimal(_text(*last[_EXIF_TEXT]))
    xmp = _text(*last[_XMP_TEXT]) if _XMP_TEXT in last else b""
    return width, height, orientation(exif, xmp), _CHANNELS[colour]


def _metadata(image: bytes) -> dict[bytes, tuple[bytes, bytes]]:
    """Return (kind, payload) of the chunks that may have an orientation, by kind; text chunks by keyword.

    Reads to the end of the file: metadata may follow the pixels, and the last chunk of a kind counts.
    """
    found: dict[bytes, tuple[bytes, int, int]] = {}
    for kind, begin, end in chunks(image):
        if kind == b"eXIf":
            found[kind] = kind, begin, end
        elif kind in _TEXT_CHUNKS:
            for keyword in (_EXIF_TEXT, _XMP_TEXT):
                if image.startswith(keyword, begin, end):
                    found[keyword] = kind, begin + len(keyword), end
    return {
        what: (kind, image[begin : min(end, begin + MAX_METADATA_BYTES)])
        for what, (kind, begin, end) in found.items()
    }


def chunks(image: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, begin and end of its payload) of each chunk, up to the end of the picture or the file."""
    position, stop = 8, len(image) - 8
    for _ in range(_MAX_CHUNKS):
        if position > stop:
            return
        length, kind = _CHUNK.unpack_from(image, position)
        if kind == b"IEND":
            return
        yield kind, position + 8, position + 8 + length
        position += 12 + length
    raise InvalidImageError(f"damaged PNG: more than {_MAX_CHUNKS} chunks")


def _text(kind: bytes, text: bytes) -> bytes:
    compressed = kind == b"zTXt"
    if kind == b"iTXt":
        compressed = text[:1] == b"\x01"
        text = text[2:].split(b"\0", 2)[-1]
    elif compressed:
        text = text[1:]
    if not compressed:
        return text
    try:
        return zlib.decompressobj().decompress(text, _MAX_INFLATED_BYTES)
    except zlib.error:
        return b""


def _hexadecimal(profile: bytes) -> bytes:
    """Return the bytes of ImageMagick's raw profile: an empty line, a name, a length, then hexadecimal digits."""
    digits = b"".join(profile.split(b"\n", 3)[3:]).translate(None, b"\n")
    try:
        return bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        return b""
