"""AVIF: size and orientation as Pillow sees them, and frames that are larger than their box says."""

import io
import struct
from typing import Any

import pytest
from PIL import Image

from encoder_contract.errors import InvalidImageError
from encoder_contract.header import read_header
from encoder_service.image.decoder import Decoder
from testing.decoding import decode_files, pillow_decoder
from testing.photos import encoded, pixels
from tests.encoder_service.image.test_decoder import difference

PICTURE = Image.fromarray(pixels(97, 41, 1))
XMP = b'<x tiff:Orientation="6"/>'


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return pillow_decoder()


def saved(picture: Image.Image = PICTURE, orientation: int = 1, **options: Any) -> bytes:
    return encoded(picture, "AVIF", orientation, speed=10, **options)


def replaced(image: bytes, kind: bytes, offset: int, content: bytes) -> bytes:
    at = image.index(kind) + 4 + offset
    return image[:at] + content + image[at + len(content) :]


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_rotation_and_mirror_count_as_pillow_counts_them(decoder, turns, axis):
    image = replaced(saved(orientation=6 if axis is None else 5), b"irot", 0, bytes([turns]))
    if axis is not None:
        image = replaced(image, b"imir", 0, bytes([axis]))
    with Image.open(io.BytesIO(image)) as opened:
        assert read_header(image).orientation == opened.getexif().get(0x112, 1)
    assert difference(decode_files(decoder, [image])[0], image) == 0


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("xmp", [None, XMP])
def test_exif_and_xmp_count_as_pillow_counts_them(orientation, xmp):
    image = saved(orientation=orientation, **({"xmp": xmp} if xmp else {}))
    for each in (image, replaced(image, b"irot", 0, b"\0") if orientation == 6 else image):
        with Image.open(io.BytesIO(each)) as opened:
            assert read_header(each).orientation == opened.getexif().get(0x112, 1)


def test_exif_that_contradicts_the_rotation_does_not_count(decoder):
    exif = Image.Exif()
    exif[0x10F] = 6  # a tag of no meaning here, to be made one of orientation
    image = saved(exif=exif.tobytes()).replace(b"\x01\x0f", b"\x01\x12").replace(b"\x0f\x01", b"\x12\x01")
    with Image.open(io.BytesIO(image)) as opened:
        assert read_header(image).orientation == opened.getexif().get(0x112, 1) == 1
    assert difference(decode_files(decoder, [image])[0], image) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:4:4"},
        {"quality": 100},
        {"tile_rows": 1, "tile_cols": 1, "autotiling": False},
        {"range": "limited"},
    ],
)
def test_every_kind_is_what_transformers_sees(decoder, options):
    image = saved(**options)
    assert difference(decode_files(decoder, [image])[0], image) == 0


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_the_first_frame_of_an_animation_counts(decoder, mode):
    frames = [PICTURE.convert(mode), PICTURE.rotate(180).convert(mode)]
    image = saved(frames[0], save_all=True, append_images=frames[1:])
    assert image[8:12] == b"avis"
    assert read_header(image).upright == (97, 41)
    assert difference(decode_files(decoder, [image])[0], image) == 0
    matrix = struct.unpack_from(">L", image, image.index(b"tkhd") - 4)[0] - 8 - 44
    with pytest.raises(InvalidImageError, match="an animation that is turned"):
        read_header(replaced(image, b"tkhd", matrix, struct.pack(">5l", 0, 65536, 0, -65536, 0)))


def test_a_frame_larger_than_its_box_says_is_refused_by_the_header():
    image = saved()
    with pytest.raises(InvalidImageError, match="a frame of 97x41 in an image of 10x10"):
        read_header(replaced(image, b"ispe", 4, struct.pack(">LL", 10, 10)))


def test_a_frame_larger_than_its_track_says_is_refused_by_the_header():
    image = saved(save_all=True, append_images=[PICTURE])
    size = struct.unpack_from(">L", image, image.index(b"tkhd") - 4)[0] - 8 - 8
    with pytest.raises(InvalidImageError, match="a frame of 97x41 in an image of 8x8"):
        read_header(replaced(image, b"tkhd", size, struct.pack(">LL", 8 << 16, 8 << 16)))


def test_a_size_in_a_box_larger_than_its_frame_is_what_pillow_makes_of_it(decoder):
    image = replaced(saved(), b"ispe", 4, struct.pack(">LL", 194, 82))
    assert difference(decode_files(decoder, [image])[0], image) == 0


def test_a_heic_is_told_by_name():
    image = saved().replace(b"avif", b"heic")
    with pytest.raises(InvalidImageError, match="looks like HEIC"):
        read_header(image)
    with pytest.raises(InvalidImageError, match="not an image of a supported format"):
        read_header(image.replace(b"ftypheic", b"ftypmif1"))
