"""Stand-ins: blank images that vLLM lays out in the place of images that the service encodes.

vLLM accepts an image without pixels only for models whose grid is known to callers. For all others, its own processor
has to write the tokens around and between the rows. It gets a blank image of the same size, whose `uuid` is the name of
the image. The rows of that name are fetched; the pixels of the blank reach no tower (`connector.py` sees to that).
"""

import base64
import struct
import zlib
from functools import lru_cache

from encoder_contract.errors import InvalidImageError
from encoder_contract.header import FORMATS, format_of, read_header


def size_of(image: bytes) -> tuple[int, int]:
    """Return (width, height) of an image file, upright; raises `InvalidImageError` for a format only servers read."""
    if format_of(image) is None:
        raise InvalidImageError(
            f"vLLM cannot lay out an image of this format for this model: send one of {', '.join(FORMATS)}"
        )
    return read_header(image).upright


@lru_cache(4096)
def blank_url(width: int, height: int) -> str:
    """Return the data URL of a black PNG of this size: one bit a pixel, 200 bytes for 1280x720."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + -(-width // 8)) * height), 9)
    chunks = [(b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()
