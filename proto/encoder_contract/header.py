"""An image's header: read format, size and orientation without decoding pixels.

Grids and token counts follow from the header, and limits are checked against it before any memory is allocated. The
formats that users send to language models have our own short parsers, because Pillow decodes a PNG's pixels to reach
its EXIF, allocates a WebP's canvas to open it, parses every EXIF tag, and warns through the interpreter's global state.
Our parsers read the same values as Pillow. The server's decoder processes read the headers of all other formats. Only
the decoder finds out whether the pixels are intact.
"""

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from encoder_contract import jpeg, png, webp
from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.orientation import FIRST_SWAPPED, orientation

# Most that an intact file can need, as in the modules of the other formats. 1 MiB of comments and profiles in a GIF has
# 4096 full sub-blocks; Pillow joins them in quadratic time.
_MAX_GIF_BLOCKS = 4096
# An intact file has no junk between its parts, but decoders accept it.
_MAX_JUNK_BYTES = 65536
# Pillow decodes run-length encoded BMPs in Python, and needs seconds for larger ones. The encoding was for icons.
_MAX_RUN_LENGTH_BMP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """An image file's header. `width` and `height` are pixels as stored, before the orientation is applied.

    `format` is one of `FORMATS` or `RARE_FORMATS`. `channels` counts the samples per stored pixel: 1 for a palette; 4
    in a JPEG means CMYK. `orientation` is EXIF's 1 to 8. With `RARE_FORMATS` it is 1, and the size is the upright one.
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

    The image of an animation is its first frame. The time is linear in the file size, and microseconds for a photo: no
    loop steps over less than a chunk, and at most 160 KiB are inflated. It needs almost no memory. Even so, read files
    from untrusted callers that are larger than a few KiB outside the event loop. Raises `InvalidImageError` for bytes
    that are not an image in such a format or have a damaged header, and `ImageLimitError` for a JPEG with too many
    scans.
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
    """Raise `ImageLimitError`, which names the limit, if a file of `image_bytes` with this header exceeds one."""
    if image_bytes > max_image_bytes:
        raise ImageLimitError(f"{image_bytes} bytes exceed max_image_bytes {max_image_bytes}")
    if header.pixels > max_image_pixels:
        size = f"{header.width}x{header.height}"
        raise ImageLimitError(f"{header.pixels} pixels ({size}) exceed max_image_pixels {max_image_pixels}")


_GIF_BLOCK = re.compile(rb"[!,;]")


def _gif(image: bytes) -> Header:
    """Read the size of the screen, enlarged if the first frame exceeds it."""
    width, height, flags = struct.unpack_from("<HHB", image, 6)
    left, top, frame_width, frame_height = struct.unpack_from("<4H", image, _first_gif_frame(image, flags))
    width, height = max(width, left + frame_width), max(height, top + frame_height)
    return Header("GIF", width, height, orientation(), 1)


def _first_gif_frame(image: bytes, flags: int) -> int:
    """Return the offset of the first frame's position and size, after the palette and any extensions."""
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
# The formats that browsers and phones send and OpenAI-compatible APIs accept. Both sides read their headers.
FORMATS = tuple(name for name, _, _ in _PARSERS)
# The other formats that Pillow reads without plug-ins, by Pillow's names. Only the server's decoder processes read
# them.
RARE_FORMATS = (
    "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "TGA", "PCX", "BLP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX",
    "GBR", "ICNS", "IM", "IMT", "IPTC", "MCIDAS", "MSP", "PCD", "PIXAR", "PSD", "QOI", "SGI", "SPIDER", "SUN", "XBM",
    "XPM", "XVTHUMB",
)  # fmt: skip

# Other files that people send. An error that names the format helps more than a list of accepted ones.
_OTHERS = (
    (
        "HEIF, as iPhones write it (.heic): convert it to JPEG first, for example with ImageMagick or pillow-heif",
        # The brands mif1 and msf1 are AVIF's too, which then has a brand of its own beside them.
        re.compile(rb"....ftyp(?:hei|hev|(?:mif1|msf1)(?!.{0,64}avi[fs]))", re.DOTALL),
    ),
    ("a PAM or colour PFM of Netpbm: convert it to PNG or PPM", re.compile(rb"P7\s(?!332)|PF\s")),
    ("PDF", re.compile(rb"%PDF-")),
    ("SVG", re.compile(rb"\s*(?:<\?xml[^>]{0,200}>\s*)?(?:<!--[^>]{0,500}-->\s*)?(?:<!DOCTYPE svg|<svg)")),
    ("JPEG XL", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ")),
    (
        "a video",
        re.compile(
            rb"....ftyp(?!avif|avis|mif1|msf1|hei|hev)|\x1a\x45\xdf\xa3|RIFF....AVI |FLV\x01", re.DOTALL
        ),
    ),
    ("EPS", re.compile(rb"%!PS")),
    ("HTML", re.compile(rb"\s*<(?:!DOCTYPE )?html", re.IGNORECASE)),
)


def format_of(image: bytes) -> str | None:
    """Return the file's format if it is one of `FORMATS`; None if it may be one of `RARE_FORMATS`.

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
        return InvalidImageError("the image is empty: 0 bytes")
    found = [name for name, magic in _OTHERS if magic.match(image[:1024])]
    looks = f"; this looks like {found[0]}" if found else ""
    return InvalidImageError(f"not an image of a supported format ({', '.join(formats)}){looks}")
