"""TIFF: pages as Pillow and `transformers` see them, and files that would cost more than their pixels."""

import io
import struct
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps

from encoder_contract.errors import InvalidImageError
from encoder_contract.header import Header, read_header
from encoder_service.image.decoder import Decoder
from testing.decoding import decode_files, pillow_decoder
from testing.photos import encoded, photo, pixels
from tests.encoder_service.image.test_decoder import difference

COMPRESSIONS = ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "lzma", "zstd", "jpeg", "group4"]
MODES = ["1", "L", "LA", "P", "PA", "I", "I;16", "I;16B", "F", "RGB", "RGBX", "RGBA", "CMYK", "YCbCr", "LAB"]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return pillow_decoder()


def picture(mode: str, width: int = 97, height: int = 41) -> Image.Image:
    rgb = Image.fromarray(pixels(width, height, 1))
    if mode.startswith("I;16"):
        deep = np.asarray(rgb.convert("L")).astype(np.uint16) * 257
        return Image.fromarray(deep.astype(">u2" if mode == "I;16B" else "<u2"))
    if mode == "LAB":
        profiles = [ImageCms.createProfile(name) for name in ("sRGB", "LAB")]
        return (
            ImageCms.applyTransform(rgb, ImageCms.buildTransform(profiles[0], profiles[1], "RGB", "LAB"))
            or rgb
        )
    return rgb.convert("P").convert("PA") if mode == "PA" else rgb.convert(mode)


def saved(mode: str, **options: Any) -> bytes:
    try:
        return encoded(picture(mode), "TIFF", **options)
    except OSError:
        pytest.skip("libtiff does not write this")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_mode_and_compression_is_what_transformers_sees(decoder, mode, compression):
    for orientation in (1, 6):
        image = saved(mode, compression=compression, orientation=orientation)
        assert read_header(image).orientation == orientation
        assert difference(decode_files(decoder, [image])[0], image) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
@pytest.mark.parametrize("big", [False, True])
def test_a_page_is_turned_once(decoder, orientation, compression, big):
    image = saved("RGB", compression=compression, orientation=orientation, big_tiff=big)
    header = read_header(image)
    assert (header.width, header.height, header.orientation) == (97, 41, orientation)
    assert difference(decode_files(decoder, [image])[0], image) == 0


def tiff(tags: dict[int, tuple[int, ...]], data: bytes = b"", order: str = "<") -> bytes:
    """Return a TIFF of one directory behind `data`, which begins at byte 8; values are of type LONG."""
    head = (b"II\x2a\0" if order == "<" else b"MM\0\x2a") + struct.pack(order + "L", 8 + len(data))
    directory, outside = b"", b""
    begin = 8 + len(data) + 2 + 12 * len(tags) + 4
    for number, values in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}L", *values)
        if len(packed) > 4:
            packed, outside = struct.pack(order + "L", begin + len(outside)), outside + packed
        directory += struct.pack(order + "HHL", number, 4, len(values)) + packed
    return head + data + struct.pack(order + "H", len(tags)) + directory + bytes(4) + outside


GREY = {256: (64,), 257: (48,), 258: (8,), 259: (1,), 262: (1,), 277: (1,)}
TILED = {**GREY, 322: (32,), 323: (32,), 324: (8, 1032, 2056, 3080), 325: (1024,) * 4}


@pytest.mark.parametrize("order", "<>")
def test_tiles_are_put_together(decoder, order):
    tiles = np.random.default_rng(1).integers(0, 255, (4, 32, 32), np.uint8)
    image = tiff(TILED, tiles.tobytes(), order)
    (decoded,) = decode_files(decoder, [image])
    assert difference(decoded, image) == 0
    assert decoded[:32, 32:, 0].numpy().tobytes() == tiles[1].tobytes()


def test_the_first_page_counts(decoder):
    pages = [Image.new("RGB", size, colour) for size, colour in (((40, 20), "red"), ((90, 80), "lime"))]
    image = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert read_header(image).upright == (40, 20)
    assert decode_files(decoder, [image])[0][10, 10].tolist() == [255, 0, 0]


def test_xmp_turns_a_page_whose_tags_do_not(decoder):
    image = encoded(picture("RGB"), "TIFF", tiffinfo={700: b'<x tiff:Orientation="6"/>'})
    assert read_header(image).orientation == 6
    assert difference(decode_files(decoder, [image])[0], image) == 0


STRIPS = {**GREY, 273: (8,), 278: (48,), 279: (64 * 48,)}
TOO_MUCH = {
    "no size": ({256: (64,)}, "no size"),
    "no pixels": ({**STRIPS, 257: (0,)}, "no size"),
    "samples": ({**STRIPS, 277: (2**31,)}, "samples a pixel"),
    "strips": ({**STRIPS, 273: (8,) * 70_000}, "strips or tiles"),
    "a tile of a gigapixel": ({**TILED, 322: (32768,), 323: (32768,)}, "more than the image"),
    "tiles without a size": ({**TILED, 322: (0,)}, "no size"),
    "tags": ({**STRIPS, **dict.fromkeys(range(1000, 2000), (1,))}, "a directory of 10"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_pieces_that_cost_more_than_their_pixels_are_refused_by_the_header(what):
    tags, message = TOO_MUCH[what]
    with pytest.raises(InvalidImageError, match=message):
        read_header(tiff(tags, bytes(64 * 48)))


def test_a_jpeg_of_many_scans_in_a_strip_is_refused_however_many_strips_share_it():
    sound = encoded(Image.new("L", (64, 48)), "JPEG")
    progressive = encoded(Image.new("RGB", (64, 48), "teal"), "JPEG", progressive=True)
    jpeg = {**STRIPS, 259: (7,)}
    assert read_header(tiff({**jpeg, 279: (len(sound),)}, sound)) == Header("TIFF", 64, 48, 1, 1)
    with pytest.raises(InvalidImageError, match="more than 4 scans"):
        read_header(tiff({**jpeg, 279: (len(progressive),)}, progressive))
    with pytest.raises(InvalidImageError, match="longer than the file"):
        read_header(tiff({**jpeg, 273: (8,) * 40, 279: (len(sound),) * 40}, sound))


def test_no_memory_is_taken_for_what_a_tag_promises(decoder):
    image = tiff({**STRIPS, 256: (30_000,), 257: (30_000,), 278: (30_000,)})
    assert read_header(image).pixels == 900_000_000
    outcome = decode_files(decoder, [image])[0]
    assert not isinstance(outcome, torch.Tensor)
    assert "max_image_pixels" in outcome.message


def test_another_directory_of_a_page_is_not_read(decoder):
    """A lone page's EXIF directory, which Pillow would read: here it has 65535 tags, and the file ends in it."""
    image = tiff({**STRIPS, 34665: (8,)}, b"\xff\xff" + bytes(64 * 48))
    assert difference(decode_files(decoder, [image])[0], image) == 0


def test_pillow_is_asked_for_a_size_that_its_own_turning_has_changed():
    image = photo(50, 30, 1, "TIFF", 6)
    with Image.open(io.BytesIO(image)) as opened:
        assert read_header(image).upright == ImageOps.exif_transpose(opened).size == (30, 50)
