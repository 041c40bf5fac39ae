"""Seeded images: photo-like files of any size, format, orientation and mode, and damaged ones."""

import base64
import io
import random
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ORIENTATION_TAG = 0x0112

# What a phone writes: a 720p JPEG comes out at 0.2 to 0.4 MB.
_SAVE: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 88},
    "WEBP": {"quality": 80, "method": 0},
    "AVIF": {"speed": 10},
}


def pixels(width: int, height: int, seed: int) -> NDArray[np.uint8]:
    """Return uint8 [height, width, 3] with a photo's statistics: smooth shapes, texture, sensor noise."""
    random_numbers = np.random.default_rng([seed, width, height])
    luminance = np.full((height, width), 128, np.float32)
    for cells, contrast in ((3, 45.0), (17, 22.0), (90, 9.0)):
        luminance += contrast * _clouds(random_numbers, cells, width, height)
    colour = [_clouds(random_numbers, 5, width, height) for _ in range(2)]
    channels = (luminance + 30 * colour[0], luminance, luminance + 30 * colour[1])
    noise = random_numbers.standard_normal((height, width), np.float32) * 6
    return np.stack([np.clip(channel + noise, 0, 255) for channel in channels], axis=-1).astype(np.uint8)


def _clouds(random_numbers: np.random.Generator, cells: int, width: int, height: int) -> NDArray[np.float32]:
    """Return unit-variance random values on `cells` × `cells`, interpolated to the size."""
    coarse = Image.fromarray(random_numbers.standard_normal((cells, cells), np.float32))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BILINEAR))


def photo(
    width: int,
    height: int,
    seed: int,
    format: str = "JPEG",  # noqa: A002 - Pillow's word for it
    orientation: int = 1,
    mode: str = "RGB",
) -> bytes:
    """Return an image file of `width` × `height` stored pixels: the same bytes for the same arguments.

    `orientation`, 1 to 8, is written as EXIF (in all formats but GIF, BMP and JPEG2000). `mode` is a Pillow mode that
    the format can hold: RGB, L, CMYK, RGBA, LA, P, 1, or I;16 for 16-bit grey.
    """
    picture = Image.fromarray(pixels(width, height, seed))
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    elif mode in ("RGBA", "LA"):
        picture = picture.convert(mode)
        picture.putalpha(Image.linear_gradient("L").resize((width, height)))
    elif mode != "RGB":
        picture = picture.convert(mode)
    return encoded(picture, format, orientation)


def encoded(
    picture: Image.Image,
    format: str,  # noqa: A002 - Pillow's word for it
    orientation: int = 1,
    **options: Any,
) -> bytes:
    """Return `picture` as a file of this format, with EXIF when the orientation is not 1."""
    arguments = {**_SAVE.get(format, {}), **options}
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = orientation
        arguments["exif"] = exif
    file = io.BytesIO()
    picture.save(file, format, **arguments)
    return file.getvalue()


def with_comment(jpeg: bytes, number: int) -> bytes:
    """Return a JPEG of the same pixels with another digest: with a comment behind its first segment."""
    behind = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:behind] + b"\xff\xfe\x00\x0a" + number.to_bytes(8, "big") + jpeg[behind:]


def with_tile_style(image: bytes, **options: Any) -> bytes:
    """Return a JPEG 2000 codestream of one tile with coding options that differ from those of the main header."""
    with Image.open(io.BytesIO(image)) as opened:
        other = encoded(opened, "JPEG2000", no_jp2=True, **options)
    begin = other.index(b"\xff\x52")
    style = other[begin : begin + 2 + int.from_bytes(other[begin + 2 : begin + 4])]
    tile, data = other.index(b"\xff\x90"), other.index(b"\xff\x93")
    tile_header = other[tile : tile + 6] + bytes(4) + other[tile + 10 : data]  # a length of 0
    return image[: image.index(b"\xff\x90")] + tile_header + style + other[data:]


_KINDS = (
    ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"),
    ("PNG", "I;16"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P"), ("BMP", "RGB"), ("BMP", "P"),
    ("TIFF", "RGB"), ("TIFF", "P"), ("TIFF", "I;16"), ("AVIF", "RGB"), ("AVIF", "RGBA"), ("JPEG2000", "RGB"),
    ("PPM", "RGB"), ("ICO", "RGBA"), ("TGA", "RGB"), ("PCX", "RGB"),
)  # fmt: skip


@lru_cache(maxsize=64)
def _sound(kind: int, size: int, orientation: int) -> bytes:
    file_format, mode = _KINDS[kind]
    return photo(40 + 37 * size, 50 + 21 * size, kind, file_format, orientation, mode)


def damaged(seed: int) -> bytes:
    """Return a small image file of one of the formats with a few seeded faults.

    Files are cut or spliced, bytes are changed, and spans are removed, doubled, zeroed or filled with noise. Most
    faults are in the first bytes, where the structure is. Some files stay readable.
    """
    draw = random.Random(seed)
    image = bytearray(_sound(seed % len(_KINDS), draw.randrange(3), draw.choice((1, 6))))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        fault = draw.choice((_cut, _change, _change, _lose, _double, _zero, _noise, _splice))
        fault(draw, image)
    return bytes(image)


def _span(draw: random.Random, image: bytearray) -> slice:
    """Return a random span, usually short and near the start."""
    reach = draw.choice((40, 700, len(image)))
    start = draw.randrange(max(1, min(reach, len(image))))
    return slice(start, start + draw.choice((1, 2, 4, 60, 1000)))


def _cut(draw: random.Random, image: bytearray) -> None:
    del image[draw.randrange(len(image) + 1) :]


def _change(draw: random.Random, image: bytearray) -> None:
    for _ in range(draw.choice((1, 3, 30))):
        if image:
            image[_span(draw, image).start] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))


def _lose(draw: random.Random, image: bytearray) -> None:
    del image[_span(draw, image)]


def _double(draw: random.Random, image: bytearray) -> None:
    span = _span(draw, image)
    image[span.start : span.start] = image[span]


def _zero(draw: random.Random, image: bytearray) -> None:
    span = _span(draw, image)
    image[span] = bytes(len(image[span]))


def _noise(draw: random.Random, image: bytearray) -> None:
    span = _span(draw, image)
    image[span] = draw.randbytes(len(image[span]))


def _splice(draw: random.Random, image: bytearray) -> None:
    other = _sound(draw.randrange(len(_KINDS)), draw.randrange(3), 1)
    where = draw.randrange(len(image) + 1)
    image[where:] = other[draw.randrange(len(other)) :]


def data_url(image: bytes) -> str:
    """Return a JPEG as a data URL."""
    return "data:image/jpeg;base64," + base64.b64encode(image).decode()
