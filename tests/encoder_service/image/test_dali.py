"""DALI: the memory of its batches, and its options for threads and hardware."""

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from encoder_contract.geometry import Grid
from encoder_service.image.dali import DaliJpegs, _options
from encoder_service.image.decoder import BATCH_IMAGES, PillowDecoder
from encoder_service.image.device_decoder import Decoder
from testing.clips import clip, true_frames
from testing.decoding import decode_files, source_of
from testing.photos import photo
from testing.reference_tower import row_errors
from tests.towers import load

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


@pytest.mark.cuda
def test_dali_binds_no_threads_and_uses_the_full_hardware_load():
    import nvidia.dali.experimental.dynamic as dali

    jpegs = DaliJpegs(CPU, 1)
    seen: list[dict[str, object]] = []

    def image(files, **options):
        seen.append(options)
        return dali.decoders.image(files, **options)

    jpegs._dynamic = SimpleNamespace(
        EvalMode=dali.EvalMode, as_batch=dali.as_batch, decoders=SimpleNamespace(image=image)
    )
    expected_options: dict[str, object] = {"affine": False}
    for options in (jpegs._options, _options(torch.device("cuda:0"))):
        jpegs._options = options
        assert jpegs.decode([source_of(photo(64, 48, 1))]) != [None]
        assert expected_options.items() <= seen[-1].items()
        expected_options = {"affine": False, "hw_decoder_load": 1.0}


@pytest.mark.cuda
def test_start_makes_a_decoder_for_every_batch_size():
    jpegs = DaliJpegs(CPU, 1)
    Decoder(CPU, PillowDecoder(), jpegs).start()
    made = len(jpegs._context._instance_cache)
    assert made >= 6
    for count in (1, 2, 3, 7, 16, BATCH_IMAGES):
        assert None not in jpegs.decode([source_of(photo(64, 48, n)) for n in range(count)])
    assert len(jpegs._context._instance_cache) == made


@pytest.mark.cuda
def test_start_warns_if_dali_decodes_nothing(monkeypatch, caplog):
    def refuse(_files):
        raise RuntimeError("nvJPEG: not supported")

    jpegs = DaliJpegs(CPU, 1)
    monkeypatch.setattr(jpegs, "_decode", refuse)
    jpegs.start(BATCH_IMAGES)
    assert "cannot decode JPEGs here" in caplog.text
    assert "nvJPEG: not supported" in caplog.text


def dali_frames(file: bytes, numbers: list[int]) -> np.ndarray:
    """Return frames of a video as DALI decodes them on the CPU, uint8 [frames, H, W, 3]."""
    import nvidia.dali.experimental.dynamic as dali

    with dali.Device("cpu"), dali.EvalContext(num_threads=1), dali.EvalMode.sync_full:
        batch = dali.as_batch([np.frombuffer(file, np.uint8)])
        decoded = dali.decoders.video(batch, device="cpu", frames=numbers)
        return np.array(decoded.tensors[0])


def test_dali_does_not_decode_our_videos(checkpoint: Path) -> None:
    """Check what docs/decisions/video-decoder.md says about DALI. If this fails, revise the decision."""
    tower = load(checkpoint)
    grid = Grid(1, 6, 10)
    for data in (clip("webm", frames=30, fps=25.0), clip("mkv", frames=30, fps=25.0, codec="MJPG")):
        true = np.stack(list(true_frames(data)))[[0, 10]]
        made = dali_frames(data, [0, 10])
        assert np.abs(made.astype(int) - true).mean() > 0.5, "levels of 255"
        rows = [
            tower.encode(tower.inputs([torch.from_numpy(each)], [grid]), [grid])[0] for each in (made, true)
        ]
        assert row_errors(*rows).max() > 1e-2
        behind = dali_frames(data, [0, 999])
        assert not behind[1].any(), "a frame that does not exist is black and raises no error"
    for stored in (clip("mp4"), (Path(__file__).parent / "clips/h264.mp4").read_bytes()):
        with pytest.raises(RuntimeError, match="Failed to create video decoder"):
            dali_frames(stored, [0, 1])
