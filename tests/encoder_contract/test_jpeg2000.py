"""JPEG 2000: files and bare codestreams as Pillow sees them, and those cut into pieces that cost more than pixels."""

import io
import struct
from typing import Any

import pytest
from PIL import Image

from encoder_contract.errors import InvalidImageError
from encoder_contract.header import read_header
from encoder_service.image.decoder import Decoder
from testing.decoding import decode_files, pillow_decoder
from testing.photos import encoded, pixels, with_a_style_of_its_tile
from tests.encoder_service.image.test_decoder import difference

PICTURE = Image.fromarray(pixels(97, 41, 1))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return pillow_decoder()


def saved(**options: Any) -> bytes:
    return encoded(PICTURE, "JPEG2000", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_jp2": True},
        {"tile_size": (32, 32)},
        {"offset": (5, 7), "tile_offset": (2, 2), "tile_size": (32, 32)},
        {"codeblock_size": (32, 32), "precinct_size": (64, 64), "num_resolutions": 3},
        {"irreversible": True, "quality_mode": "rates", "quality_layers": [40, 20, 5]},
        {"progression": "RPCL", "plt": True, "comment": "a comment"},
    ],
)
def test_every_kind_is_what_transformers_sees(decoder, options):
    image = saved(**options)
    with Image.open(io.BytesIO(image)) as opened:
        assert read_header(image).upright == opened.size
    assert difference(decode_files(decoder, [image])[0], image) == 0


def changed(image: bytes, marker: bytes, offset: int, content: bytes) -> bytes:
    at = image.index(marker) + offset
    return image[:at] + content + image[at + len(content) :]


def test_a_tile_with_a_coding_style_of_its_own_is_read(decoder):
    image = with_a_style_of_its_tile(BARE, codeblock_size=(32, 32))
    assert read_header(image).upright == PICTURE.size
    assert difference(decode_files(decoder, [image])[0], image) == 0


BARE = saved(no_jp2=True)
REFUSED = {
    "small code blocks": (saved(codeblock_size=(4, 4)), "code blocks of 4x4"),
    "small precincts": (
        changed(
            saved(no_jp2=True, precinct_size=(128, 128), num_resolutions=2), b"\xff\x52", 14, b"\x11\x11"
        ),
        "precincts",
    ),
    "small code blocks in a tile": (
        with_a_style_of_its_tile(BARE, codeblock_size=(4, 4)),
        "code blocks of 4x4",
    ),
    "another size in the box": (changed(saved(), b"ihdr", 4, struct.pack(">LL", 4, 9)), "differ in size"),
    "another size in the stream": (
        changed(saved(), b"\xff\x51", 6, struct.pack(">L", 9000)),
        "differ in size",
    ),
    "no stream": (saved()[: saved().index(b"jp2c") - 4], "no header before a codestream"),
    "five channels": (changed(BARE, b"\xff\x51", 38, b"\0\5"), "5 channels"),
    "no pixels": (changed(BARE, b"\xff\x51", 6, bytes(8)), "0x0 pixels"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_cost_more_than_its_pixels_is_refused_by_the_header(what):
    image, message = REFUSED[what]
    with pytest.raises(InvalidImageError, match=message):
        read_header(image)
