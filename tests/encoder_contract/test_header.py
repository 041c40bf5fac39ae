"""Headers: format, size and orientation as Pillow sees them, limits, and what damage may and may not do."""

import io
import struct
import time
import tracemalloc
import zlib
from contextlib import suppress

import pytest
from PIL import Image, ImageOps

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.header import FORMATS, Header, check_limits, format_of, read_header
from encoder_contract.orientation import orientation
from testing.hostile_images import png_chunk
from testing.photos import damaged, encoded, photo

# Pillow warns about the damaged EXIF that it is asked to compare.
pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning", "ignore:Tag data:UserWarning")

MODES = [
    ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"),
    ("PNG", "LA"), ("PNG", "P"), ("PNG", "1"), ("PNG", "I;16"), ("WEBP", "RGB"), ("WEBP", "RGBA"),
    ("GIF", "P"), ("BMP", "RGB"), ("BMP", "L"), ("BMP", "1"),
]  # fmt: skip
WITH_EXIF = ("JPEG", "PNG", "WEBP")
EXIF = {n: b"MM\0\x2a\0\0\0\x08\0\x01" + struct.pack(">HHLHH", 0x112, 3, 1, n, 0) for n in range(12)}


def by_pillow(image: bytes) -> tuple[str | None, tuple[int, int], tuple[int, int]]:
    with Image.open(io.BytesIO(image)) as picture:
        return picture.format, picture.size, ImageOps.exif_transpose(picture).size


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_every_format_and_mode_reads_as_pillow_reads_it(kind, mode):
    for size in ((97, 41), (1, 1), (300, 1)):
        image = photo(*size, 1, kind, mode=mode)
        header = read_header(image)
        assert (header.format, (header.width, header.height), header.upright) == by_pillow(image)
        assert header.orientation == 1
        assert header.pixels == size[0] * size[1]
        if kind == "JPEG":
            assert header.channels == {"L": 1, "RGB": 3, "CMYK": 4}[mode]


@pytest.mark.parametrize("kind", WITH_EXIF)
@pytest.mark.parametrize("value", range(1, 9))
def test_orientation_is_what_exif_transpose_sees(kind, value):
    image = photo(50, 30, 2, kind, orientation=value)
    header = read_header(image)
    assert header.orientation == value
    assert (header.width, header.height) == (50, 30)
    assert header.upright == by_pillow(image)[2] == ((30, 50) if value >= 5 else (50, 30))


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"quality": 30}, {"subsampling": 0}, {"comment": b"x"}]
)
def test_every_kind_of_jpeg_is_read(options):
    image = encoded(Image.open(io.BytesIO(photo(70, 50, 1))), "JPEG", 6, **options)
    assert read_header(image) == Header("JPEG", 70, 50, 6, 3)


@pytest.mark.parametrize("lossless", [True, False])
def test_every_kind_of_webp_is_read(lossless):
    picture = Image.open(io.BytesIO(photo(70, 50, 1)))
    assert read_header(encoded(picture, "WEBP", lossless=lossless)).upright == (70, 50)
    assert read_header(encoded(picture, "WEBP", 8, lossless=lossless)).upright == (50, 70)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_stands_for_its_first_frame(kind):
    frames = [Image.new("RGB", (40, 20), colour) for colour in ("red", "green")]
    image = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert read_header(image).upright == (40, 20)


def jpeg_with(*segments: bytes) -> bytes:
    plain = photo(50, 30, 2)
    return plain[:2] + b"".join(segments) + plain[2:]


def app1(payload: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload


XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta tiff:Orientation="6"/>'


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([app1(b"Exif\0\0" + EXIF[3])], 3),
        ([app1(b"Exif\0\0Exif\0\0" + EXIF[3])], 3),
        ([app1(b"Exif\0\0" + EXIF[3][:9]), app1(b"Exif\0\0" + EXIF[3][9:])], 3),
        ([app1(XMP)], 6),
        ([app1(b"Exif\0\0" + EXIF[8]), app1(XMP)], 8),
        ([app1(b"Exif\0\0" + EXIF[0])], 1),
        ([app1(b"Exif\0\0" + EXIF[9])], 1),
        ([app1(b"first"), b"junk!", app1(b"Exif\0\0" + EXIF[5])], 5),
        ([b"\xff\xff\xff", app1(b"Exif\0\0" + EXIF[5])], 5),
    ],
)
def test_unusual_exif_blocks_in_a_jpeg_are_read_as_by_pillow(segments, expected):
    image = jpeg_with(*segments)
    assert read_header(image).orientation == expected
    assert read_header(image).upright == by_pillow(image)[2]


RAW_PROFILE = b"\nexif\n      " + str(len(EXIF[6])).encode() + b"\n" + EXIF[6].hex().encode() + b"\n"


@pytest.mark.parametrize(
    "chunk",
    [
        png_chunk(b"eXIf", EXIF[6]),
        png_chunk(b"tEXt", b"Raw profile type exif\0" + RAW_PROFILE),
        png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW_PROFILE)),
        png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<tiff:Orientation>6</tiff:Orientation>"),
        png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\x01\0\0\0" + zlib.compress(b'tiff:Orientation="6"')),
    ],
)
@pytest.mark.parametrize("after_pixels", [False, True])
def test_orientation_of_a_png_before_and_after_its_pixels(chunk, after_pixels):
    plain = photo(50, 30, 2, "PNG")
    where = len(plain) - 12 if after_pixels else 33
    image = plain[:where] + chunk + plain[where:]
    assert read_header(image).upright == by_pillow(image)[2] == (30, 50)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("kind", "format_"),
    [(3, "HH"), (4, "L"), (8, "hH"), (9, "l"), (6, "bBH"), (1, "BBH"), (7, "BBH"), (2, "BBH")],
)
def test_exif_orientation_is_read_from_the_value_types_that_pillow_reads(order, kind, format_):
    value = struct.pack(order + format_, 6, *[0] * (len(format_) - 1))
    magic = b"MM\0\x2a" if order == ">" else b"II\x2a\0"
    block = magic + struct.pack(f"{order}LHHHL", 8, 1, 0x112, kind, 1) + value + bytes(4)
    exif = Image.Exif()
    exif.load(block)
    assert orientation(block) == (6 if exif[0x112] == 6 else 1)


def test_a_damaged_exif_block_leaves_the_image_as_it_is_stored():
    block = EXIF[6]
    for cut in range(len(block) - 2):
        assert orientation(block[:cut]) == 1
    assert orientation(block[:8] + b"\xff\xff" + block[10:]) == 6
    assert orientation(b"Exif\0\0" + bytes(100)) == 1


@pytest.mark.parametrize(
    "image", [b"", b"\0", b"hello", b"%PDF-1.7", b"RIFF\0\0\0\0WAVE", b"MM\0+", b"<svg/>", b"\xff\xd8"]
)
def test_non_images_are_refused_by_name(image):
    with pytest.raises(InvalidImageError, match=r"empty|not an image of a supported format \(JPEG, PNG"):
        read_header(image)


@pytest.mark.parametrize(
    ("image", "name"),
    [
        (b"%PDF-1.7", "PDF"), (b"<?xml version='1.0'?>\n<svg>", "SVG"),
        (b"\0\0\0\x1cftypmp42", "a video"), (b"\xff\x0a\xfa", "JPEG XL"),
        (b"<!DOCTYPE html><html>", "HTML"),
    ],
)  # fmt: skip
def test_other_common_formats_are_refused_by_name(image, name):
    for read in (read_header, format_of):
        with pytest.raises(InvalidImageError, match=rf"BMP\); this looks like {name}$"):
            read(image)


AVIF = [
    b"\0\0\0\x1cftyp" + brands for brands in (b"avif", b"avis", b"mif1\0\0\0\0mif1avifmiaf", b"msf1\0\0\0\0msf1avis")
]  # fmt: skip


@pytest.mark.parametrize("image", [b"II*\0", b"\0\0\1\0\1", b"8BPS\0\1", b"hello", *AVIF])
def test_a_file_that_may_have_a_rare_format_is_left_to_the_server(image):
    assert format_of(image) is None


def test_the_first_bytes_decide_the_format():
    assert [format_of(photo(8, 8, 1, kind)) for kind in FORMATS] == [*FORMATS]
    with pytest.raises(InvalidImageError, match="empty"):
        format_of(b"")


def test_formats_can_be_narrowed():
    assert read_header(photo(8, 8, 1), ("JPEG", "PNG")).format == "JPEG"
    with pytest.raises(InvalidImageError, match=r"^GIF images are not accepted here; accepted: JPEG, PNG$"):
        read_header(photo(8, 8, 1, "GIF"), ("JPEG", "PNG"))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_inside_its_header_is_refused(kind):
    image = photo(40, 30, 1, kind)
    for cut in range(10):
        with pytest.raises(InvalidImageError):
            read_header(image[:cut])


def test_a_jpeg_with_two_frame_headers_is_refused():
    image = photo(50, 30, 2)
    frame = image.index(b"\xff\xc0")
    segment = image[frame : frame + 19]
    with pytest.raises(InvalidImageError, match="two frame headers"):
        read_header(image[:frame] + segment + image[frame:])


def test_damaged_files_give_a_header_or_one_error_and_agree_with_pillow():
    agreed = 0
    for seed in range(1500):
        image = damaged(seed)
        try:
            header = read_header(image)
        except InvalidImageError as error:
            header = None
            if error.message.startswith("unsupported"):  # by a bound of ours
                continue
        theirs = decoded_by_pillow(image)
        if theirs is not None:
            assert header is not None, seed
            assert header.upright == theirs, seed
            agreed += 1
    assert agreed > 100


def decoded_by_pillow(image: bytes) -> tuple[int, int] | None:
    try:
        with Image.open(io.BytesIO(image)) as picture:
            return ImageOps.exif_transpose(picture).size if picture.format in FORMATS else None
    except Exception:  # noqa: BLE001 - Pillow lets anything out on damaged files
        return None


BOMBS = {
    "JPEG": photo(8, 8, 1).replace(struct.pack(">HH", 8, 8), struct.pack(">HH", 65500, 65500)),
    "PNG": b"\x89PNG\r\n\x1a\n"
    + png_chunk(b"IHDR", struct.pack(">LLBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)),
    "WEBP": b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0\xff\x3f\0" + bytes(8),
    "GIF": b"GIF89a\xff\xff\xff\xff\0\0\0," + struct.pack("<4HB", 0, 0, 65535, 65535, 0),
    "BMP": b"BM" + bytes(12) + struct.pack("<LlLHH", 40, 2**31 - 1, 2**31 - 1, 1, 24),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_decompression_bomb_is_refused_from_its_header(kind):
    image = BOMBS[kind]
    tracemalloc.start()
    try:
        header = read_header(image)
        with pytest.raises(ImageLimitError, match="max_image_pixels 50000000"):
            check_limits(header, len(image), max_image_bytes=10**6, max_image_pixels=50_000_000)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


PNG_START = photo(8, 8, 1, "PNG")[:33]


@pytest.mark.parametrize(
    "image",
    [
        b"\xff\xd8\xff" + b"\xff\xe1\0\x02" * 4_000_000,
        b"\xff\xd8\xff\xe0\0\x02" + b"\xff" * 16_000_000,
        b"\xff\xd8\xff\xe0\0\x02" + b"\0" * 16_000_000,
        b"\xff\xd8\xff" + app1(b"Exif\0\0" + bytes(65000)) * 240,
        PNG_START + png_chunk(b"tIME", b"") * 1_300_000,
        PNG_START + png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(10**6))) * 15000,
        PNG_START + png_chunk(b"eXIf", b"MM\0\x2a\0\0\0\x08\xff\xff" + bytes(16_000_000)),
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes([12]) + bytes(9) + b"ABCD\0\0\0\0" * 2_000_000,
        b"GIF89a\x01\0\x01\0\0\0\0!\xff" + b"\x01a" * 8_000_000,
    ],
    ids=["segments", "padding", "junk", "exif", "chunks", "text", "tags", "webp", "gif"],
)  # fmt: skip
def test_a_file_crafted_to_be_slow_is_read_quickly(image):
    best = float("inf")
    for _ in range(3):  # of the processor's time: others may use it too
        began = time.thread_time()
        with suppress(InvalidImageError):
            read_header(image)
        best = min(best, time.thread_time() - began)
    assert best < 0.5  # fifty times what the slowest of them takes


@pytest.mark.attack("a PNG whose text inflates to a thousand times its size")
def test_a_text_that_inflates_to_much_takes_little_memory():
    image = PNG_START + png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(1 << 27)))
    tracemalloc.start()
    try:
        read_header(image)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_limit_errors_name_the_limit_and_the_value():
    header = read_header(photo(40, 30, 1))
    check_limits(header, 1000, max_image_bytes=1000, max_image_pixels=1200)
    with pytest.raises(ImageLimitError, match="1001 bytes exceed max_image_bytes 1000"):
        check_limits(header, 1001, max_image_bytes=1000, max_image_pixels=1200)
    with pytest.raises(ImageLimitError, match=r"1200 pixels \(40x30\) exceed max_image_pixels 1199"):
        check_limits(header, 1000, max_image_bytes=1000, max_image_pixels=1199)


@pytest.mark.parametrize(
    "brands",
    [b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1\0\0\0\0mif1heic", b"msf1\0\0\0\0msf1hevc"],
)
def test_every_brand_of_heif_is_named_with_what_to_do(brands):
    with pytest.raises(InvalidImageError, match=r"this looks like HEIF, as .* convert it to JPEG first"):
        format_of(b"\0\0\0\x1cftyp" + brands)
