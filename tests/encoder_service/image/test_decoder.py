"""Decoding: the pixels that Pillow and the Hugging Face processors see; bad images fail alone."""

import gc
import io
import struct
import sys
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from encoder_contract.errors import EncoderError, ImageLimitError, InvalidImageError
from encoder_service.config import ConfigError
from encoder_service.devices.model import _jpegs, load_model
from encoder_service.image.dali import DaliJpegs, no_hardware_jpeg
from encoder_service.image.decoder import PillowDecoder
from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.device_decoder import Decoder
from testing.decoding import decode_files
from testing.photos import damaged, encoded, photo

pytestmark = pytest.mark.slow

MODES = [
    ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"),
    ("PNG", "LA"), ("PNG", "P"), ("PNG", "1"), ("PNG", "I;16"), ("WEBP", "RGB"), ("WEBP", "RGBA"),
    ("GIF", "P"), ("BMP", "RGB"), ("BMP", "P"),
    ("TIFF", "RGB"), ("TIFF", "RGBA"), ("TIFF", "L"), ("TIFF", "LA"), ("TIFF", "P"), ("TIFF", "1"), ("TIFF", "I;16"),
    ("TIFF", "I"), ("TIFF", "F"), ("TIFF", "CMYK"), ("TIFF", "YCbCr"),
    ("AVIF", "RGB"), ("AVIF", "RGBA"), ("AVIF", "L"), ("AVIF", "LA"),
    ("JPEG2000", "RGB"), ("JPEG2000", "RGBA"), ("JPEG2000", "L"), ("JPEG2000", "LA"), ("JPEG2000", "CMYK"),
    ("JPEG2000", "I;16"),
]  # fmt: skip


CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[pytest.param("dali", marks=pytest.mark.dali), "pillow", "isolated"])
def decoder(request):
    files = DecoderPool(2) if request.param == "isolated" else PillowDecoder()
    decoder = Decoder(CPU, files, DaliJpegs(CPU, 2) if request.param == "dali" else None)
    decoder.start()
    yield decoder
    decoder.close()


def expected(image: bytes) -> torch.Tensor:
    """Return the pixels that `transformers` gets from a file that vLLM has opened and turned upright."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(image)))
    if picture.mode == "RGB":  # vLLM keeps its colours; so did transformers before it had `return_numpy`
        picture.info.pop("transparency", None)
    return torch.from_numpy(convert_to_rgb(picture, return_numpy=True).copy())


def difference(pixels: torch.Tensor | EncoderError, image: bytes) -> int:
    assert not isinstance(pixels, EncoderError), pixels
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    reference = expected(image)
    assert pixels.shape == reference.shape
    return int((pixels.cpu().int() - reference.int()).abs().max())


def test_the_decoders_name_lists_its_libraries(decoder):
    assert ("DALI" in decoder.name) == (decoder._jpegs is not None)
    assert "Pillow" in decoder.name
    assert ("in separate processes" in decoder.name) == isinstance(decoder.files, DecoderPool)


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_every_format_and_mode_becomes_the_pixels_transformers_sees(decoder, kind, mode):
    images = [photo(*size, 1, kind, mode=mode) for size in ((97, 41), (1, 1), (640, 33))]
    for image, pixels in zip(images, decode_files(decoder, images), strict=True):
        assert difference(pixels, image) <= (2 if kind == "JPEG" else 0)


@pytest.mark.parametrize(
    "options",
    [
        {"quality": 97, "subsampling": 0},
        {"quality": 60, "subsampling": 1},
        {"quality": 60, "subsampling": 2},
        {"quality": 20, "progressive": True},
        {"quality": 85, "restart_marker_blocks": 3},
        {"quality": 85, "keep_rgb": True},
    ],
)
def test_every_kind_of_jpeg_is_within_two_levels_of_pillow(decoder, options):
    images = [
        encoded(Image.open(io.BytesIO(photo(w, h, 5))), "JPEG", **options) for w, h in ((321, 243), (7, 9))
    ]
    for image, pixels in zip(images, decode_files(decoder, images), strict=True):
        assert difference(pixels, image) <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.cuda
def test_each_orientation_is_applied_once_as_exif_transpose_does(decoder, kind, orientation):
    image = photo(65, 48, 3, kind, orientation)
    (pixels,) = decode_files(decoder, [image])
    assert difference(pixels, image) <= (2 if kind == "JPEG" else 0)
    assert tuple(pixels.shape[:2]) == ((48, 65) if orientation < 5 else (65, 48))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_decoded(decoder, kind):
    frames = [Image.new("RGB", (40, 20), colour) for colour in ("red", "lime")]
    image = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    (pixels,) = decode_files(decoder, [image])
    assert pixels[10, 10].tolist() == [255, 0, 0]


def test_transparency_lies_over_white_but_an_rgb_picture_keeps_its_colours(decoder):
    clear = encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "PNG")
    palette = encoded(Image.new("P", (8, 8), 0), "PNG", transparency=0)
    grey = encoded(Image.new("L", (8, 8), 9), "PNG", transparency=9)
    keyed = encoded(Image.new("RGB", (8, 8), (9, 8, 7)), "PNG", transparency=(9, 8, 7))
    *white, kept = decode_files(decoder, [clear, palette, grey, keyed])
    assert all(pixels.unique().tolist() == [255] for pixels in white)
    assert kept.reshape(-1, 3).unique(dim=0).tolist() == [[9, 8, 7]]


def with_junk_before_the_tables(image: bytes) -> bytes:
    tables = image.index(b"\xff\xdb")
    return image[:tables] + b"junk" * 9 + image[tables:]


def with_a_broken_app14(image: bytes) -> bytes:
    return image[:2] + b"\xff\xee" + struct.pack(">H", 9) + b"Adobe\0\0" + image[2:]


@pytest.mark.parametrize("spoil", [with_junk_before_the_tables, with_a_broken_app14])
def test_a_jpeg_that_only_pillow_reads_is_decoded_in_a_batch_of_others(decoder, spoil):
    good = photo(120, 80, 1)
    images = [good, spoil(good), good]
    for pixels in decode_files(decoder, images):
        assert difference(pixels, good) <= 2


BAD = {
    "empty": b"",
    "text": b"not an image at all",
    "start only": b"\xff\xd8\xff",
    "half a jpeg": photo(120, 80, 1)[:3000],
    "jpeg without its last lines": photo(120, 80, 1)[:-60],
    "half a png": photo(120, 80, 1, "PNG")[:9000],
    "half a webp": photo(120, 80, 1, "WEBP")[:900],
    "half a gif": photo(120, 80, 1, "GIF")[:900],
    "half a bmp": photo(120, 80, 1, "BMP")[:9000],
    "png with a wrong checksum": photo(120, 80, 1, "PNG").replace(b"IDAT", b"IDAT\1", 1),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_image_fails_alone_in_its_batch(decoder, what):
    good = [photo(120, 80, 1), photo(64, 64, 2, "PNG"), photo(33, 47, 3, orientation=6)]
    alone = [decode_files(decoder, [image])[0] for image in good]
    outcomes = decode_files(decoder, [good[0], BAD[what], good[1], BAD[what], good[2]])
    assert isinstance(outcomes[1], InvalidImageError)
    assert isinstance(outcomes[3], InvalidImageError)
    for pixels, before in zip([outcomes[0], outcomes[2], outcomes[4]], alone, strict=True):
        assert torch.equal(pixels, before)


def test_the_largest_image_is_refused_by_its_header_before_memory_is_taken(decoder):
    bomb = photo(8, 8, 1).replace(struct.pack(">HH", 8, 8), struct.pack(">HH", 65500, 65500))
    before = psutil.Process().memory_info().rss
    outcomes = decode_files(decoder, [bomb, photo(20, 20, 1)])
    assert isinstance(outcomes[0], ImageLimitError)
    assert "max_image_pixels" in outcomes[0].message
    assert isinstance(outcomes[1], torch.Tensor)
    assert psutil.Process().memory_info().rss - before < 32 << 20


def test_a_frame_larger_than_its_header_says_is_refused(decoder):
    image = bytearray(photo(64, 48, 1, "BMP"))
    image[18:22] = struct.pack("<L", 6400)
    (outcome,) = decode_files(decoder, [bytes(image)])
    assert isinstance(outcome, InvalidImageError)


def test_damaged_files_end_in_pixels_or_one_error_each(decoder):
    batches = ([damaged(n * 20 + k) for k in range(20)] for n in range(20))
    outcomes = [outcome for batch in batches for outcome in decode_files(decoder, batch)]
    assert len(outcomes) == 400
    kinds = {type(outcome) for outcome in outcomes}
    assert kinds <= {torch.Tensor, InvalidImageError, ImageLimitError}
    assert 40 < sum(isinstance(outcome, torch.Tensor) for outcome in outcomes) < 360


def test_pixels_outlive_their_batch(decoder):
    first = decode_files(decoder, [photo(200, 150, n) for n in range(4)])
    copies = [pixels.clone() for pixels in first]
    kept, kept_copy = first[2], copies[2]
    del first
    gc.collect()
    for n in range(30):
        decode_files(decoder, [photo(200, 150, n + 4), BAD["half a jpeg"]])
    assert torch.equal(kept, kept_copy)


def test_memory_stays_flat_over_five_hundred_decodes(decoder):
    images = [photo(200, 150, n, orientation=n + 1) for n in range(4)] + [BAD["half a jpeg"]]
    for _ in range(40):
        decode_files(decoder, images)

    def growth() -> int:
        before = psutil.Process().memory_info().rss
        for _ in range(50):
            decode_files(decoder, images)
        return psutil.Process().memory_info().rss - before

    # A leak grows each time. Other growth in this process happens only once.
    assert min(growth() for _ in range(2)) < 4 << 20


def test_several_threads_may_decode_at_once(decoder):
    image = photo(120, 80, 1)
    (alone,) = decode_files(decoder, [image])
    outcomes: list[bool] = []

    def work():
        for _ in range(10):
            outcomes.extend(torch.equal(pixels, alone) for pixels in decode_files(decoder, [image, image]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 80


def test_requesting_dali_where_it_is_not_installed_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ValueError, match="DALI decoder is not installed"):
        DaliJpegs(CPU, 1)


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cpu", {}, r"--decoder dali decodes on a GPU: leave it out with --devices cpu"),
        ("cuda:0", {"decoder_process": "yes"}, r"in the server's process: use --decoder-process auto"),
    ],
)
def test_requesting_dali_where_it_cannot_decode_is_an_error_at_start(config, device, settings, message):
    with pytest.raises(ConfigError, match=message):
        _jpegs(replace(config, decoder="dali", **settings), device, 1)


def test_a_gpu_server_without_dali_warns(config, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert _jpegs(config, "cuda:0", 1) is None
    assert "decoded on the CPU" in caplog.text
    assert "the extra gpu" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device_is_an_error_at_start(config):
    with pytest.raises(
        ConfigError, match=r"--devices cuda:3: torch .* sees 0 CUDA devices; use --devices cpu"
    ):
        load_model(replace(config, devices="cuda:3"))


@pytest.mark.cuda
def test_missing_jpeg_engines_cause_a_warning():
    """A machine without a GPU driver lacks the library; the C library stands for one that exists."""
    assert "video" in no_hardware_jpeg((9, 0), "libnvcuvid.so.none")
    assert no_hardware_jpeg((9, 0), "libc.so.6") == ""
    assert no_hardware_jpeg((8, 9), "libnvcuvid.so.none") == "", "this GPU has no engines"


def test_no_files_give_no_pixels(decoder):
    assert decode_files(decoder, []) == []


@pytest.mark.gpu
def test_the_gpu_decodes_to_the_same_pixels_within_rounding():
    device = torch.device("cuda")
    decoder = Decoder(device, PillowDecoder(), DaliJpegs(device, 4))
    images = [
        photo(w, h, n, orientation=n + 1) for n, (w, h) in enumerate([(1280, 720), (640, 481), (33, 47)])
    ]
    images += [photo(200, 100, 4, mode="L"), photo(200, 100, 4, "PNG", mode="RGBA")]
    for image, pixels in zip(images, decode_files(decoder, images), strict=True):
        assert pixels.is_cuda
        apart = np.abs(pixels.cpu().int().numpy() - expected(image).int().numpy())
        assert (apart <= 2).mean() >= 0.999
    outcomes = decode_files(decoder, [images[0], *BAD.values(), images[1]])
    assert [isinstance(outcome, EncoderError) for outcome in outcomes] == [False, *[True] * len(BAD), False]
