"""The service decodes image files to the same pixels as vLLM's own image loader."""

import numpy as np
import pytest
from vllm.multimodal.media.image import ImageMediaIO

from encoder_contract.header import RARE_FORMATS, Header, format_of, read_header
from encoder_service.image.pillow import decode_file, read_rare_header
from encoder_service.image.source import Source
from testing.every_kind import files

# Files of different bytes, less a margin for other builds of Pillow.
LEAST_FILES = 200


@pytest.mark.story("transparent and turned images")
@pytest.mark.filterwarnings("ignore")
def test_decoded_pixels_equal_those_that_vllm_loads() -> None:
    wrong, seen, refused = {}, set(), set()
    for what, image in files():
        seen.add(image)
        header = read_header(image) if format_of(image) else read_rare_header(image, RARE_FORMATS)
        found = decode_file(Source(b"", image, header)) if isinstance(header, Header) else header
        try:
            expected = np.asarray(ImageMediaIO().load_bytes(image).media)
        except ValueError as error:
            refused.add(what)
            if isinstance(found, np.ndarray):
                wrong[what] = f"vLLM refuses it: {error}"
            continue
        if not isinstance(found, np.ndarray):
            wrong[what] = found.message
        elif not np.array_equal(found, expected):
            wrong[what] = "other pixels"
    assert not wrong
    assert len(seen) >= LEAST_FILES
    assert len(refused) < len(seen) / 10
