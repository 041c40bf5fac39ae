"""Decoding with Pillow: an image file to upright RGB pixels in a numpy array. It does not import torch.

For `FORMATS`, our own parser reads the header, and this module calls Pillow's readers directly, without Pillow's limits
and warnings. For `RARE_FORMATS`, Pillow reads the header too.
"""

import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, ImageOps, UnidentifiedImageError, features
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from encoder_contract import png
from encoder_contract.errors import EncoderError, InvalidImageError, OverloadedError
from encoder_contract.header import FORMATS, Header, unknown
from encoder_contract.orientation import FIRST_SWAPPED, ORIENTATION_TAG, UPRIGHT
from encoder_service.image.source import Source

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]

# An upper bound on the bytes that a pixel of a source takes until it is resized (`test_decode_memory.py`). The result
# takes 3. Pillow keeps 4, and for a WebP 12 or more. For each channel, a progressive JPEG takes 2 and a JPEG 2000 about
# 5.
PILLOW_BYTES_PER_PIXEL = 28

# A Pillow image is converted in bands of this many pixels, so that intermediate copies stay small.
_BAND_PIXELS = 1 << 18
# The chunks of a PNG that determine its pixels. Pillow would also inflate every profile and text chunk.
_PNG_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT")
# As many as Pillow passes to its readers.
_MAGIC_BYTES = 16
# Markers that make Pillow parse a JPEG's metadata in Python -> replacements of the same length that it ignores.
_JPEG_METADATA = ((b"Exif\0\0", b"Past\0\0"), (b"Photoshop 3.0\0", b"Past here    \0"))
# Those of Pillow's decoders that are written in Python take seconds for larger files.
_MAX_PYTHON_BYTES = 1 << 20
# No binary format has longer sides. The server compares sides with its limits, so that they need only be short enough
# to print.
MAX_SIDE = (1 << 64) - 1
# LAB has a band "A" too, which is a colour.
_ALPHA_MODES = ("LA", "PA", "RGBA")
# Memory is short only while other images are being decoded.
_SHORT_RETRY_MS = 500
_SWAPPED = range(FIRST_SWAPPED, 9)
# Orientation -> steps along rows and columns. Orientations 5 to 8 are transposed afterwards.
STEPS = {1: (1, 1), 2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (-1, 1), 7: (-1, -1), 8: (1, -1)}


def read_rare_header(file: bytes, formats: Sequence[str]) -> Header | EncoderError:
    """Return the header of a file in one of these `RARE_FORMATS`, with the size of the upright image; or its error.

    Only for a decoder process: nothing bounds the time and memory that Pillow takes for it.
    """
    try:
        with Image.open(io.BytesIO(file), formats=tuple(formats)) as picture:
            width, height = picture.size
            if _swaps_sides(picture):
                width, height = height, width
            # The reader of IM also accepts sizes that are no integers.
            is_size = all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in (width, height))
            if picture.format is None or not is_size:
                return InvalidImageError(f"damaged {picture.format}: {width}x{height} pixels")
            if len(file) > _MAX_PYTHON_BYTES and any(tile[0] in Image.DECODERS for tile in picture.tile):
                return InvalidImageError(
                    f"unsupported {picture.format}: Pillow decodes this kind in Python, so it may have at most "
                    f"{_MAX_PYTHON_BYTES} bytes"
                )
            # A few readers do not write their format's name in capitals.
            return Header(picture.format.upper(), width, height, UPRIGHT, len(picture.getbands()))
    except UnidentifiedImageError:
        kind = _format_by_magic(file, formats)
        if kind is None:
            return unknown(file, (*FORMATS, *formats))
        return _unreadable(kind, "Pillow does not read it; convert it to PNG")
    except Exception as error:  # noqa: BLE001 - on damaged data Pillow's readers raise any type
        if is_shortage(error):
            return _shortage("reading the header of an image")
        return _unreadable(_format_by_magic(file, formats) or "image", error)


def _unreadable(kind: str, reason: object) -> InvalidImageError:
    return InvalidImageError(f"unsupported, damaged or truncated {kind}: {reason}")


def _format_by_magic(file: bytes, formats: Sequence[str]) -> str | None:
    """Return the one of these formats whose first bytes a file has; None if no format says so."""
    for name in formats:
        _, accepts = Image.OPEN[name]
        with suppress(Exception):  # they raise errors for a file that is shorter than they expect
            if accepts is not None and accepts(file[:_MAGIC_BYTES]):
                return name
    return None


def _swaps_sides(picture: ImageFile) -> bool:
    """Whether `picture.size` must be swapped to get the upright size; for a TIFF, Pillow mostly swaps it already."""
    # A damaged tag may hold a text or several numbers.
    is_swapped = isinstance(picture, TiffImageFile) and picture.tag_v2.get(ORIENTATION_TAG) in _SWAPPED
    return picture.getexif().get(ORIENTATION_TAG) in _SWAPPED and not is_swapped


def decode_file(source: Source, out: Pixels | None = None) -> Pixels | EncoderError:
    """Return the upright pixels of an image, uint8 [H, W, 3], in `out` if given; or the error of the image."""
    header = source.header
    try:
        return _decode(source, out)
    # On damaged data Pillow's readers raise exceptions of any type.
    except Exception as error:  # noqa: BLE001
        is_short, failure = is_shortage(error), str(error)
    # The exception is gone, and with it the picture, whose memory must not count as taken.
    if is_short or not _has_memory(header):
        log.warning("short of memory or files while decoding %s: %s", header, failure)
        return _shortage(f"decoding {header.pixels} pixels")
    return _unreadable(header.format, failure)


def _decode(source: Source, out: Pixels | None) -> Pixels | EncoderError:
    """See `decode_file`; raises the errors of Pillow's readers."""
    header = source.header
    is_rare = header.format not in READERS
    with _open(source) as picture:
        # Pillow applies the orientation of a TIFF while loading it. Before that, `size` is mostly the upright size.
        if not is_rare and picture.size != (header.width, header.height):
            return InvalidImageError(f"damaged {header.format}: its parts differ in size")
        picture.load()
        if is_rare:
            ImageOps.exif_transpose(picture, in_place=True)
        if picture.size != (header.width, header.height):
            return InvalidImageError(f"damaged {header.format}: its parts differ in size")
        if header.orientation == UPRIGHT:
            return _fill(_empty(picture.size) if out is None else out, picture)
        pixels = _fill(_empty(picture.size), picture)
    return upright(pixels, header.orientation, out)


def _open(source: Source) -> ImageFile:
    """Return the picture in a file, without loading its pixels.

    For `FORMATS` this calls the reader itself: `Image.open` would also parse the other images in a JPEG.
    """
    if reader := READERS.get(source.header.format):
        return reader(io.BytesIO(_without_metadata(source)))
    return Image.open(io.BytesIO(source.data), formats=[source.header.format])


def _shortage(what: str) -> OverloadedError:
    return OverloadedError(f"{what} ran short of memory or files", retry_after_ms=_SHORT_RETRY_MS)


def upright(pixels: Pixels, orientation: int, out: Pixels | None = None) -> Pixels:
    """Return `pixels` [H, W, 3] with an EXIF orientation applied, contiguous, in `out` if given."""
    rows, columns = STEPS[orientation]
    # numpy moves the three bytes of a pixel at once: 1.5 ms for a 720p image. torch takes 20 ms.
    whole = pixels.view("V3")[::rows, ::columns, 0]
    whole = whole.T if orientation >= FIRST_SWAPPED else whole
    if out is None:
        out = np.empty((*whole.shape, 3), np.uint8)
    out.view("V3")[:, :, 0] = whole
    return out


def is_shortage(error: Exception) -> bool:
    """Whether an exception means that this process ran out of resources, not that the image is bad."""
    if isinstance(error, MemoryError):
        return True
    # Errors of the system have an errno. Pillow's own errors have none, and one of them means that memory ran out.
    return isinstance(error, OSError) and (error.errno is not None or "out of memory" in str(error))


def _has_memory(header: Header) -> bool:
    """Whether the memory for decoding is available now. libwebp does not report why it failed, so this finds out."""
    try:
        np.empty(PILLOW_BYTES_PER_PIXEL * header.pixels, np.uint8)
    except MemoryError:
        return False
    return True


def _without_metadata(source: Source) -> bytes:
    """Return the file without the metadata that Pillow would parse at unbounded cost. The pixels do not need it."""
    data = source.data
    if source.header.format == "JPEG":
        for name, other in _JPEG_METADATA:
            data = data.replace(name, other)
    if source.header.format == "PNG":
        pieces, end = [data[:8]], 8
        for kind, begin, end_of_payload in png.chunks(data):
            end = end_of_payload + 4
            if kind in _PNG_PIXEL_CHUNKS:
                pieces.append(data[begin - 8 : end])
        return b"".join([*pieces, data[end:]])
    return data


def _empty(size: tuple[int, int]) -> Pixels:
    width, height = size
    return np.empty((height, width, 3), np.uint8)


def _fill(pixels: Pixels, picture: ImageFile) -> Pixels:
    """Write a loaded picture to `pixels` in RGB."""
    width, height = picture.size
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        pixels[top : top + rows] = np.asarray(_rgb(picture.crop((0, top, width, min(top + rows, height)))))
    return pixels


def _rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB with transparency over white, as vLLM's image loader does.

    An RGB picture keeps its colours even if it declares one of them transparent.
    """
    if picture.mode == "RGB":
        return picture
    if picture.mode not in _ALPHA_MODES and "transparency" not in picture.info:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white


READERS: dict[str, type[ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}
# Formats that a build of Pillow may lack -> Pillow's name of the feature.
_FEATURES = {"WEBP": "webp", "TIFF": "libtiff", "AVIF": "avif", "JPEG2000": "jpg_2000"}
# One thread decodes an image, so that `--decode-threads` is the number of busy threads.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
# The TIFF reader warns about every odd tag of every file, and Python keeps all warnings in memory.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


def missing_formats(formats: Sequence[str]) -> list[str]:
    """Return those of the formats that this build of Pillow lacks."""
    return [name for name in formats if name in _FEATURES and not features.check(_FEATURES[name])]


def sample_jpeg(*, progressive: bool) -> bytes:
    """Return a small JPEG to try a decoder with."""
    file = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").save(file, "JPEG", progressive=progressive)
    return file.getvalue()
