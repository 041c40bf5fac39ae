"""An image's header: format, size and orientation from its first bytes, with no pixel decoded.

Grids and token counts follow from it, and limits are checked against it before any memory is taken. The
parsers are ours, a few lines for each format: Pillow decodes a PNG's pixels to reach its EXIF, allocates a
WebP's canvas to open it, parses every EXIF tag, and warns through the interpreter's global state. What they
read equals what Pillow reads. Whether the pixels are sound is for the decoder to find out.
"""

# Over 300 lines because five formats are one noun, and what bounds one is judged beside the others.

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from encoder_contract import avif, jpeg2000, tiff
from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.orientation import FIRST_SWAPPED, orientation

# Bounds on what a sound file can need. A parser's work is linear in the file, and these keep its factor small:
# - 32 MiB of JPEG metadata in full 64 KiB segments are 512 of them;
_MAX_JPEG_SEGMENTS = 1024
# - a progressive photo has about ten scans, and the most thorough optimisers write some twenty. Each costs a
#   decoder a pass over the whole image, two seconds a gigapixel, however few bytes it has: any image may have
#   twenty, and a hundred if they are quick;
_USUAL_JPEG_SCANS, MAX_JPEG_SCANS = 20, 100
_MAX_SCANNED_PIXELS = 500_000_000
# - 32 MiB of PNG in the usual 8 KiB pieces have 4096 chunks;
_MAX_CHUNKS = 16384
# - 1 MiB of a GIF's comments and profiles in full sub-blocks are 4096; Pillow joins them in quadratic time;
_MAX_GIF_BLOCKS = 4096
# - nothing sound has junk between its parts, but decoders take it;
_MAX_JUNK_BYTES = 65536
# - EXIF with a thumbnail fits one 64 KiB segment, and XMP another; some writers need a few;
_MAX_METADATA_BYTES = 1 << 20
# - and as lines of hexadecimal text, ImageMagick's way of keeping it in a PNG, 64 KiB are under 160. A few bytes
#   inflate to this, so it is what a small file may cost;
_MAX_INFLATED_BYTES = 160 << 10
# - Pillow decodes run-length encoded BMPs in Python, seconds for more than this. They were for icons.
_MAX_RUN_LENGTH_BMP_BYTES = 1 << 20


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


def read_header(image: bytes, formats: Sequence[str] = ()) -> Header:
    """Return the header of an image file in one of `formats` (none: all of `FORMATS`).

    Animated files stand for their first frame, files of several pages for the first page.

    Time is linear in the file and short (no step of a loop for less than a chunk, no byte inflated beyond 160
    KiB), microseconds for a photo; no memory to speak of. Still, what comes from strangers and is larger than a
    few KiB is read off the event loop. Raises `InvalidImageError` for bytes that are no image of a format served
    here or whose header is damaged, and `ImageLimitError` for a JPEG of too many scans.
    """
    for name, magic, parse in _PARSERS:
        if magic.match(image):
            if formats and name not in formats:
                raise InvalidImageError(f"{name} images are not taken here; these are: {', '.join(formats)}")
            try:
                header = parse(image)
            except (struct.error, IndexError, StopIteration) as error:
                raise InvalidImageError(f"truncated: the file ends inside its header ({error})") from error
            if header.width < 1 or header.height < 1:
                raise InvalidImageError(f"damaged {header.format}: {header.width}x{header.height} pixels")
            return header
    raise _unknown(image, formats or FORMATS)


def check_limits(header: Header, image_bytes: int, *, max_image_bytes: int, max_image_pixels: int) -> None:
    """Raise `ImageLimitError` naming the limit that a file of `image_bytes` with this header exceeds."""
    if image_bytes > max_image_bytes:
        raise ImageLimitError(f"{image_bytes} bytes exceed max_image_bytes {max_image_bytes}")
    if header.pixels > max_image_pixels:
        size = f"{header.width}x{header.height}"
        raise ImageLimitError(f"{header.pixels} pixels ({size}) exceed max_image_pixels {max_image_pixels}")


_JPEG_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
# Frames whose scans hold whole samples; the others come in passes that refine each other.
_SEQUENTIAL_FRAMES = (0xC0, 0xC1, 0xC9)
# Restarts, start and end of image, and reserved extensions carry no length.
_BARE_MARKERS = {0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
_START_OF_SCAN, _APP1 = 0xDA, 0xE1
_EXIF_START, _XMP_START = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"


def _jpeg_segments(image: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, begin, end of its payload) up to and with the first scan; junk between segments is skipped."""
    position, junk_bytes = 2, 0
    for _ in range(_MAX_JPEG_SEGMENTS):
        found = _JPEG_MARKER.search(image, position, position + _MAX_JUNK_BYTES)
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
    raise InvalidImageError(f"damaged JPEG: more than {_MAX_JPEG_SEGMENTS} segments before the first scan")


def _jpeg(image: bytes) -> Header:
    frame: tuple[int, bytes] | None = None
    first_scan = len(image)
    exif: list[bytes] = []
    xmp = b""
    for marker, begin, end in _jpeg_segments(image):
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
    if sum(map(len, exif)) > _MAX_METADATA_BYTES:
        raise InvalidImageError(f"EXIF of more than {_MAX_METADATA_BYTES} bytes")
    kind, width, height, channels = _jpeg_frame(frame)
    # Decoders stop after a sequential scan of all channels.
    if kind not in _SEQUENTIAL_FRAMES or image[first_scan : first_scan + 1] != bytes([channels]):
        usual = max(_USUAL_JPEG_SCANS, _MAX_SCANNED_PIXELS // max(1, width * height))
        _check_scans(image, first_scan, min(usual, MAX_JPEG_SCANS))
    return Header("JPEG", width, height, orientation(b"".join(exif), xmp), channels)


def _jpeg_frame(frame: tuple[int, bytes] | None) -> tuple[int, int, int, int]:
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
    for begin in range(first_scan, len(image), _MAX_METADATA_BYTES):
        scans += image.count(b"\xff\xda", begin, begin + _MAX_METADATA_BYTES + 1)
        if scans > most:
            raise ImageLimitError(f"a JPEG of more than {most} scans, which is the limit at its size")


_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_EXIF_TEXT, _PNG_XMP_TEXT = b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"
_PNG_CHUNK = struct.Struct(">L4s")


def _png(image: bytes) -> Header:
    length, name, width, height, bits, colour = struct.unpack_from(">L4sLLBB", image, 8)
    if name != b"IHDR" or length != 13 or colour not in _PNG_CHANNELS:
        raise InvalidImageError(f"damaged PNG: bad header chunk (colour type {colour}, {bits} bits)")
    last = _png_metadata(image)
    exif = last[b"eXIf"][1] if b"eXIf" in last else b""
    if not exif and _PNG_EXIF_TEXT in last:
        exif = _hexadecimal(_png_text(*last[_PNG_EXIF_TEXT]))
    xmp = _png_text(*last[_PNG_XMP_TEXT]) if _PNG_XMP_TEXT in last else b""
    return Header("PNG", width, height, orientation(exif, xmp), _PNG_CHANNELS[colour])


def _png_metadata(image: bytes) -> dict[bytes, tuple[bytes, bytes]]:
    """Return (kind, payload) of the chunks that may hold an orientation, by what they are; texts by keyword.

    To the end of the file: metadata may follow the pixels, and the last of a kind counts.
    """
    found: dict[bytes, tuple[bytes, int, int]] = {}
    for kind, begin, end in png_chunks(image):
        if kind == b"eXIf":
            found[kind] = kind, begin, end
        elif kind in _PNG_TEXT_CHUNKS:
            for keyword in (_PNG_EXIF_TEXT, _PNG_XMP_TEXT):
                if image.startswith(keyword, begin, end):
                    found[keyword] = kind, begin + len(keyword), end
    return {
        what: (kind, image[begin : min(end, begin + _MAX_METADATA_BYTES)])
        for what, (kind, begin, end) in found.items()
    }


def png_chunks(image: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, begin, end of its payload) of each chunk before the end of the picture, or of the file."""
    position, stop = 8, len(image) - 8
    for _ in range(_MAX_CHUNKS):
        if position > stop:
            return
        length, kind = _PNG_CHUNK.unpack_from(image, position)
        if kind == b"IEND":
            return
        yield kind, position + 8, position + 8 + length
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
        return zlib.decompressobj().decompress(text, _MAX_INFLATED_BYTES)
    except zlib.error:
        return b""


def _hexadecimal(profile: bytes) -> bytes:
    """Return the bytes of ImageMagick's raw profile: an empty line, a name, a length, then hexadecimal."""
    digits = b"".join(profile.split(b"\n", 3)[3:]).translate(None, b"\n")
    try:
        return bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        return b""


_WEBP_EXIF_FLAG, _WEBP_XMP_FLAG, _WEBP_ALPHA_FLAG = 0x08, 0x04, 0x10
_WEBP_CHUNK = struct.Struct("<4sL")


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
    chunks = _webp_metadata(image) if flags & (_WEBP_EXIF_FLAG | _WEBP_XMP_FLAG) else {}
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
    position, stop = 12, len(image) - 8
    for _ in range(_MAX_CHUNKS):
        if position > stop or len(chunks) == 2:
            return chunks
        kind, length = _WEBP_CHUNK.unpack_from(image, position)
        position += 8
        if kind in (b"EXIF", b"XMP ") and kind not in chunks:
            chunks[kind] = image[position : position + min(length, _MAX_METADATA_BYTES)]
        position += length + (length & 1)
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
    junk_bytes = 0
    in_extension = False
    for _ in range(_MAX_GIF_BLOCKS):
        if in_extension:
            (length,) = struct.unpack_from("B", image, position)
            position += 1 + length
            in_extension = length > 0
            continue
        found = _GIF_BLOCK.search(image, position, position + _MAX_JUNK_BYTES - junk_bytes)
        if found is None or found[0] == b";":
            break
        if found[0] == b",":
            return found.end()
        junk_bytes += found.start() - position
        position, in_extension = found.end() + 1, True
    raise InvalidImageError("damaged GIF: no frame")


_BMP_RUN_LENGTHS = (1, 2)


def _bmp(image: bytes) -> Header:
    (header_bytes,) = struct.unpack_from("<L", image, 14)
    if header_bytes == 12:
        width, height, bits = struct.unpack_from("<HH2xH", image, 18)
    else:
        width, height, bits = struct.unpack_from("<Ll2xH", image, 18)
        coding = int.from_bytes(image[30:34], "little")
        if coding in _BMP_RUN_LENGTHS and len(image) > _MAX_RUN_LENGTH_BMP_BYTES:
            raise InvalidImageError(
                f"unsupported BMP: run-length encoded, of more than {_MAX_RUN_LENGTH_BMP_BYTES} bytes"
            )
    return Header("BMP", width, abs(height), orientation(), 1 if bits <= 8 else 3)


_PARSERS: tuple[tuple[str, re.Pattern[bytes], Callable[[bytes], Header]], ...] = (
    ("JPEG", re.compile(rb"\xff\xd8\xff"), _jpeg),
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    ("WEBP", re.compile(rb"RIFF....WEBP", re.DOTALL), _webp),
    ("GIF", re.compile(rb"GIF8[79]a"), _gif),
    ("BMP", re.compile(rb"BM"), _bmp),
    ("TIFF", tiff.MAGIC, lambda image: Header("TIFF", *tiff.read(image))),
    ("AVIF", avif.MAGIC, lambda image: Header("AVIF", *avif.read(image))),
    ("JPEG2000", jpeg2000.MAGIC, lambda image: Header("JPEG2000", *jpeg2000.read(image))),
)
# What is served: what browsers and phones send, the OpenAI-compatible interfaces take, and scanners and cameras write.
FORMATS = tuple(name for name, _, _ in _PARSERS)

# What people send as well, told by name: it helps more than a list.
_OTHERS = (
    ("HEIC", re.compile(rb"....ftyp(?:hei|hev)", re.DOTALL)),
    ("PDF", re.compile(rb"%PDF-")),
    ("SVG", re.compile(rb"\s*(?:<\?xml[^>]{0,200}>\s*)?(?:<!--[^>]{0,500}-->\s*)?(?:<!DOCTYPE svg|<svg)")),
    ("PSD", re.compile(rb"8BPS")),
    ("ICO", re.compile(rb"\0\0[\1\2]\0")),
    ("JPEG XL", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ")),
    ("a video", re.compile(rb"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI ", re.DOTALL)),
    ("EPS", re.compile(rb"%!PS")),
    ("PNM", re.compile(rb"P[1-7]\s")),
    ("HTML", re.compile(rb"\s*<(?:!DOCTYPE )?html", re.IGNORECASE)),
)


def _unknown(image: bytes, formats: Sequence[str]) -> InvalidImageError:
    if not image:
        return InvalidImageError("empty: an image of 0 bytes")
    found = [name for name, magic in _OTHERS if magic.match(image[:1024])]
    looks = f"; this looks like {found[0]}" if found else ""
    return InvalidImageError(f"not an image of a supported format ({', '.join(formats)}){looks}")
