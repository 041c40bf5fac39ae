"""TIFF: size and orientation of the first page, from the tags of its directory."""

import re
import struct

from encoder_contract.errors import InvalidImageError
from encoder_contract.orientation import BYTE_ORDERS, ORIENTATION_TAG, of_value
from encoder_contract.tiff_tags import MAX_TAGS, Directory

MAGIC = re.compile(rb"MM\x00\x2a|II\x2a\x00|MM\x2a\x00|II\x00\x2a|II\x2b\x00")
_BIG = b"II\x2b\x00"

_WIDTH, _HEIGHT, _COMPRESSION, _SAMPLES, _XMP = 256, 257, 259, 277, 700
_STRIP_OFFSETS, _STRIP_BYTES, _TILE_OFFSETS, _TILE_BYTES = 273, 279, 324, 325
_TILE_WIDTH, _TILE_HEIGHT = 322, 323
_JPEG = 7

# What a sound file can need, and a decoder pays for:
# - a strip is usually 8 KiB or a row, a tile 64 KiB;
_MAX_PIECES = 65536
# - colours, transparency, and what Pillow reads beside them;
_MAX_SAMPLES = 6
# - tiles are padded to their full size and decoded whole: a small image may have one of two megapixels;
_MAX_PADDED_PIXELS = 2 << 20
# - a JPEG in a strip has one scan, or one for each of its channels; each more is another pass over its pixels;
_MAX_SCANS = 4
# - XMP beside the orientation that it may hold.
_MAX_XMP_BYTES = 1 << 20


def read(image: bytes) -> tuple[int, int, int, int]:
    """Return (width, height, orientation, channels) of the first page, as Pillow sees them.

    Raises `InvalidImageError` for a file without a directory or a size, or one whose pieces would cost a decoder
    more than its pixels do.
    """
    big = image.startswith(_BIG)
    order = "<" if big else BYTE_ORDERS[image[:4]]
    (position,) = struct.unpack_from("<Q" if big else f"{order}L", image, 8 if big else 4)
    tags = Directory(image, position, order, is_big=big)
    if tags.said > MAX_TAGS:
        raise InvalidImageError(f"unsupported TIFF: a directory of {tags.said} tags")
    size = tags.integers(_WIDTH) + tags.integers(_HEIGHT)
    if len(size) != 2 or min(size) < 1:
        raise InvalidImageError("damaged TIFF: its first page has no size")
    (samples,) = tags.integers(_SAMPLES) or (1,)
    if not 1 <= samples <= _MAX_SAMPLES:
        raise InvalidImageError(f"unsupported TIFF: {samples} samples a pixel")
    _check_pieces(image, tags, *size)
    return *size, _orientation(tags), samples


def _orientation(tags: Directory) -> int:
    if tags.get(ORIENTATION_TAG) is None:
        return of_value(None, tags.text(_XMP, _MAX_XMP_BYTES))
    return of_value(next(iter(tags.integers(ORIENTATION_TAG)), 0))


def _check_pieces(image: bytes, tags: Directory, width: int, height: int) -> None:
    """Raise `InvalidImageError` when strips or tiles are too many, or cost more than the image."""
    is_tiled = tags.get(_TILE_WIDTH) is not None or tags.get(_TILE_OFFSETS) is not None
    for number in (_STRIP_OFFSETS, _STRIP_BYTES, _TILE_OFFSETS, _TILE_BYTES):
        found = tags.get(number)
        if found is not None and found.count > _MAX_PIECES:
            raise InvalidImageError(f"unsupported TIFF: {found.count} strips or tiles")
    if is_tiled:
        tile = tags.integers(_TILE_WIDTH) + tags.integers(_TILE_HEIGHT)
        if len(tile) != 2 or min(tile) < 1:
            raise InvalidImageError("damaged TIFF: its tiles have no size")
        if tile[0] * tile[1] > max(width * height, _MAX_PADDED_PIXELS):
            raise InvalidImageError(
                f"unsupported TIFF: tiles of {tile[0]}x{tile[1]}, which is more than the image"
            )
    if tags.integers(_COMPRESSION) == (_JPEG,):
        pieces = (_TILE_OFFSETS, _TILE_BYTES) if is_tiled else (_STRIP_OFFSETS, _STRIP_BYTES)
        _check_scans(image, *(tags.integers(number, _MAX_PIECES) for number in pieces))


def _check_scans(image: bytes, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Raise `InvalidImageError` for strips of JPEG that share bytes or have more scans than they need."""
    if len(offsets) != len(sizes) or min(sizes, default=0) < 0 or sum(sizes) > len(image):
        raise InvalidImageError("damaged TIFF: its strips or tiles are longer than the file")
    for offset, size in zip(offsets, sizes, strict=True):
        if image.count(b"\xff\xda", max(0, offset), offset + size) > _MAX_SCANS:
            raise InvalidImageError(f"unsupported TIFF: a JPEG of more than {_MAX_SCANS} scans inside")
