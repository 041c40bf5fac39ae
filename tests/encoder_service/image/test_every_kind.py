"""Every file that Pillow writes and reads, through the sandboxed decoder."""

from collections.abc import Iterator

import pytest
import torch

from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.device_decoder import Decoder
from testing.decoding import decode_files
from testing.every_kind import files
from tests.encoder_service.image.test_decoder import expected

# Different files that the Pillow of this environment writes and reads, with a margin for other builds of Pillow.
LEAST_FILES = 200


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    decoder = Decoder(torch.device("cpu"), DecoderPool(1))
    decoder.start()
    yield decoder
    decoder.close()


@pytest.mark.filterwarnings("ignore")
def test_the_sandbox_decodes_every_format_that_pillow_writes(decoder: Decoder) -> None:
    wrong, seen = {}, set()
    for what, image in files():
        seen.add(image)
        (found,) = decode_files(decoder, [image])
        try:
            outside = expected(image)
        except Exception:  # noqa: BLE001 - Pillow can load but not convert it
            if isinstance(found, torch.Tensor):
                wrong[what] = "is decoded"
            continue
        if not isinstance(found, torch.Tensor):
            wrong[what] = found.message
        elif not torch.equal(found, outside):
            wrong[what] = "other pixels"
    assert not wrong
    assert len(seen) >= LEAST_FILES
