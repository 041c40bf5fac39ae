"""An image's header: format, size and orientation from its first bytes, with no pixel decoded.

Grids and token counts follow from it, and limits are checked against it before any memory is taken. The
parsers are ours, a few lines for each format: Pillow decodes a PNG's pixels to reach its EXIF, allocates a
WebP's canvas to open it, parses every EXIF tag, and warns through the interpreter's global state. What they
read equals what Pillow reads. Whether the pixels are sound is for the decoder to find out.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.orientation import FIRST_SWAPPED, orientation

# Bounds on what a sound file can need: a photo has a few dozen JPEG segments, and 20 MB of PNG in the usual
# 8 KiB pieces have 2 500 chunks; EXIF with a thumbnail and XMP fit one 64 KiB segment each.
_MAX_JPEG_SEGMENTS = 4096
_MAX_JPEG_JUNK_BYTES = 65536
_MAX_CHUNKS = 65536
_MAX_METADATA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its image. `width` and `height` are pixels as stored, before orientation.

    `format` is one of `FORMATS`, `channels` the samples per stored pixel (1 for a palette; 4 in a JPEG means
    CMYK), `orientation` EXIF's 1 to 8.
    """

    format: str
    width: int
    height: int
    orientation: int
    channels: int

    @property
    def upright(self) -> tuple[int, int]:
        """(width, height) in pixels once the orientation is applied."""
        if self.orientation >= FIRST_SWAPPED:
            return self.height, self.width
        return self.width, self.height

    @property
    def pixels(self) -> int:
        """Width × height."""
        return self.width * self.height


def read_header(image: bytes) -> Header:
    """Return the header of an image file; animated files stand for their first frame.

    Microseconds and no memory to speak of, whatever the bytes. Raises `InvalidImageError` for bytes that are
    no image of a format served here or whose header is damaged.
    """
    for magic, parse in _PARSERS:
        if magic.match(image):
            try:
                header = parse(image)
            except struct.error as error:
                raise InvalidImageError(f"truncated: the file ends inside its header ({error})") from error
            if header.width < 1 or header.height < 1:
                raise InvalidImageError(f"damaged {header.format}: {header.width}x{header.height} pixels")
            return header
    if not image:
        raise InvalidImageError("empty: an image of 0 bytes")
    raise InvalidImageError(f"not an image of a supported format ({', '.join(FORMATS)})")


def check_limits(header: Header, image_bytes: int, *, max_image_bytes: int, max_image_pixels: int) -> None:
    """Raise `ImageLimitError` naming the limit that a file of `image_bytes` with this header exceeds."""
    if image_bytes > max_image_bytes:
        raise ImageLimitError(f"{image_bytes} bytes exceed max_image_bytes {max_image_bytes}")
    if header.pixels > max_image_pixels:
        size = f"{header.width}x{header.height}"
        raise ImageLimitError(f"{header.pixels} pixels ({size}) exceed max_image_pixels {max_image_pixels}")


_JPEG_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
# Restarts, start and end of image, and reserved extensions carry no length.
_BARE_MARKERS = {0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
_START_OF_SCAN, _APP1 = 0xDA, 0xE1


def _jpeg_segments(image: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (marker, payload) up to and without the first scan; junk between segments is skipped."""
    position, junk_bytes = 2, 0
    for _ in range(_MAX_JPEG_SEGMENTS):
        found = _JPEG_MARKER.search(image, position, position + _MAX_JPEG_JUNK_BYTES)
        if found is None:
            raise InvalidImageError("damaged JPEG: no marker where one should be")
        junk_bytes += found.start() - position
        position, marker = found.end(), image[found.start() + 1]
        if marker == _START_OF_SCAN:
            return
        if marker < 0xC0 or junk_bytes > _MAX_JPEG_JUNK_BYTES:
            raise InvalidImageError("damaged JPEG: no marker where one should be")
        if marker in _BARE_MARKERS:
            continue
        # A length counts its own two bytes; libjpeg and Pillow take less than that for an empty segment.
        length = max(2, *struct.unpack_from(">H", image, position))
        payload = image[position + 2 : position + length]
        if len(payload) != length - 2:
            raise InvalidImageError(f"truncated: JPEG segment {marker:#x} runs over the end of the file")
        yield marker, payload
        position += length
    raise InvalidImageError(f"damaged JPEG: more than {_MAX_JPEG_SEGMENTS} segments before the first scan")


def _jpeg(image: bytes) -> Header:
    frame: bytes | None = None
    exif, xmp = b"", b""
    for marker, payload in _jpeg_segments(image):
        if marker in _START_OF_FRAME:
            if frame is not None:
                raise InvalidImageError("damaged JPEG: two frame headers")
            frame = payload
        elif marker == _APP1 and payload.startswith(b"Exif\0\0"):
            exif += payload[6:]
            if len(exif) > _MAX_METADATA_BYTES:
                raise InvalidImageError(f"EXIF of more than {_MAX_METADATA_BYTES} bytes")
        elif marker == _APP1 and payload.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
            xmp = payload
    if frame is None:
        raise InvalidImageError("damaged JPEG: no frame header before the first scan")
    bits, height, width, channels = struct.unpack_from(">BHHB", frame)
    if bits != 8 or channels not in (1, 3, 4):
        raise InvalidImageError(f"unsupported JPEG: {channels} channels of {bits} bits")
    return Header("JPEG", width, height, orientation(exif, xmp), channels)


_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_EXIF_TEXT, _PNG_XMP_TEXT = b"Raw profile type exif", b"XML:com.adobe.xmp"


def _png(image: bytes) -> Header:
    length, name, width, height, bits, colour = struct.unpack_from(">L4sLLBB", image, 8)
    if name != b"IHDR" or length != 13 or colour not in _PNG_CHANNELS:
        raise InvalidImageError(f"damaged PNG: bad header chunk (colour type {colour}, {bits} bits)")
    exif, texts = b"", {}
    # To the end of the file: metadata may follow the pixels, and the last of a kind counts.
    for kind, payload in _png_chunks(image):
        if kind == b"eXIf":
            exif = payload
        else:
            keyword, _, text = payload.partition(b"\0")
            texts[keyword] = kind, text
    if not exif and _PNG_EXIF_TEXT in texts:
        exif = _hexadecimal(_png_text(*texts[_PNG_EXIF_TEXT]))
    xmp = _png_text(*texts[_PNG_XMP_TEXT]) if _PNG_XMP_TEXT in texts else b""
    return Header("PNG", width, height, orientation(exif, xmp), _PNG_CHANNELS[colour])


def _png_chunks(image: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (kind, payload) of the chunks that may hold an orientation."""
    position = 8
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(image):
            return
        length, kind = struct.unpack_from(">L4s", image, position)
        if kind == b"IEND":
            return
        if kind == b"eXIf" or (
            kind in _PNG_TEXT_CHUNKS and image.startswith((_PNG_EXIF_TEXT, _PNG_XMP_TEXT), position + 8)
        ):
            yield kind, image[position + 8 : position + 8 + min(length, _MAX_METADATA_BYTES)]
        position += 12 + length
    raise InvalidImageError(f"damaged PNG: more than {_MAX_CHUNKS} chunks")


def _png_text(kind: bytes, text: bytes) -> bytes:
    compressed = kind == b"zTXt"
    if kind == b"iTXt":
        compressed = text[:1] == b"\x01"
        text = text[2:].split(b"\0", 2)[-1]
    elif compressed:
        text = text[1:]
    if not compressed:
        return text
    try:
        return zlib.decompressobj().decompress(text, _MAX_METADATA_BYTES)
    except zlib.error:
        return b""


def _hexadecimal(profile: bytes) -> bytes:
    """Return the bytes of ImageMagick's raw profile: an empty line, a name, a length, then hexadecimal."""
    try:
        return bytes.fromhex(b"".join(profile.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return b""


_WEBP_EXIF_FLAG, _WEBP_XMP_FLAG, _WEBP_ALPHA_FLAG = 0x08, 0x04, 0x10


def _webp(image: bytes) -> Header:
    kind = image[12:16]
    if kind == b"VP8 ":
        start_code, width, height = struct.unpack_from("<3sHH", image, 23)
        if start_code != b"\x9d\x01\x2a":
            raise InvalidImageError("damaged WebP: no key frame")
        return Header("WEBP", width & 0x3FFF, height & 0x3FFF, orientation(), 3)
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BL", image, 20)
        if signature != 0x2F:
            raise InvalidImageError("damaged WebP: no lossless signature")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        return Header("WEBP", width, height, orientation(), 4 if bits >> 28 & 1 else 3)
    if kind != b"VP8X":
        raise InvalidImageError("damaged WebP: no image chunk")
    flags, width, height = struct.unpack_from("<B3x3s3s", image, 20)
    chunks = _webp_metadata(image)
    return Header(
        "WEBP",
        int.from_bytes(width, "little") + 1,
        int.from_bytes(height, "little") + 1,
        orientation(
            chunks.get(b"EXIF", b"") if flags & _WEBP_EXIF_FLAG else b"",
            chunks.get(b"XMP ", b"") if flags & _WEBP_XMP_FLAG else b"",
        ),
        4 if flags & _WEBP_ALPHA_FLAG else 3,
    )


def _webp_metadata(image: bytes) -> dict[bytes, bytes]:
    """Return the first EXIF and the first XMP chunk."""
    chunks: dict[bytes, bytes] = {}
    position = 12
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(image):
            return chunks
        kind, length = struct.unpack_from("<4sL", image, position)
        if kind in (b"EXIF", b"XMP "):
            start = position + 8
            chunks.setdefault(kind, image[start : start + min(length, _MAX_METADATA_BYTES)])
        position += 8 + length + (length & 1)
    raise InvalidImageError(f"damaged WebP: more than {_MAX_CHUNKS} chunks")


_GIF_BLOCK = re.compile(rb"[!,;]")


def _gif(image: bytes) -> Header:
    """Read the screen's size, which a first frame that exceeds it enlarges."""
    width, height, flags = struct.unpack_from("<HHB", image, 6)
    left, top, frame_width, frame_height = struct.unpack_from("<4H", image, _first_gif_frame(image, flags))
    width, height = max(width, left + frame_width), max(height, top + frame_height)
    return Header("GIF", width, height, orientation(), 1)


def _first_gif_frame(image: bytes, flags: int) -> int:
    """Return where the first frame's position and size stand, behind the palette and any extensions."""
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False
    for _ in range(_MAX_CHUNKS):
        if in_extension:
            (length,) = struct.unpack_from("B", image, position)
            position += 1 + length
            in_extension = length > 0
            continue
        found = _GIF_BLOCK.search(image, position)
        if found is None or found[0] == b";":
            break
        if found[0] == b",":
            return found.end()
        position, in_extension = found.end() + 1, True
    raise InvalidImageError("damaged GIF: no frame")


def _bmp(image: bytes) -> Header:
    (header_bytes,) = struct.unpack_from("<L", image, 14)
    if header_bytes == 12:
        width, height, bits = struct.unpack_from("<HH2xH", image, 18)
    else:
        width, height, bits = struct.unpack_from("<Ll2xH", image, 18)
    return Header("BMP", width, abs(height), orientation(), 1 if bits <= 8 else 3)


_PARSERS: tuple[tuple[re.Pattern[bytes], Callable[[bytes], Header]], ...] = (
    (re.compile(rb"\xff\xd8\xff"), _jpeg),
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), _webp),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"BM"), _bmp),
)
# What is served: what browsers and phones send and the OpenAI-compatible interfaces take.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
