"""Files of every format, mode, compression and transparency that Pillow writes and reads."""

import io
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageCms

from encoder_contract.header import FORMATS, RARE_FORMATS
from testing.photos import encoded, pixels, with_tile_style

_TRANSPARENT = (9, 8, 7)
_PICTURE = Image.fromarray(pixels(24, 17, 1))
_PICTURE.paste(_TRANSPARENT, (3, 2, 15, 9))
_MODES = (
    "1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16",
    "I;16L", "I;16B",
)  # fmt: skip
# The intermediate mode, for modes to which Pillow does not convert RGB directly.
_BY_WAY_OF = {"La": "LA", "RGBa": "RGBA", "PA": "P", "I;16L": "I;16", "I;16B": "I;16"}
_COMPRESSIONS = (
    "raw", "packbits", "tiff_ccitt", "group3", "group4", "tiff_lzw", "lzma", "zstd", "webp", "jpeg", "tiff_jpeg",
    "tiff_adobe_deflate", "tiff_deflate", "tiff_sgilog", "tiff_sgilog24", "tiff_raw_16", "thunderscan",
)  # fmt: skip
_PREDICTOR = 317  # a tag of TIFF
# A grey value or palette entry, another one, an alpha value for each palette entry, and a colour.
_TRANSPARENCY = [{"transparency": value} for value in (1, 8, bytes(range(256)), _TRANSPARENT)]
_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "JPEG": [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2}, {"restart_marker_rows": 1}],
    "PNG": [{}, {"bits": 1}, {"bits": 2}, {"bits": 4}, {"compress_level": 0}, *_TRANSPARENCY],
    "WEBP": [{}, {"lossless": True}, {"lossless": True, "exact": True}, {"alpha_quality": 20}],
    "GIF": [{}, {"interlace": False}, {"transparency": 1}],
    "BMP": [{}],
    "TIFF": [
        *({"compression": name} for name in _COMPRESSIONS),
        {"big_tiff": True},
        {"compression": "tiff_lzw", "tiffinfo": {_PREDICTOR: 2}},
    ],
    "AVIF": [{}, {"subsampling": "4:4:4"}, {"subsampling": "4:0:0"}, {"quality": 100}],
    "JPEG2000": [{}, {"no_jp2": True}, {"irreversible": True}, {"tile_size": (16, 16)}, {"mct": 0}],
}


def files() -> Iterator[tuple[str, bytes]]:
    """Yield a description and the bytes of each file that Pillow can write and load."""
    for kind in (*FORMATS, *RARE_FORMATS):
        for mode in _MODES:
            for options in _OPTIONS.get(kind, [{}]):
                try:
                    image = encoded(_in_mode(mode), kind, **options)
                    _load(image)
                except Exception:  # noqa: BLE001 - Pillow raises many errors for what it does not support
                    continue
                yield f"{kind} {mode} {options}", image
    bare = encoded(_PICTURE, "JPEG2000", no_jp2=True)
    for style in ({"codeblock_size": (32, 32)}, {"precinct_size": (64, 64), "num_resolutions": 3}):
        yield f"JPEG2000 tile {style}", with_tile_style(bare, **style)


def _in_mode(mode: str) -> Image.Image:
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        found = ImageCms.applyTransform(_PICTURE, ImageCms.buildTransform(*profiles, "RGB", "LAB"))
        assert found is not None
        return found
    picture = _PICTURE
    for step in (_BY_WAY_OF.get(mode, mode), mode):
        picture = picture.convert(step)
        if "A" in picture.getbands():
            picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    return picture


def _load(image: bytes) -> None:
    with Image.open(io.BytesIO(image)) as picture:
        picture.load()
