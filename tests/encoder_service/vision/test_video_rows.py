"""Rows of clips against `transformers`, on the same files: frames, sizes and rows are equal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from encoder_contract.video import VideoInfo, VideoSettings
from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.source import Source, VideoFile
from testing.clips import clip, of_variable_rate, rotated, true_frames, with_index_first
from testing.reference_tower import row_errors
from tests.towers import load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MODEL_TYPES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5"]
SMALL = {
    "size": {"longest_edge": 1 << 20, "shortest_edge": 1 << 12}
}  # pixels of all frames, for tests that end soon


STORED = Path(__file__).parent.parent / "image/clips"


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


CLIPS = {
    "10 a second": lambda: clip("mp4", frames=40, fps=10.0, seed=1),
    "24 a second": lambda: clip("mov", frames=72, fps=24.0, width=98, height=162, seed=2),
    "29.97 a second": lambda: clip("mkv", frames=100, fps=29.97, width=161, height=90, seed=3),
    "60 a second": lambda: clip("mp4", frames=200, fps=60.0, seed=4),
    "VP8": lambda: clip("webm", frames=61, fps=25.0, seed=5),
    "VP9": lambda: clip("webm", frames=75, fps=25.0, width=64, height=48, seed=6, codec="VP90"),
    "variable": lambda: of_variable_rate(clip("mp4", frames=90, fps=30.0, seed=7)),
    "turned": lambda: rotated(clip("mp4", frames=90, fps=30.0, seed=8), 270),
    "long": lambda: clip("mp4", frames=1200, fps=10.0, width=96, height=64, seed=9),
    "H.264 with B-frames": lambda: (STORED / "h264_open_gop.mkv").read_bytes(),
    "truncated": lambda: cut(with_index_first(clip("mp4", frames=120, fps=30.0, seed=10))),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folders(kept_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {
        kind: kept_checkpoint(kind, preprocessor={} if kind == "qwen2_5_vl" else SMALL)
        for kind in MODEL_TYPES
    }


@pytest.fixture(scope="module", params=MODEL_TYPES)
def models(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Any:
    """A family's tower and video settings here, and its model and video processor in `transformers`."""
    folder = folders[request.param]
    tower = load(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return tower, VideoSettings.from_folder(folder), model.model, video_processor(folder)


def video_processor(folder: Path) -> Any:
    settings = VideoSettings.from_folder(folder)
    kind = transformers.Qwen3VLVideoProcessor if settings.writes_time else transformers.Qwen2VLVideoProcessor
    return kind.from_pretrained(folder)


@pytest.mark.parametrize("name", CLIPS)
def test_rows_of_a_clip_equal_those_of_transformers(pool: DecoderPool, models: Any, name: str) -> None:
    tower, settings, model, processor = models
    data = CLIPS[name]()
    file = VideoFile()
    file.add(data)
    info = pool.open_video(name.encode(), file)
    assert isinstance(info, VideoInfo), info
    source, shown = Source.of_video(name.encode(), file, info), settings.clip(info)
    pairs = [pool.read_frames(source, pair.first, pair.second) for pair in shown.pairs]
    pixels = [torch.from_numpy(np.array(pair)) for pair in pairs]
    grids = [pair.grid for pair in shown.pairs]
    rows = torch.cat(tower.encode(tower.inputs(pixels, grids), grids))

    frames = np.stack(list(true_frames(data)))
    assert len(frames) == info.frames
    made = processor(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[{"total_num_frames": len(frames), "fps": info.fps}],
        do_sample_frames=True,
        fps=2,
        return_tensors="pt",
    )
    with torch.inference_mode():
        found = model.get_video_features(made["pixel_values_videos"], made["video_grid_thw"])
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    truth = torch.cat([torch.cat(list(part)) for part in parts], dim=1)
    assert made["video_grid_thw"][0].tolist() == [len(grids), *grids[0][1:]]
    assert row_errors(rows, truth).max() <= 1e-5
