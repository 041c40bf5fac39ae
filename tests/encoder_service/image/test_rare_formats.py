"""Rare formats: decoder processes read their headers, within bounds, and decode them as stock vLLM does."""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_contract.errors import ImageLimitError, InvalidImageError, UndecodableImageError
from encoder_contract.header import RARE_FORMATS, Header, check_limits, format_of
from encoder_service.app import Server
from encoder_service.image import decoder_child
from encoder_service.image.decoder import PillowDecoder
from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.source import Source
from prefill_client import EncoderClient, RowRequest, read_images
from testing.hostile_images import png_chunk
from testing.photos import encoded, photo, pixels
from tests.encoder_service.image.test_decoder import expected

PICTURE = Image.fromarray(pixels(97, 41, 1))
XMP = b'<x tiff:Orientation="6"/>'


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool(1)
    pool.start()
    yield pool
    pool.close()


def check(pool: DecoderPool, image: bytes, kind: str) -> np.ndarray:
    """Check that a file has the size and the pixels that `transformers` sees; return the pixels."""
    header = pool.read_header(image, RARE_FORMATS)
    assert isinstance(header, Header), header
    assert header.format == kind
    found = pool.decode(Source(b"", image, header))
    assert isinstance(found, np.ndarray), found
    outside = expected(image)
    assert header.upright == (outside.shape[1], outside.shape[0])
    assert torch.equal(torch.from_numpy(found), outside)
    return found


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PPM", "RGB"), ("PPM", "L"), ("ICO", "RGBA"), ("TGA", "RGB"), ("TGA", "RGBA"), ("PCX", "RGB")],
)
def test_every_format_of_stock_vllm_is_accepted(pool: DecoderPool, kind: str, mode: str) -> None:
    check(pool, encoded(PICTURE.convert(mode), kind), kind)


def test_a_format_whose_pillow_name_is_not_in_capitals_is_accepted(pool: DecoderPool) -> None:
    thumbnail = b"P7 332\n#END_OF_COMMENTS\n4 3 255\n" + bytes(range(12))
    header = pool.read_header(thumbnail, RARE_FORMATS)
    assert isinstance(header, Header), header
    assert (header.format, header.upright) == ("XVTHUMB", (4, 3))
    assert isinstance(pool.decode(Source(b"", thumbnail, header)), np.ndarray)


def test_a_large_file_that_pillow_decodes_in_python_is_refused(pool: DecoderPool) -> None:
    small = encoded(PICTURE, "QOI")
    check(pool, small, "QOI")
    side = 1024
    colours = bytes((254, 1, 2, 3)) * side**2  # each pixel has its own four bytes
    large = b"qoif" + struct.pack(">IIBB", side, side, 3, 0) + colours + bytes(7) + b"\1"
    refused = pool.read_header(large, RARE_FORMATS)
    assert isinstance(refused, InvalidImageError)
    assert "decodes this kind in Python" in str(refused)


def test_an_orientation_that_is_no_number_is_upright(pool: DecoderPool) -> None:
    out = io.BytesIO()
    PICTURE.save(out, "TIFF", tiffinfo={274: 6})
    damaged = out.getvalue().replace(struct.pack("<HHI", 274, 3, 1), struct.pack("<HHI", 274, 2, 1))
    header = pool.read_header(damaged, RARE_FORMATS)
    assert isinstance(header, Header), header
    assert header.upright == PICTURE.size


def test_a_tiff_in_cie_lab_is_accepted(pool: DecoderPool) -> None:
    lab = np.random.default_rng(1).integers(0, 255, (20, 30, 3), np.uint8)
    check(pool, encoded(Image.frombytes("LAB", (30, 20), lab.tobytes()), "TIFF"), "TIFF")


def psd(planes: list[np.ndarray], colours: int, depth: int = 8, version: int = 1) -> bytes:
    """Return a Photoshop file of these planes, one for each channel."""
    height, width = planes[0].shape
    head = b"8BPS" + struct.pack(">H6xHLLHH", version, len(planes), height, width, depth, colours)
    return head + bytes(14) + b"".join(plane.tobytes() for plane in planes)


@pytest.mark.parametrize("channels", [3, 4])
def test_a_psd_in_cie_lab_has_its_colours(pool: DecoderPool, channels: int) -> None:
    lightness = np.add.outer(np.arange(20) * 5, np.arange(30)).astype(np.uint8)
    image = psd([lightness, *(np.full_like(lightness, value) for value in (150, 90, 255)[: channels - 1])], 9)
    header = pool.read_header(image, RARE_FORMATS)
    assert isinstance(header, Header), header
    found = pool.decode(Source(b"", image, header))
    with Image.open(io.BytesIO(image)) as opened:
        assert opened.mode == "LAB"
        assert np.array_equal(found, np.asarray(opened.convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("options", [{}, {"compression": "tiff_lzw"}, {"big_tiff": True}])
def test_the_orientation_of_a_page_is_applied_once(
    pool: DecoderPool, orientation: int, options: dict[str, Any]
) -> None:
    found = check(pool, encoded(PICTURE, "TIFF", orientation, **options), "TIFF")
    assert found.shape[:2] == ((41, 97) if orientation < 5 else (97, 41))


def test_the_orientation_in_xmp_applies_if_tags_have_none(pool: DecoderPool) -> None:
    found = check(pool, encoded(PICTURE, "TIFF", tiffinfo={700: XMP}), "TIFF")
    assert found.shape[:2] == (97, 41)


def test_the_first_page_of_a_tiff_is_decoded(pool: DecoderPool) -> None:
    pages = [Image.new("RGB", size, colour) for size, colour in (((40, 20), "red"), ((90, 80), "lime"))]
    found = check(pool, encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:]), "TIFF")
    assert found[10, 10].tolist() == [255, 0, 0]


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
STRIPS = {**GREY, 273: (8,), 278: (48,), 279: (64 * 48,)}


@pytest.mark.parametrize("order", "<>")
def test_tiles_are_assembled(pool: DecoderPool, order: str) -> None:
    tiles = np.random.default_rng(1).integers(0, 255, (4, 32, 32), np.uint8)
    found = check(pool, tiff(TILED, tiles.tobytes(), order), "TIFF")
    assert found[:32, 32:, 0].tobytes() == tiles[1].tobytes()


GREYS = np.full((8, 8), 128, np.uint8)
# Sound files of kinds that Pillow does not read, by the beginning of their error.
UNREAD = {
    "TIFF": tiff({**GREY, 256: (8,), 257: (8,), 258: (14,), 273: (8,), 278: (8,), 279: (112,)}, bytes(112)),
    "PSD": psd([GREYS.astype(">u2")] * 3, 3, depth=16),
    "large PSD": psd([GREYS] * 3, 3, version=2),
    "DDS": b"DDS " + struct.pack("<7L", 124, 0x1007, 8, 8, 0, 0, 0) + bytes(44) + struct.pack("<L", 32) + bytes(48),
}  # fmt: skip
NETPBM = {
    "PAM": b"P7\nWIDTH 2\nHEIGHT 2\nDEPTH 3\nMAXVAL 255\nTUPLTYPE RGB\nENDHDR\n" + bytes(12),
    "colour PFM": b"PF\n1 1\n-1.0\n" + bytes(12),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_kind_that_pillow_does_not_read_is_not_called_another_format(pool: DecoderPool, kind: str) -> None:
    refused = pool.read_header(UNREAD[kind], RARE_FORMATS)
    assert isinstance(refused, InvalidImageError)
    assert refused.message.startswith(f"unsupported, damaged or truncated {kind[-4:].strip()}: ")


@pytest.mark.parametrize("kind", NETPBM)
def test_formats_of_netpbm_that_pillow_lacks_are_named(kind: str) -> None:
    with pytest.raises(InvalidImageError, match=rf"this looks like a .*{kind}.*convert it to PNG"):
        format_of(NETPBM[kind])


def replaced(image: bytes, kind: bytes, offset: int, content: bytes) -> bytes:
    at = image.index(kind) + 4 + offset
    return image[:at] + content + image[at + len(content) :]


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_rotation_and_mirror_of_an_avif_are_applied(pool: DecoderPool, turns: int, axis: int | None) -> None:
    image = encoded(PICTURE, "AVIF", 6 if axis is None else 5, speed=10)
    image = replaced(image, b"irot", 0, bytes([turns]))
    if axis is not None:
        image = replaced(image, b"imir", 0, bytes([axis]))
    check(pool, image, "AVIF")


def test_a_huge_size_in_a_header_is_refused_before_memory_is_taken(pool: DecoderPool) -> None:
    image = tiff({**STRIPS, 256: (30_000,), 257: (30_000,), 278: (30_000,)})
    header = pool.read_header(image, RARE_FORMATS)
    assert isinstance(header, Header)
    with pytest.raises(ImageLimitError, match="max_image_pixels 100000000"):
        check_limits(header, len(image), max_image_bytes=1 << 25, max_image_pixels=100_000_000)


SIDE = 1 << 31
# Headers with a side that no limit allows, and a size that is no number of pixels.
SIDES = {
    "PPM": b"P6\n10 %d\n255\n" % SIDE,
    "PFM": b"Pf\n%d 1\n1.0\n" % SIDE,
    "QOI": b"qoif" + struct.pack(">LLBB", SIDE, 1, 3, 0) + bytes(16),
    "XBM": b"#define a_width %d\n#define a_height 1\nstatic char a_bits[] = {\n0x00};\n" % SIDE,
    "XPM": b'/* XPM */\nstatic char *a[] = {\n"%d 1 1 1",\n"a c #000000",\n"a"};\n' % SIDE,
    "TIFF": tiff({**STRIPS, 257: (SIDE,), 278: (SIDE,)}),
    "PSD": b"8BPS" + struct.pack(">H6xHLLHH", 1, 3, 1, SIDE, 8, 3) + bytes(14),
    "JPEG2000": bytes.fromhex("ff4fff5100290000") + struct.pack(">8L", SIDE, 1, 0, 0, SIDE, 1, 0, 0) + b"\0\1\7\1\1",
    "DIB": struct.pack("<LllHHLLllLL", 40, SIDE - 1, 1 - SIDE, 1, 24, 0, 0, 0, 0, 0, 0),
    "FITS": b"".join(
        line.ljust(80)
        for line in (
            b"SIMPLE  =                    T",
            b"BITPIX  =                    8",
            b"NAXIS   =                    2",
            b"NAXIS1  = %20d" % 10**18,
            b"NAXIS2  =                    1",
            b"END",
        )
    ).ljust(5760, b"\0"),
}  # fmt: skip
NO_SIDES = {
    "beyond 64 bits": SIDES["XBM"].replace(b"%d" % SIDE, b"%d" % (1 << 64)),
    "with a fraction": b"Image type: Greyscale image\r\nImage size (x*y): 5.5*3\r\n\x1a" + bytes(600),
}  # fmt: skip


@pytest.mark.attack("a header of a few bytes with a side of billions of pixels, to end decoder processes")
@pytest.mark.parametrize("image", SIDES.values(), ids=SIDES)
def test_a_huge_side_is_refused_by_the_limits_and_costs_no_process(pool: DecoderPool, image: bytes) -> None:
    before = dict(pool.deaths)
    header = pool.read_header(image, RARE_FORMATS)
    assert isinstance(header, Header), header
    with pytest.raises(ImageLimitError, match="max_image_pixels"):
        check_limits(header, len(image), max_image_bytes=1 << 25, max_image_pixels=1 << 30)
    assert pool.deaths == before


@pytest.mark.parametrize("image", NO_SIDES.values(), ids=NO_SIDES)
def test_a_side_that_is_no_number_of_pixels_costs_no_process(pool: DecoderPool, image: bytes) -> None:
    before = dict(pool.deaths)
    refused = pool.read_header(image, RARE_FORMATS)
    assert isinstance(refused, InvalidImageError)
    assert refused.message.startswith("damaged")
    assert pool.deaths == before


def icon(png: bytes) -> bytes:
    """Return an ICO of one picture, which Pillow decodes to read the header."""
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHLL", 0, 0, 0, 0, 1, 32, len(png), 22) + png


HUGE_PNG = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">LLBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0))
HUGE_PNG += png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("image", "reason", "message"),
    [
        (b"P6\n#" + bytes(30_000_000), "time", "takes more than 1 s of CPU time"),
        (icon(HUGE_PNG), "memory", "takes more memory than 268 MB"),
    ],
    ids=["time", "memory"],
)
def test_a_header_that_costs_too_much_fails_alone(
    pool: DecoderPool, image: bytes, reason: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the process may wait long for a core, and each step takes more of its time.
    monkeypatch.setattr(decoder_child, "_WALL_S", 60.0)
    if reason == "memory":
        monkeypatch.setattr(decoder_child, "HEADER_CPU_S", 60.0)
    before = pool.deaths[reason]
    outcome = pool.read_header(image, RARE_FORMATS)
    assert isinstance(outcome, UndecodableImageError)
    assert message in outcome.message
    assert pool.deaths[reason] == before + 1
    check(pool, encoded(PICTURE, "TIFF"), "TIFF")


def test_memory_is_bounded_by_the_pixels_of_the_image(pool: DecoderPool) -> None:
    image = encoded(PICTURE, "PPM")
    header = pool.read_header(image, RARE_FORMATS)
    assert isinstance(header, Header)
    huge = icon(HUGE_PNG)
    outcome = pool.decode(Source(b"", huge, Header("ICO", header.width, header.height, 1, 4)))
    assert isinstance(outcome, UndecodableImageError)
    assert "decoding this ICO takes more memory than 268 MB" in outcome.message


@pytest.mark.parametrize(
    "image", [b"hello", b"\0" * 100, b"II*\0", b"RIFF\0\0\0\0WAVE", b"\xff\xd8", b"P6\n"]
)
def test_non_images_are_refused(pool: DecoderPool, image: bytes) -> None:
    outcome = pool.read_header(image, RARE_FORMATS)
    assert isinstance(outcome, InvalidImageError)
    assert not isinstance(outcome, UndecodableImageError)


def test_only_accepted_formats_are_tried(pool: DecoderPool) -> None:
    image = encoded(PICTURE, "TIFF")
    assert isinstance(pool.read_header(image, ["TIFF", "PPM"]), Header)
    outcome = pool.read_header(image, ["PPM"])
    assert isinstance(outcome, InvalidImageError)
    assert outcome.message.endswith("not an image of a supported format (JPEG, PNG, WEBP, GIF, BMP, PPM)")


def test_without_decoder_processes_rare_formats_are_refused() -> None:
    assert isinstance(PillowDecoder().read_header(encoded(PICTURE, "TIFF"), RARE_FORMATS), InvalidImageError)


def test_every_format_is_one_that_this_pillow_reads() -> None:
    Image.init()
    assert set(RARE_FORMATS) <= set(Image.ID)


async def test_the_server_confirms_the_grid_of_a_rare_image(server: Server, client: EncoderClient) -> None:
    geometry = client.description.geometry
    files = [photo(320, 256, 1, kind) for kind in ("TIFF", "PPM", "JPEG")]
    read = read_images(files, geometry)
    assert [image.grid is None for image in read] == [True, True, False]  # type: ignore[union-attr]
    submitted = await client.submit(files)
    assert [(each.error, each.grid) for each in submitted] == [(None, geometry.grid(320, 256))] * 3
    async with client.fetch([RowRequest(each.digest) for each in submitted]) as stream:
        assert [rows.error async for rows in stream] == [None] * 3
    again = await client.submit(files)
    assert all(each.cached and each.grid == geometry.grid(320, 256) for each in again)


async def test_garbage_is_refused_by_the_server(server: Server, client: EncoderClient) -> None:
    (refused,) = await client.submit([b"hello"])
    assert isinstance(refused.error, InvalidImageError)
    assert "not an image of a supported format (JPEG, PNG" in refused.error.message


def test_the_size_of_an_oriented_tiff_is_the_upright_one(pool: DecoderPool) -> None:
    image = photo(50, 30, 1, "TIFF", 6)
    with Image.open(io.BytesIO(image)) as opened:
        assert opened.size == (30, 50)
    header = pool.read_header(image, RARE_FORMATS)
    assert header == Header("TIFF", 30, 50, 1, 3)
