"""JPEG 2000: the size that its codestream has, alone or in a JP2 file, and whether decoding it is worth its memory."""

import re
import struct
from collections.abc import Iterator

from encoder_contract.boxes import find
from encoder_contract.errors import InvalidImageError
from encoder_contract.orientation import UPRIGHT

_CODESTREAM, _JP2 = b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n"
MAGIC = re.compile(re.escape(_CODESTREAM) + b"|" + re.escape(_JP2))

_CODING_STYLE, _COMPONENT_STYLE = 0xFF52, 0xFF53
_START_OF_TILE, _START_OF_DATA, _END = 0xFF90, 0xFF93, 0xFFD9
_HAS_PRECINCTS = 0x01

# A main header has some ten segments, and comments.
_MAX_SEGMENTS = 512
# A tile has a part, or one for each resolution or layer, and a segment or two in each.
_MAX_TILE_SEGMENTS = 8192
# A decoder keeps a structure for each code block and each precinct, however little the file has for it. Code blocks
# have 32 or 64 pixels a side; precincts, of the pixels that they stand for at full size, at least that.
_MIN_CODE_BLOCK_BITS = 10
_MIN_PRECINCT_BITS = 5


def read(image: bytes) -> tuple[int, int, int, int]:
    """Return (width, height, orientation, channels).

    Raises `InvalidImageError` for a file without a codestream or whose parts differ in size, and for one cut into
    so small pieces that decoding takes a multiple of its pixels' memory.
    """
    if image.startswith(_CODESTREAM):
        return *_codestream(image, 0, len(image)), UPRIGHT, _channels(image, 0)
    header = find(image, b"jp2h", 12, len(image))
    stream = find(image, b"jp2c", 12, len(image))
    if header is None or stream is None or stream[0] < header[0]:
        raise InvalidImageError("damaged JPEG2000: no header before a codestream")
    said = find(image, b"ihdr", *header)
    if said is None or not image.startswith(_CODESTREAM, stream[0]):
        raise InvalidImageError("damaged JPEG2000: no header or no codestream")
    size = _codestream(image, *stream)
    if size[::-1] != struct.unpack_from(">LL", image, said[0]):
        raise InvalidImageError("damaged JPEG2000: its parts differ in size")
    return *size, UPRIGHT, _channels(image, stream[0])


def _channels(image: bytes, begin: int) -> int:
    (channels,) = struct.unpack_from(">H", image, begin + 40)
    if not 1 <= channels <= 4:
        raise InvalidImageError(f"unsupported JPEG2000: {channels} channels")
    return int(channels)


def _codestream(image: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return (width, height) in pixels, once what the codestream promises about its pieces is found bearable."""
    right, bottom, left, top = struct.unpack_from(">4L", image, begin + 8)
    position = begin + 2
    for marker, position, segment_end in _segments(image, begin + 2, end):
        if marker == _START_OF_TILE:
            _check_tile_parts(image, position - 4, end)
        else:
            _check_style(image, marker, position, segment_end)
    return max(0, right - left), max(0, bottom - top)


def _segments(image: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, begin, end of its content) up to and with the first tile or the start of data."""
    for _ in range(_MAX_SEGMENTS):
        (marker,) = struct.unpack_from(">H", image, position)
        if marker in (_START_OF_DATA, _END):
            yield marker, position + 2, position + 2
            return
        (length,) = struct.unpack_from(">H", image, position + 2)
        if marker < 0xFF30 or length < 2 or position + 2 + length > end:
            raise InvalidImageError("damaged JPEG2000: no marker where one should be")
        yield marker, position + 4, position + 2 + length
        if marker == _START_OF_TILE:
            return
        position += 2 + length
    raise InvalidImageError(f"damaged JPEG2000: more than {_MAX_SEGMENTS} segments")


def _check_style(image: bytes, marker: int, begin: int, end: int) -> None:
    """Raise `InvalidImageError` for a coding style, of the image or of one tile, that cuts it into too small pieces."""
    if marker == _CODING_STYLE:
        style, levels, *blocks = struct.unpack_from(">B4x3B", image, begin)
        _check_pieces(image[begin + 10 : end] if style & _HAS_PRECINCTS else b"", levels, *blocks)
    elif marker == _COMPONENT_STYLE:
        style, levels, *blocks = struct.unpack_from(">x4B", image, begin)
        _check_pieces(image[begin + 6 : end] if style & _HAS_PRECINCTS else b"", levels, *blocks)


def _check_pieces(precincts: bytes, levels: int, block_width: int, block_height: int) -> None:
    if block_width + block_height + 4 < _MIN_CODE_BLOCK_BITS:
        raise InvalidImageError(
            f"unsupported JPEG2000: code blocks of {4 << block_width}x{4 << block_height}"
        )
    for resolution, bits in enumerate(precincts[: levels + 1]):
        if min(bits & 15, bits >> 4) + levels - resolution < _MIN_PRECINCT_BITS:
            raise InvalidImageError("unsupported JPEG2000: precincts of a few pixels")


def _check_tile_parts(image: bytes, position: int, end: int) -> None:
    """Raise `InvalidImageError` for a tile's own coding style with too small pieces, or for too many parts."""
    seen = 0
    while seen < _MAX_TILE_SEGMENTS:
        if position + 12 > end:
            return
        marker, length = struct.unpack_from(">H4xL", image, position)
        if marker != _START_OF_TILE:
            return
        part_end = min(end, position + length) if length else end
        for inner, begin, inner_end in _segments(image, position + 12, part_end):
            seen += 1
            _check_style(image, inner, begin, inner_end)
        if part_end == end:
            return
        position = part_end
    raise InvalidImageError("unsupported JPEG2000: too many tiles, or parts of them")
