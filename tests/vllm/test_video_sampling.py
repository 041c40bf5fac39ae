"""The middleware chooses the frames of videos that stock vLLM chooses, and the service decodes the same pixels."""

import mmap
import random
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, get_video_loader_backend_for_processor
from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata
from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

from encoder_contract.video import VideoInfo, VideoSettings
from encoder_service.image.open_video import OpenVideo
from prefill_client.vllm.videos import Sampling
from testing.clips import clip, rotated, with_index_first
from tests.vllm.service import ROOT

SETTINGS: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "min_pixels": 1024, "max_pixels": 262144}


def chosen_by_vllm(video: VideoInfo, loading: dict[str, Any], processing: dict[str, Any]) -> list[int]:
    loader = VIDEO_LOADER_REGISTRY.load(get_video_loader_backend_for_processor("Qwen3VLVideoProcessor"))
    source = loader._prepare_source(VideoSourceMetadata(video.frames, video.fps, video.seconds))
    target = VideoTargetMetadata(
        num_frames=loading.get("num_frames", 32), fps=loading.get("fps", 2), max_duration=300
    )
    loaded = loader.compute_frames_index_to_sample(source=source, target=target)
    if len(loaded) < video.frames:
        return [int(index) for index in loaded]
    metadata = VideoMetadata(total_num_frames=video.frames, fps=source.original_fps)
    return [int(index) for index in Qwen3VLVideoProcessor().sample_frames(metadata, **processing)]


@pytest.mark.story("the frames of a video")
@pytest.mark.parametrize("seed", range(4))
def test_frames_equal_vllms_choice(seed: int) -> None:
    draw = random.Random(seed)
    settings = VideoSettings(writes_time=True, mean=(0.5,) * 3, std=(0.5,) * 3, **SETTINGS)
    for _ in range(500):
        frames = draw.choice([draw.randint(2, 12), draw.randint(2, 5000)])
        fps = draw.choice([0.0, 0.5, 2.0, 10.0, 24.0, 29.97, 60.0, draw.uniform(0.1, 120.0)])
        video = VideoInfo(frames, frames, fps, 160, 96)
        loading = draw.choice([{}, {"fps": draw.choice([0.5, 1, 2, 7.5, 30, 90])}, {"num_frames": 8}])
        processing: dict[str, Any] = draw.choice(
            [
                {},
                {"fps": draw.choice([0.5, 1, 3, 50])},
                {"num_frames": draw.randint(4, min(768, max(4, frames)))},
            ]
        )
        if processing.get("num_frames", 0) > frames:
            processing = {}
        body = {"media_io_kwargs": {"video": loading}, "mm_processor_kwargs": processing}
        assert Sampling.read(body).frames(settings, video) == chosen_by_vllm(video, loading, processing), (
            video,
            body,
        )


TRUNCATED = with_index_first(clip("mp4", frames=60, fps=10.0, seed=5))
CLIPS = {
    "webm": clip("webm", frames=30, fps=12.5, width=200, height=120, seed=2),
    "turned": rotated(clip("mp4", frames=30, fps=15.0, width=192, seed=4), 90),
    "truncated": TRUNCATED[: len(TRUNCATED) * 2 // 3],
    **{
        path.name: path.read_bytes()
        for path in sorted((ROOT / "tests/encoder_service/image/clips").iterdir())
        if "interlaced" not in path.name  # vLLM gets unwritten memory for these
    },
}


@pytest.mark.story("the frames of a video")
@pytest.mark.parametrize("name", CLIPS)
def test_the_service_finds_and_decodes_the_frames_of_vllms_loader(name: str) -> None:
    data = CLIPS[name]
    capture = OpenCVVideoBackendMixin.open_video_capture(data)
    found = OpenCVVideoBackendMixin.get_video_metadata(capture)
    content = mmap.mmap(-1, len(data))
    content.write(data)
    video = OpenVideo(content)
    info = video.info()
    assert (info.frames, info.fps) == (found.total_frames_num, found.original_fps)
    pixels = np.empty((2, info.height, info.width, 3), np.uint8)
    for number in range(info.readable_frames):
        capture = capture if number else OpenCVVideoBackendMixin.open_video_capture(data)
        is_read, bgr = capture.read()
        assert is_read
        video.read(number, number, pixels)
        assert np.array_equal(pixels[0], bgr[..., ::-1]), number
