"""Formats: damaged files decode as with Pillow or are refused, and an operator can accept fewer formats."""

import io
import warnings
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder_contract.errors import EncoderError, InvalidImageError, Status
from encoder_contract.header import FORMATS, RARE_FORMATS
from encoder_service.app import Server
from encoder_service.config import Config, ConfigError
from encoder_service.devices.model import Model
from encoder_service.image.device_decoder import Decoder
from prefill_client import EncoderClient
from testing.decoding import decode_files, pillow_decoder
from testing.photos import encoded, photo, pixels
from tests.encoder_service.image.test_decoder import expected
from tests.servers import server_of

PICTURE = Image.fromarray(pixels(40, 31, 1))
SOUND = [
    encoded(PICTURE, "TIFF", 6),
    encoded(PICTURE, "TIFF", 2, compression="tiff_lzw"),
    encoded(PICTURE, "TIFF", compression="jpeg", big_tiff=True),
    encoded(PICTURE.convert("P"), "TIFF", 5, compression="packbits"),
    encoded(PICTURE, "AVIF", 6, speed=10),
    encoded(PICTURE.convert("RGBA"), "AVIF", speed=10),
    encoded(PICTURE, "AVIF", speed=10, save_all=True, append_images=[PICTURE]),
    encoded(PICTURE, "JPEG2000"),
    encoded(PICTURE, "JPEG2000", no_jp2=True, tile_size=(16, 16)),
]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return pillow_decoder()


def by_transformers(image: bytes) -> torch.Tensor | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return expected(image)
    except Exception:  # noqa: BLE001 - on damaged files Pillow raises any type
        return None


CHANGES = st.lists(
    st.tuples(st.floats(0, 1), st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))),
    min_size=1,
    max_size=4,
)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SOUND), CHANGES, st.floats(0, 1), st.booleans(), st.booleans())
def test_damaged_files_decode_as_in_transformers_or_fail(decoder, sound, changes, cut, is_cut, at_start):
    image = bytearray(sound)
    reach = min(len(image), 600) if at_start else len(image)
    for where, value in changes:
        image[min(len(image) - 1, int(where * reach))] = value
    if is_cut:
        del image[int(cut * len(image)) :]
    (outcome,) = decode_files(decoder, [bytes(image)], 1_000_000)
    if isinstance(outcome, EncoderError):
        assert isinstance(outcome, InvalidImageError)
        event("refused")
        return
    event("decoded")
    reference = by_transformers(bytes(image))
    assert reference is not None
    assert torch.equal(outcome, reference)


@pytest.fixture
async def narrow(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server of JPEG and PNG only."""
    async with server_of(config, model, formats="jpeg, PNG") as server:
        yield server


async def test_an_operator_can_accept_fewer_formats(narrow: Server) -> None:
    images = [photo(64, 64, 1, kind) for kind in ("PNG", "GIF", "TIFF", "AVIF")]
    async with await EncoderClient.connect(narrow.endpoint) as client:
        good, *refused = await client.submit(images)
    assert good.error is None
    for each, message in zip(
        refused,
        (
            "GIF images are not accepted here; accepted: JPEG, PNG",
            "not an image of a supported format (JPEG, PNG)",
            "not an image of a supported format (JPEG, PNG)",
        ),
        strict=True,
    ):
        assert each.error is not None
        assert each.error.status is Status.INVALID_ARGUMENT
        assert each.error.message.endswith(message)


@pytest.mark.parametrize("formats", ["", "HEIC", "JPEG,,HEIC"])
def test_an_unknown_format_is_refused_at_start(config: Config, formats: str) -> None:
    with pytest.raises(ConfigError, match="--formats must be all, or a list of JPEG, PNG"):
        replace(config, formats=formats)


def test_all_formats_are_accepted_by_default(config: Config) -> None:
    assert config.accepted_formats == (*FORMATS, *RARE_FORMATS)
    for kind in (*FORMATS, "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "TGA", "PCX"):
        with Image.open(io.BytesIO(photo(8, 8, 1, kind))) as opened:
            assert opened.format == kind
