"""One file of every format, mode and compression that Pillow writes and reads, through the sandboxed decoder."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image, ImageCms

from encoder_service.image.decoder_pool import IsolatedDecoder
from testing.photos import FORMATS, encoded, pixels, with_a_style_of_its_tile
from tests.encoder_service.image.test_decoder import expected

PICTURE = Image.fromarray(pixels(24, 17, 1))
MODES = (
    "1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16",
    "I;16L", "I;16B",
)  # fmt: skip
# How the picture is converted to a mode that it cannot be converted to at once.
BY_WAY_OF = {"La": "LA", "RGBa": "RGBA", "PA": "P", "I;16L": "I;16", "I;16B": "I;16"}
COMPRESSIONS = (
    "raw", "packbits", "tiff_ccitt", "group3", "group4", "tiff_lzw", "lzma", "zstd", "webp", "jpeg", "tiff_jpeg",
    "tiff_adobe_deflate", "tiff_deflate", "tiff_sgilog", "tiff_sgilog24", "tiff_raw_16", "thunderscan",
)  # fmt: skip
PREDICTOR = 317  # a tag of TIFF
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "JPEG": [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2}, {"restart_marker_rows": 1}],
    "PNG": [{}, {"bits": 1}, {"bits": 2}, {"bits": 4}, {"transparency": 1}, {"compress_level": 0}],
    "WEBP": [{}, {"lossless": True}, {"lossless": True, "exact": True}, {"alpha_quality": 20}],
    "GIF": [{}, {"interlace": False}, {"transparency": 1}],
    "BMP": [{}],
    "TIFF": [
        *({"compression": name} for name in COMPRESSIONS),
        {"big_tiff": True},
        {"compression": "tiff_lzw", "tiffinfo": {PREDICTOR: 2}},
    ],
    "AVIF": [{}, {"subsampling": "4:4:4"}, {"subsampling": "4:0:0"}, {"quality": 100}],
    "JPEG2000": [{}, {"no_jp2": True}, {"irreversible": True}, {"tile_size": (16, 16)}, {"mct": 0}],
}
# Files of different bytes that the Pillow of this environment writes and reads, less a margin for other builds of it.
LEAST_FILES = 200


@pytest.fixture(scope="module")
def decoder() -> Iterator[IsolatedDecoder]:
    decoder = IsolatedDecoder(threads=1, backend="pillow")
    decoder.start()
    yield decoder
    decoder.close()


def in_mode(mode: str) -> Image.Image:
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        found = ImageCms.applyTransform(PICTURE, ImageCms.buildTransform(*profiles, "RGB", "LAB"))
        assert found is not None
        return found
    return PICTURE.convert(BY_WAY_OF.get(mode, mode)).convert(mode)


def files() -> Iterator[tuple[str, bytes, torch.Tensor]]:
    """Yield what each file is, the file, and the pixels that Pillow reads; none that Pillow cannot write or read."""
    for kind in FORMATS:
        for mode in MODES:
            for options in OPTIONS[kind]:
                try:
                    image = encoded(in_mode(mode), kind, **options)
                    outside = expected(image)
                except Exception:  # noqa: BLE001 - Pillow says in many ways that it does not do this
                    continue
                yield f"{kind} {mode} {options}", image, outside
    bare = encoded(PICTURE, "JPEG2000", no_jp2=True)
    for style in ({"codeblock_size": (32, 32)}, {"precinct_size": (64, 64), "num_resolutions": 3}):
        image = with_a_style_of_its_tile(bare, **style)
        yield f"JPEG2000 tile {style}", image, expected(image)


@pytest.mark.filterwarnings("ignore")
def test_every_file_that_pillow_writes_and_reads_has_its_pixels_in_the_sandbox(
    decoder: IsolatedDecoder,
) -> None:
    wrong, seen = {}, set()
    for what, image, pixels_outside in files():
        seen.add(image)
        (found,) = decoder.decode([image])
        if not isinstance(found, torch.Tensor):
            wrong[what] = found.message
        elif not torch.equal(found, pixels_outside):
            wrong[what] = "other pixels"
    assert not wrong
    assert len(seen) >= LEAST_FILES
