"""An image's header: format, size and orientation from its first bytes, with no pixel decoded.

Grids and token counts follow from it, and limits are checked against it before any memory is taken. For the
formats that language models are sent, the parsers are ours, a few lines for each: Pillow decodes a PNG's pixels
to reach its EXIF, allocates a WebP's canvas to open it, parses every EXIF tag, and warns through the
interpreter's global state. What they read equals what Pillow reads. Headers of all other formats are read by the
server's decoder processes. Whether the pixels are sound is for the decoder to find out.
"""

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from encoder_contract import jpeg, png, webp
from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.orientation import FIRST_SWAPPED, orientation

# What a sound file can need, as in the modules of the other formats. 1 MiB of a GIF's comments and profiles in full
# sub-blocks are 4096; Pillow joins them in quadratic time.
_MAX_GIF_BLOCKS = 4096
# Nothing sound has junk between its parts, but decoders take it.
_MAX_JUNK_BYTES = 65536
# Pillow decodes run-length encoded BMPs in Python, seconds for more than this. They were for icons.
_MAX_RUN_LENGTH_BMP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its image. `width` and `height` are pixels as stored, before orientation.

    `format` is one of `FORMATS` or `RARE_FORMATS`, `channels` the samples per stored pixel (1 for a palette; 4 in a
    JPEG means CMYK), `orientation` EXIF's 1 to 8; in one of `RARE_FORMATS` it is 1, and the size is the upright one.
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

    Animated files stand for their first frame.

    Time is linear in the file and short (no step of a loop for less than a chunk, no byte inflated beyond 160
    KiB), microseconds for a photo; no memory to speak of. Still, what comes from strangers and is larger than a
    few KiB is read off the event loop. Raises `InvalidImageError` for bytes that are no image of such a format or
    whose header is damaged, and `ImageLimitError` for a JPEG of too many scans.
    """
    for name, magic, parse in _PARSERS:
        if magic.match(image):
            if formats and name not in formats:
                raise InvalidImageError(
                    f"{name} images are not accepted here; accepted: {', '.join(formats)}"
                )
            try:
                header = parse(image)
            except (struct.error, IndexError, StopIteration) as error:
                raise InvalidImageError(f"truncated: the file ends inside its header ({error})") from error
            if header.width < 1 or header.height < 1:
                raise InvalidImageError(f"damaged {header.format}: {header.width}x{header.height} pixels")
            return header
    raise unknown(image, formats or FORMATS)


def check_limits(header: Header, image_bytes: int, *, max_image_bytes: int, max_image_pixels: int) -> None:
    """Raise `ImageLimitError` naming the limit that a file of `image_bytes` with this header exceeds."""
    if image_bytes > max_image_bytes:
        raise ImageLimitError(f"{image_bytes} bytes exceed max_image_bytes {max_image_bytes}")
    if header.pixels > max_image_pixels:
        size = f"{header.width}x{header.height}"
        raise ImageLimitError(f"{header.pixels} pixels ({size}) exceed max_image_pixels {max_image_pixels}")


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
    ("JPEG", jpeg.MAGIC, lambda image: Header("JPEG", *jpeg.read(image))),
    ("PNG", png.MAGIC, lambda image: Header("PNG", *png.read(image))),
    ("WEBP", webp.MAGIC, lambda image: Header("WEBP", *webp.read(image))),
    ("GIF", re.compile(rb"GIF8[79]a"), _gif),
    ("BMP", re.compile(rb"BM"), _bmp),
)
# What browsers and phones send, and the OpenAI-compatible interfaces take: both sides read their headers.
FORMATS = tuple(name for name, _, _ in _PARSERS)
# What else Pillow reads by itself, under Pillow's names: only the server's decoder processes read these.
RARE_FORMATS = (
    "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "TGA", "PCX", "BLP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX",
    "GBR", "ICNS", "IM", "IMT", "IPTC", "MCIDAS", "MSP", "PCD", "PIXAR", "PSD", "QOI", "SGI", "SPIDER", "SUN", "XBM",
    "XPM", "XVTHUMB",
)  # fmt: skip

# What people send as well, told by name: it helps more than a list.
_OTHERS = (
    ("HEIC", re.compile(rb"....ftyp(?:hei|hev)", re.DOTALL)),
    ("PDF", re.compile(rb"%PDF-")),
    ("SVG", re.compile(rb"\s*(?:<\?xml[^>]{0,200}>\s*)?(?:<!--[^>]{0,500}-->\s*)?(?:<!DOCTYPE svg|<svg)")),
    ("JPEG XL", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ")),
    ("a video", re.compile(rb"....ftyp(?!avif|avis|mif1|msf1)|\x1a\x45\xdf\xa3|RIFF....AVI ", re.DOTALL)),
    ("EPS", re.compile(rb"%!PS")),
    ("HTML", re.compile(rb"\s*<(?:!DOCTYPE )?html", re.IGNORECASE)),
)


def format_of(image: bytes) -> str | None:
    """Return which of `FORMATS` a file has; None for one that may have one of `RARE_FORMATS`.

    Raises `InvalidImageError` for a file that is empty or known to be something else.
    """
    for name, magic, _ in _PARSERS:
        if magic.match(image):
            return name
    if not image or any(magic.match(image[:1024]) for _, magic in _OTHERS):
        raise unknown(image)
    return None


def unknown(image: bytes, formats: Sequence[str] = FORMATS) -> InvalidImageError:
    """Return the error for a file that is not an image in one of `formats`."""
    if not image:
        return InvalidImageError("empty: an image of 0 bytes")
    found = [name for name, magic in _OTHERS if magic.match(image[:1024])]
    looks = f"; this looks like {found[0]}" if found else ""
    return InvalidImageError(f"not an image of a supported format ({', '.join(formats)}){looks}")
