"""AVIF: size and orientation of the primary image, or of an animation's first frame, from the file's boxes.

The size stands in a box, and the frames inside have their own, which is what a decoder takes memory for; so their
headers are read as well. An AVIF's rotation and mirroring count before EXIF, as Pillow has it.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from encoder_contract.boxes import boxes, find
from encoder_contract.errors import InvalidImageError
from encoder_contract.obu import frame_sizes
from encoder_contract.orientation import from_exif, of_value

# The brands that Pillow takes for AVIF; the last two say no more than that it may be one.
MAGIC = re.compile(rb"....ftyp(?:avif|avis|mif1|msf1)", re.DOTALL)
_CODINGS = (b"avif", b"avis")
_XMP_TYPE = b"application/rdf+xml\0"

# A photo has an image, its transparency, metadata, a thumbnail, or some hundred tiles.
_MAX_ITEMS = 512
_MAX_TRACKS = 8
_MAX_METADATA_BYTES = 1 << 20
# Frames are padded to their blocks, and tiles of a grid stand over its edge.
_PADDING = 64

# (anticlockwise quarter turns, axis of the mirror that follows: 0 top and bottom, 1 left and right) -> EXIF's word.
_ORIENTATIONS = {
    (0, None): 1, (1, None): 8, (2, None): 3, (3, None): 6,
    (0, 0): 4, (1, 0): 5, (2, 0): 2, (3, 0): 7,
    (0, 1): 2, (1, 1): 7, (2, 1): 4, (3, 1): 5,
}  # fmt: skip

Place = tuple[int, int]  # begin and end in the file


@dataclass(frozen=True, slots=True)
class _Item:
    kind: bytes
    name: bytes  # and, for metadata, its type
    places: tuple[Place, ...]


def read(image: bytes) -> tuple[int, int, int, int]:
    """Return (width, height, orientation, channels: 4 with transparency), as Pillow sees them.

    Raises `InvalidImageError` for a file without a sound primary image, and for one whose frames are larger than it.
    """
    file_type = next(boxes(image, 0, len(image)))
    brands = image[file_type[1] : file_type[1] + 4], image[file_type[1] + 8 : min(file_type[2], 1024)]
    if not any(brand in (brands[0], *_fours(brands[1])) for brand in _CODINGS):
        raise InvalidImageError("not an image of a supported format: a HEIF file that is no AVIF")
    # As libavif: a brand that says which it is decides, and without one an animation goes first.
    movie = None if brands[0] == b"avif" else find(image, b"moov", 0, len(image))
    if brands[0] == b"avis" or movie is not None:
        return _animation(image, movie)
    meta = find(image, b"meta", 0, len(image))
    if meta is None:
        raise InvalidImageError("damaged AVIF: no image")
    return _still(image, (meta[0] + 4, meta[1]))


def _fours(brands: bytes) -> Iterator[bytes]:
    return (brands[at : at + 4] for at in range(0, len(brands), 4))


def _still(image: bytes, meta: Place) -> tuple[int, int, int, int]:
    items = _items(image, meta)
    primary = _primary(image, meta)
    properties = _properties(image, meta, primary)
    if b"ispe" not in properties:
        raise InvalidImageError("damaged AVIF: its image has no size")
    width, height = struct.unpack_from(">LL", image, properties[b"ispe"] + 4)
    coded = [item.places for item in items.values() if item.kind == b"av01"]
    if any(len(places) != 1 for places in coded):
        raise InvalidImageError("unsupported AVIF: an image in several pieces")
    _check_frames(image, [places[0] for places in coded], width, height)
    is_turned = properties.keys() & {b"irot", b"imir"}
    orientation = _turned(image, properties) if is_turned else 1
    if orientation == 1:
        orientation = _of_metadata(image, items)
    return width, height, orientation, 4 if _has_alpha(image, meta) else 3


def _turned(image: bytes, properties: dict[bytes, int]) -> int:
    turns = image[properties[b"irot"]] & 3 if b"irot" in properties else 0
    axis = image[properties[b"imir"]] & 1 if b"imir" in properties else None
    return _ORIENTATIONS[turns, axis]


def _of_metadata(image: bytes, items: dict[int, _Item]) -> int:
    """Return what XMP says of an image that is not turned and whose EXIF says nothing: Pillow goes by it."""
    exif = xmp = b""
    for item in items.values():
        if item.kind == b"Exif":
            exif = _content(image, item)[4:]
        elif item.kind == b"mime" and item.name.partition(b"\0")[2].startswith(_XMP_TYPE):
            xmp = _content(image, item)
    return 1 if from_exif(exif) is not None else of_value(None, xmp)


def _content(image: bytes, item: _Item) -> bytes:
    pieces, room = [], _MAX_METADATA_BYTES
    for begin, end in item.places:
        pieces.append(image[begin : min(end, begin + room)])
        room -= len(pieces[-1])
    return b"".join(pieces)


def _check_frames(image: bytes, frames: list[Place], width: int, height: int) -> None:
    for found in frame_sizes(image, frames):
        if found[0] > width + _PADDING or found[1] > height + _PADDING:
            raise InvalidImageError(
                f"damaged AVIF: a frame of {found[0]}x{found[1]} in an image of {width}x{height}"
            )


def _primary(image: bytes, meta: Place) -> int:
    place = find(image, b"pitm", *meta)
    if place is None:
        raise InvalidImageError("damaged AVIF: no primary image")
    return int(struct.unpack_from(">L" if image[place[0]] else ">H", image, place[0] + 4)[0])


def _has_alpha(image: bytes, meta: Place) -> bool:
    properties = find(image, b"iprp", *meta)
    container = find(image, b"ipco", *properties) if properties else None
    return container is not None and any(
        kind == b"auxC" and b"alpha" in image[begin : min(end, begin + 100)]
        for kind, begin, end in boxes(image, *container)
    )


def _properties(image: bytes, meta: Place, item: int) -> dict[bytes, int]:
    """Return where the properties of an item begin, by their type."""
    properties = find(image, b"iprp", *meta)
    container = find(image, b"ipco", *properties) if properties else None
    of_items = find(image, b"ipma", *properties) if properties else None
    if container is None or of_items is None:
        raise InvalidImageError("damaged AVIF: no properties")
    all_of_them = list(boxes(image, *container))
    found: dict[bytes, int] = {}
    for index in _associated(image, of_items[0], item):
        if not 0 <= index < len(all_of_them):
            raise InvalidImageError("damaged AVIF: a property that is missing")
        found.setdefault(all_of_them[index][0], all_of_them[index][1])
    return found


def _associated(image: bytes, position: int, item: int) -> Iterator[int]:
    """Yield the indices of an item's properties."""
    version_and_flags, entries = struct.unpack_from(">LL", image, position)
    head = struct.Struct(">LB" if version_and_flags >> 24 else ">HB")
    wide = version_and_flags & 1
    position += 8
    for _ in range(_bounded(entries)):
        number, count = head.unpack_from(image, position)
        position += head.size
        if number == item:
            for index in struct.unpack_from(f">{count}{'H' if wide else 'B'}", image, position):
                yield (index & (0x7FFF if wide else 0x7F)) - 1
        position += count * (2 if wide else 1)


def _bounded(items: int) -> int:
    if items > _MAX_ITEMS:
        raise InvalidImageError(f"unsupported AVIF: {items} items, over {_MAX_ITEMS}")
    return items


def _items(image: bytes, meta: Place) -> dict[int, _Item]:
    """Return what the file says of each item, by its number."""
    places = _places(image, meta)
    place = find(image, b"iinf", *meta)
    if place is None:
        raise InvalidImageError("damaged AVIF: no list of items")
    begin = place[0] + (8 if image[place[0]] else 6)
    items: dict[int, _Item] = {}
    for kind, entry, end in boxes(image, begin, place[1]):
        version = image[entry] if kind == b"infe" and entry < end else 0
        if version not in (2, 3):
            continue
        number, item_kind = struct.unpack_from(">H2x4s" if version == 2 else ">L2x4s", image, entry + 4)
        name = image[entry + (12 if version == 2 else 14) : min(end, entry + 512)]
        items[number] = _Item(item_kind, name, places.get(number, ()))
        _bounded(len(items))
    return items


def _places(image: bytes, meta: Place) -> dict[int, tuple[Place, ...]]:
    """Return where in the file the content of each item is."""
    table = find(image, b"iloc", *meta)
    if table is None:
        raise InvalidImageError("damaged AVIF: no places of items")
    reader = _Numbers(image, table[0])
    version = reader.take(1)
    reader.take(3)
    sizes = reader.take(2)
    offset_bytes, length_bytes, base_bytes = sizes >> 12, sizes >> 8 & 15, sizes >> 4 & 15
    index_bytes = sizes & 15 if version else 0
    own = find(image, b"idat", *meta)
    places: dict[int, tuple[Place, ...]] = {}
    pieces = 0
    for _ in range(_bounded(reader.take(2 if version < 2 else 4))):
        number = reader.take(2 if version < 2 else 4)
        inside = version > 0 and reader.take(2) & 15 == 1
        reader.take(2)
        base = reader.take(base_bytes) + (own[0] if inside and own else 0)
        found = []
        count = reader.take(2)
        pieces = _bounded(pieces + count)
        for _ in range(count):
            reader.take(index_bytes)
            begin = base + reader.take(offset_bytes)
            length = reader.take(length_bytes)
            end = begin + length if length else len(image)
            if end > len(image):
                raise InvalidImageError("truncated: an AVIF's item runs over the end of the file")
            found.append((begin, end))
        places[number] = tuple(found)
    return places


class _Numbers:
    """Reads big-endian numbers, one after the other."""

    def __init__(self, image: bytes, position: int) -> None:
        self._image = image
        self._position = position

    def take(self, size: int) -> int:
        self._position += size
        if self._position > len(self._image):
            raise InvalidImageError("truncated: an AVIF ends inside a table")
        return int.from_bytes(self._image[self._position - size : self._position], "big")


def _animation(image: bytes, movie: Place | None) -> tuple[int, int, int, int]:
    """Return the same for the first frame of an animation: its tracks have one size."""
    tracks = [place for kind, *place in boxes(image, *movie) if kind == b"trak"] if movie else []
    if len(tracks) > _MAX_TRACKS:
        raise InvalidImageError(f"unsupported AVIF: {len(tracks)} tracks")
    sizes: list[tuple[int, int]] = []
    orientation = 1
    for begin, end in tracks:
        sample = _first_sample(image, (begin, end))
        if sample is None:
            continue
        size = _track_size(image, (begin, end))
        _check_frames(image, [sample], *size)
        sizes.append(size)
        meta = find(image, b"meta", begin, end)
        if meta is not None and len(sizes) == 1:
            orientation = _of_metadata(image, _items(image, (meta[0] + 4, meta[1])))
    if not sizes or {*sizes} != {sizes[0]}:
        raise InvalidImageError("damaged AVIF: an animation without frames, or of several sizes")
    return *sizes[0], orientation, 3 if len(sizes) == 1 else 4


def _track_size(image: bytes, track: Place) -> tuple[int, int]:
    header = find(image, b"tkhd", *track)
    if header is None or header[1] - header[0] < 84:
        raise InvalidImageError("damaged AVIF: a track without a header")
    matrix = struct.unpack_from(">9l", image, header[1] - 44)
    if matrix[:2] + matrix[3:5] != (65536, 0, 0, 65536):
        raise InvalidImageError("unsupported AVIF: an animation that is turned")
    width, height = struct.unpack_from(">LL", image, header[1] - 8)
    return width >> 16, height >> 16


def _first_sample(image: bytes, track: Place) -> Place | None:
    """Return where a track's first frame is, None when it is no track of AV1 frames."""
    table: Place | None = track
    for kind in (b"mdia", b"minf", b"stbl"):
        table = find(image, kind, *table) if table else None
    if table is None:
        return None
    parts = {kind: begin for kind, begin, _ in boxes(image, *table)}
    if (
        b"stsd" not in parts
        or b"stsz" not in parts
        or image[parts[b"stsd"] + 12 : parts[b"stsd"] + 16] != b"av01"
    ):
        return None
    every, count, first = struct.unpack_from(">LLL", image, parts[b"stsz"] + 4)
    if b"stco" in parts:
        (begin,) = struct.unpack_from(">8xL", image, parts[b"stco"])
    elif b"co64" in parts:
        (begin,) = struct.unpack_from(">8xQ", image, parts[b"co64"])
    else:
        return None
    return (begin, begin + (every or first)) if count else None
