"""DALI, as we use it: what it keeps of a batch, and what it is told about threads and hardware."""

import gc
from types import SimpleNamespace

import pytest
import torch

from encoder_service.image.dali import DaliJpegs, _options
from encoder_service.image.decoder import Decoder, PillowDecoder
from testing.decoding import decode_files, source_of
from testing.photos import photo

CPU = torch.device("cpu")

pytestmark = pytest.mark.dali


def test_dali_buffers_are_freed_with_the_call_without_a_collection():
    half = photo(120, 80, 1)[:3000]
    decoder = Decoder(CPU, PillowDecoder(), DaliJpegs(CPU, 1))
    gc.collect()
    gc.disable()
    try:
        for n in range(3):
            decode_files(decoder, [photo(200, 150, n), half])
        left = {type(each) for each in gc.get_objects()}
    finally:
        gc.enable()
    assert not [kind for kind in left if "nvidia.dali" in str(kind) and kind.__name__ in ("Batch", "Tensor")]


def test_dali_binds_no_threads_and_uses_the_full_hardware_load():
    import nvidia.dali.experimental.dynamic as dali

    jpegs = DaliJpegs(CPU, 1)
    told: list[dict[str, object]] = []

    def image(files, **options):
        told.append(options)
        return dali.decoders.image(files, **options)

    jpegs._dynamic = SimpleNamespace(
        EvalMode=dali.EvalMode, as_batch=dali.as_batch, decoders=SimpleNamespace(image=image)
    )
    expected_options: dict[str, object] = {"affine": False}
    for options in (jpegs._options, _options(torch.device("cuda:0"))):
        jpegs._options = options
        assert jpegs.decode([source_of(photo(64, 48, 1))]) != [None]
        assert expected_options.items() <= told[-1].items()
        expected_options = {"affine": False, "hw_decoder_load": 1.0}
