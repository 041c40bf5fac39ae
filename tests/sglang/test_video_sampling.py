"""Which frames of a video the gateway names, and how large, against the code of each supported release of SGLang.

The code of a wheel is read as text: its function for videos is run on a decoder that has sizes and no pixels.
"""

import asyncio
import logging
import math
import os
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_contract.errors import EncoderError
from encoder_contract.video import VideoInfo, VideoSettings
from prefill_client.sglang_gateway.frames import SUPPORTED
from prefill_client.sglang_gateway.videos import shown
from tests.sglang.conftest import checkpoint_of
from tests.sglang.test_gateway_frames import definitions

MODULE = "sglang/srt/multimodal/processors/qwen_vl.py"
NAMES = {
    *("preprocess_video", "smart_nframes", "smart_resize"),
    *("round_by_factor", "ceil_by_factor", "floor_by_factor"),
    *("IMAGE_FACTOR", "MIN_PIXELS", "MAX_PIXELS", "MAX_RATIO", "FRAME_FACTOR"),
    *("FPS", "FPS_MIN_FRAMES", "FPS_MAX_FRAMES"),
    *("VIDEO_TOTAL_PIXELS", "VIDEO_MIN_PIXELS", "VIDEO_MAX_PIXELS"),
}
SETTINGS = {"fps": 2.0, "max_frames": 768, "min_frames": 4}


class Decoder:
    """Stands where SGLang's decoder does; its frames have a size alone."""

    def __init__(self, video: VideoInfo) -> None:
        self._video = video
        self.avg_fps = video.fps

    def __len__(self) -> int:
        return self._video.frames

    def get_frames_as_tensor(self, indices: list[int]) -> torch.Tensor:
        return torch.empty(len(indices), self._video.height, self._video.width, 3, device="meta")


@pytest.fixture(scope="module", params=SUPPORTED)
def release(
    request: pytest.FixtureRequest, wheels: Callable[[str], zipfile.ZipFile]
) -> Callable[[VideoInfo], tuple[list[int], tuple[int, int]]]:
    """Return the frame numbers that a release samples from a video, and their height and width."""
    sizes: list[tuple[int, int]] = []

    def resize(video: torch.Tensor, size: list[int], **_: Any) -> torch.Tensor:
        sizes.append((size[0], size[1]))
        return video

    functional = SimpleNamespace(resize=resize)
    given: dict[str, Any] = {
        "math": math,
        "np": np,
        "os": os,
        "time": time,
        "torch": torch,
        "Image": Image,
        "torchvision": SimpleNamespace(transforms=SimpleNamespace(functional=functional)),
        "InterpolationMode": SimpleNamespace(BILINEAR="bilinear"),
        "VideoDecoderWrapper": Decoder,
        "envs": SimpleNamespace(SGLANG_IMAGE_MAX_PIXELS=SimpleNamespace(get=lambda: 1 << 24)),
        "is_cpu": lambda: True,
        "logger": logging.getLogger("sglang"),
    }
    with wheels(request.param) as wheel:
        made = definitions(wheel, MODULE, NAMES, given)

    def preprocessed(video: VideoInfo) -> tuple[list[int], tuple[int, int]]:
        _, metadata = asyncio.run(made["preprocess_video"](Decoder(video), video_config=SETTINGS))
        return [int(number) for number in metadata["frames_indices"]], sizes.pop()

    return preprocessed


@pytest.mark.story("the frames of a video")
def test_frames_and_sizes_are_those_of_the_release(
    release: Callable[[VideoInfo], tuple[list[int], tuple[int, int]]], tmp_path: Path
) -> None:
    settings = VideoSettings.from_folder(checkpoint_of("qwen3_vl", tmp_path))
    rng = random.Random(0)
    compared = 0
    for _ in range(2000):
        frames = int(2 ** rng.uniform(0, 15))
        width, height = (int(2 ** rng.uniform(4, 12)) for _ in range(2))
        fps = rng.choice([1.0, 10.0, 23.976, 25.0, 29.97, 30.0, 60.0, rng.uniform(0.1, 120)])
        video = VideoInfo(frames, frames, fps, width, height)
        try:
            numbers, size = release(video)
        except ValueError:
            with pytest.raises(EncoderError):
                shown(settings, video)
            continue
        if 0 in size:  # SGLang cannot resize to that
            continue
        clip = shown(settings, video)
        assert [number for pair in clip.pairs for number in pair[:2]] == numbers, video
        assert clip.pairs[0].bilinear == (None if size == (height, width) else size), video
        compared += 1
    assert compared > 1500
