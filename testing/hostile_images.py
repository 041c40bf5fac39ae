"""Image files that are cheap to send and expensive to process: for header parsers, decoders and memory."""

import io
import struct
import zlib

from PIL import Image

from testing.photos import encoded, photo

_START_OF_SCAN = b"\xff\xda"


def with_trailer(file: bytes, number: int) -> bytes:
    """Return the same image with another digest: decoders ignore the bytes behind its end."""
    return file + number.to_bytes(8, "big")


def newlines_png(newlines: int = 1 << 20) -> bytes:
    """Return a PNG without pixels whose compressed text, a profile in hexadecimal, is nothing but newlines."""
    start = photo(8, 8, 1, "PNG")[:33]
    text = b"Raw profile type exif\0\0" + zlib.compress(b"\n" * newlines, 9)
    return start + png_chunk(b"zTXt", text) + png_chunk(b"IEND", b"")


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">L", len(payload)) + kind + payload + struct.pack(">L", zlib.crc32(kind + payload))


def pieces_jpeg(pieces: int = 900, piece_bytes: int = 1000) -> bytes:
    """Return a JPEG whose EXIF block is split into many segments."""
    payload = b"Exif\0\0" + bytes(piece_bytes)
    segment = struct.pack(">BBH", 0xFF, 0xE1, len(payload) + 2) + payload
    small = photo(8, 8, 1)
    return small[:2] + segment * pieces + small[2:]


def scans_jpeg(scans: int = 2000, side: int = 2048) -> bytes:
    """Return a progressive JPEG that refines the same coefficients over and over."""
    file = encoded(Image.new("RGB", (side, side), "teal"), "JPEG", progressive=True)
    first = file.index(_START_OF_SCAN)
    second = file.index(_START_OF_SCAN, first + 2)
    last = file.rindex(_START_OF_SCAN)
    return file[:last] + file[last:-2] * scans + file[-2:] if last > second else file


def bomb_png(side: int = 9000) -> bytes:
    """Return a PNG of a few kilobytes with many equal pixels of one bit each."""
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG", optimize=True)
    return file.getvalue()


def large_jpeg2000(side: int = 7200) -> bytes:
    """Return a JPEG 2000 file of a few hundred bytes with more pixels than the server decodes at a time."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "JPEG2000")
    return file.getvalue()
