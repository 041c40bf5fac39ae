"""DALI, as we use it: what it keeps of a batch, and what it is told about threads and hardware."""

import gc
from types import SimpleNamespace

import pytest
import torch

from encoder_service.image.dali import DaliJpegs, _options
from encoder_service.image.decoder import BATCH_IMAGES, Decoder, PillowDecoder
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


def test_start_makes_a_decoder_for_every_batch_size():
    jpegs = DaliJpegs(CPU, 1)
    Decoder(CPU, PillowDecoder(), jpegs).start()
    made = len(jpegs._context._instance_cache)
    assert made >= 6
    for count in (1, 2, 3, 7, 16, BATCH_IMAGES):
        assert None not in jpegs.decode([source_of(photo(64, 48, n)) for n in range(count)])
    assert len(jpegs._context._instance_cache) == made


def test_start_warns_if_dali_decodes_nothing(monkeypatch, caplog):
    def refuse(_files):
        raise RuntimeError("nvJPEG: not supported")

    jpegs = DaliJpegs(CPU, 1)
    monkeypatch.setattr(jpegs, "_decode", refuse)
    jpegs.start(BATCH_IMAGES)
    assert "decodes no JPEGs here" in caplog.text
    assert "nvJPEG: not supported" in caplog.text
