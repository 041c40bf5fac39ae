"""Videos: frames, sizes and times equal those of the checkpoint's own video processor."""

import json
import random

import numpy as np
import pytest
import torch
from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from encoder_contract.errors import ImageLimitError, InvalidImageError
from encoder_contract.geometry import Grid
from encoder_contract.video import Frames, VideoInfo, VideoSettings, container_of, timestamp

TYPES = {"qwen3_vl": Qwen3VLVideoProcessor, "qwen2_5_vl": Qwen2VLVideoProcessor}


def settings_of(tmp_path, model_type, **settings):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return VideoSettings.from_folder(tmp_path), TYPES[model_type](**settings)


def metadata(video):
    return VideoMetadata(total_num_frames=video.frames, fps=video.fps, width=video.width, height=video.height)


def random_video(draw):
    frames = draw.choice((2, 3, 4, 7, draw.randrange(2, 400), draw.randrange(2, 4000)))
    fps = draw.choice((10.0, 24.0, 25.0, 29.97, 30.0, 59.94, 60.0, draw.uniform(1, 120)))
    return VideoInfo(frames, frames, fps, draw.randrange(16, 2000), draw.randrange(16, 1200))


@pytest.mark.parametrize("model_type", TYPES)
def test_frames_are_those_that_the_processor_samples(tmp_path, model_type):
    ours, theirs = settings_of(tmp_path, model_type)
    draw = random.Random(1)
    for _ in range(2000):
        video = random_video(draw)
        expected = theirs.sample_frames(metadata(video), fps=2)
        last = video.frames - 1  # torch's float32 may count one too many, which vLLM clamps
        assert ours.sample(video) == [min(int(index), last) for index in expected], video


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("cap", [False, True])
def test_grids_are_those_to_which_the_processor_resizes(tmp_path, model_type, cap, monkeypatch):
    ours, theirs = settings_of(tmp_path, model_type, cap_pixels_per_frame=cap)
    sizes = []
    monkeypatch.setattr(
        "transformers.video_processing_utils.BaseVideoProcessor.resize",
        lambda self, image, size, resample: sizes.append((size.height, size.width)),
    )
    draw = random.Random(2)
    factor = {"qwen3_vl": 32, "qwen2_5_vl": 28}[model_type]
    for _ in range(500):
        frames, width, height = draw.randrange(2, 769), draw.randrange(8, 4000), draw.randrange(8, 2200)
        # Memory of no size: only the shape is read.
        videos = torch.empty(1, device="meta").expand(1, frames, 3, height, width)
        theirs.resize(videos, theirs.size, None, factor=factor, temporal_factor=2, cap_pixels_per_frame=cap)
        grid = ours.grid(frames, width, height)
        patch = factor // 2
        assert (grid.h * patch, grid.w * patch) == sizes.pop(), (frames, width, height)


def test_times_are_written_as_by_the_processor(tmp_path):
    ours, _ = settings_of(tmp_path, "qwen3_vl")
    draw = random.Random(3)
    for _ in range(300):
        video = random_video(draw)
        clip = ours.clip(video)
        theirs = Qwen3VLProcessor._calculate_timestamps(None, ours.sample(video), video.fps)
        assert clip.seconds == tuple(theirs)
        assert clip.pairs[0].first == 0
    assert timestamp(0.25) == "<0.2 seconds>"


def test_time_between_pairs_is_that_of_the_sampled_rate(tmp_path):
    ours, _ = settings_of(tmp_path, "qwen2_5_vl")
    video = VideoInfo(300, 300, 30.0, 640, 360)
    data = VideoMetadata(total_num_frames=300, fps=30.0, frames_indices=ours.sample(video))
    assert ours.clip(video).seconds_per_pair == 2 / data.sampled_fps


def test_frames_that_the_file_lacks_are_left_out(tmp_path):
    ours, _ = settings_of(tmp_path, "qwen3_vl")
    whole = ours.clip(VideoInfo(300, 300, 30.0, 640, 360))
    cut = ours.clip(VideoInfo(300, 140, 30.0, 640, 360))
    shown = [index for pair in whole.pairs for index in pair[:2] if index < 140]
    assert len(shown) == 9
    assert [index for pair in cut.pairs for index in pair[:2]] == [*shown, shown[-1]]
    even = ours.clip(VideoInfo(300, shown[-1], 30.0, 640, 360))
    assert [index for pair in even.pairs for index in pair[:2]] == shown[:-1]


@pytest.mark.parametrize("video", [VideoInfo(0, 0, 30.0, 64, 64), VideoInfo(300, 0, 30.0, 64, 64)])
def test_a_video_without_frames_is_refused(tmp_path, video):
    ours, _ = settings_of(tmp_path, "qwen3_vl")
    with pytest.raises(InvalidImageError):
        ours.clip(video)


def test_a_strip_is_refused_as_by_the_processor(tmp_path):
    for model_type in TYPES:
        ours, _ = settings_of(tmp_path, model_type)
        with pytest.raises(ImageLimitError):
            ours.grid(4, 10_000, 40)


def test_settings_are_found_where_the_processor_finds_them(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 3136, "max_pixels": 12845056}')
    found = VideoSettings.from_folder(tmp_path)
    assert (found.writes_time, found.min_pixels, found.max_pixels) == (False, 3136, 12845056)
    nested = {"video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 4}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    found = VideoSettings.from_folder(tmp_path)
    assert (found.writes_time, found.fps) == (True, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"resample": 2},
        {"temporal_patch_size": 1},
        {"video_processor_type": "Other"},
        {"size": 3},
        {"min_frames": 1},
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(tmp_path, settings):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="video_preprocessor_config"):
        VideoSettings.from_folder(tmp_path)


def test_containers_are_recognised_by_their_first_bytes():
    assert container_of(b"\x00\x00\x00\x20ftypisom") == "MP4"
    assert container_of(b"\x1aE\xdf\xa3\x01") == "WEBM"
    assert container_of(b"RIFF\x00\x00\x00\x00AVI LIST") == "AVI"
    assert container_of(b"FLV\x01\x05\x00\x00\x00\x09") == "FLV"
    assert container_of(b"\x00\x00\x01\xba\x44") == "PS"
    assert container_of((b"G" + bytes(187)) * 2) == container_of((bytes(4) + b"G" + bytes(187)) * 2) == "TS"
    for other in (
        b"",
        b"#EXTM3U\n",
        b"GIF89a" + bytes(200),
        b"RIFF\x00\x00\x00\x00WEBPVP8 ",
        np.random.default_rng(0).bytes(8),
    ):
        assert container_of(other) is None


def test_a_pair_is_named_by_its_frames_and_size():
    assert Frames(1, 2, Grid(1, 4, 6)) != Frames(1, 2, Grid(1, 6, 4))
