"""Videos at an SGLang that the gateway feeds, against the same SGLang's own loader, resizing and tower.

Its loader is the one that it falls back to, decord, and its frames are those of OpenCV. torchcodec, which it prefers,
needs libraries of FFmpeg that no package index has.
"""

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from encoder_contract.geometry import Geometry
from encoder_contract.video import VideoInfo, VideoSettings
from encoder_service.image.decoder_pool import DecoderPool
from encoder_service.image.resize import PlainResize, resize_bilinear, to_patches
from encoder_service.image.source import Source, VideoFile
from prefill_client.sglang_gateway.videos import shown, times
from testing.answers import Answer, Part
from testing.clips import clip
from testing.photos import photo
from testing.sglang_engine import SglangEngine, answer_of, serving
from tests.sglang.conftest import checkpoint_of, service_of
from tests.sglang.gateways import fed

TOLERANCE = 1e-4
"""Of a log-probability."""
DIFFERENT = 1e-3
"""What another video must change."""
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
DAMAGED = clip("mp4", frames=45, fps=10.0, seed=1)[:3000]
Question = tuple[Sequence[Part], Sequence[bytes]]
"""Text and images, and the videos that the text marks."""
QUESTIONS: dict[str, Question] = {
    "made larger": ([VIDEO, "what happens"], [clip("mp4", frames=45, fps=10.0, seed=1)]),
    "not resized by SGLang": (
        [VIDEO, "what happens"],
        [clip("mkv", frames=30, fps=12.5, width=392, height=280, seed=2)],
    ),
    "made smaller": (
        ["see ", VIDEO],
        [clip("mp4", frames=24, fps=24.0, width=1280, height=720, seed=3)],
    ),
    "of VP8": ([VIDEO, "and"], [clip("webm", frames=61, fps=25.0, width=200, height=120, seed=4)]),
    "upright": ([VIDEO, "?"], [clip("mov", frames=72, fps=29.97, width=98, height=162, seed=6)]),
    "many frames": ([VIDEO, "?"], [clip("mp4", frames=200, fps=10.0, seed=7)]),
    "images and clips": (
        ["A ", photo(120, 90, 6), VIDEO, "B", photo(64, 64, 7), VIDEO],
        [clip("mp4", frames=45, fps=10.0, seed=1), clip("mp4", frames=40, fps=20.0, seed=8)],
    ),
}


def url_of(video: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(video).decode()


def ask(engine: SglangEngine, question: Question) -> Answer:
    parts, videos = question
    return answer_of(engine.generate(parts, video_data=[url_of(video) for video in videos]))


def sglangs_own(file: bytes) -> tuple[torch.Tensor, dict[str, Any]]:
    """The frames of a video, uint8 [frames, 3, H, W], as SGLang makes them, and what it says of them."""
    from sglang.srt.multimodal.processors.qwen_vl import preprocess_video
    from sglang.srt.utils.common import load_video

    settings = {"fps": 2.0, "max_frames": 768, "min_frames": 4}  # of its encoder server
    return asyncio.run(preprocess_video(load_video(file, use_gpu=False), video_config=settings))


def info_of(file: bytes) -> VideoInfo:
    """What the service says of a video."""
    pool, video = DecoderPool(1), VideoFile()
    video.add(file)
    try:
        info = pool.open_video(b"video", video)
    finally:
        pool.close()
    assert isinstance(info, VideoInfo)
    return info


@pytest.fixture
def without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep SGLang, which takes a process without a GPU for one that lost it, from pinning memory."""
    from sglang.srt.multimodal.processors import qwen_vl
    from sglang.srt.utils import video_decoder

    monkeypatch.setattr(qwen_vl, "is_cpu", lambda: True)
    monkeypatch.setattr(video_decoder, "_is_cpu_engine", lambda: True)


@pytest.mark.story("the frames of a video")
@pytest.mark.usefixtures("without_accelerator")
def test_the_tower_gets_the_frames_times_and_pixels_of_sglang(tmp_path: Path) -> None:
    """Frames, sizes, times and pixels, without an engine."""
    from transformers import AutoVideoProcessor

    folder = checkpoint_of("qwen3_vl", tmp_path)
    processor, settings = AutoVideoProcessor.from_pretrained(folder), VideoSettings.from_folder(folder)
    resize = PlainResize(Geometry(settings.patch_size, settings.merge_size, 1, 1 << 40))
    mean, std = (torch.tensor(values)[:, None] for values in (settings.mean, settings.std))
    pool = DecoderPool(1)
    try:
        for name, (_, videos) in QUESTIONS.items():
            frames, metadata = sglangs_own(videos[0])
            made = processor(
                videos=[frames], do_sample_frames=False, video_metadata=[metadata], return_tensors="pt"
            )
            file = VideoFile()
            file.add(videos[0])
            info = pool.open_video(name.encode(), file)
            assert info == info_of(videos[0])
            source, clip = Source.of_video(name.encode(), file, info), shown(settings, info)
            patches = []
            for pair in clip.pairs:
                pixels = torch.from_numpy(np.array(pool.read_frames(source, pair.first, pair.second)))
                patches += to_patches([resize_bilinear(pixels, pair)], [pair.grid], resize)
            assert made["video_grid_thw"].tolist() == [[len(clip.pairs), *clip.grid[1:]]], name
            values = torch.cat(patches).float().unflatten(1, (3, -1)) / 255
            inputs = ((values - mean) / std).flatten(1)
            torch.testing.assert_close(inputs, made["pixel_values_videos"], rtol=0, atol=1e-6)
            assert [number for pair in clip.pairs for number in pair[:2]] == [*metadata["frames_indices"]]
    finally:
        pool.close()


@pytest.mark.story("videos of Qwen3-VL")
@pytest.mark.usefixtures("without_accelerator")
def test_sglang_lays_out_the_gateways_video_as_its_own(tmp_path: Path) -> None:
    """Tokens, positions and the rows of each pair, without an engine: by its receiver's code and by its own path."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.managers.schedule_batch import Modality
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
    from transformers import AutoConfig, AutoProcessor

    folder = checkpoint_of("qwen3_vl", tmp_path)
    settings, processor = VideoSettings.from_folder(folder), AutoProcessor.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    ids = {
        "image_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "vision_start_token_id": config.vision_start_token_id,
    }
    receiver = object.__new__(QwenVLImageProcessor)
    receiver.model_type, receiver.hf_config, receiver._processor = config.model_type, config, processor
    receiver._spatial_merge_size, receiver._tokens_per_second = settings.merge_size, None
    receiver.vision_start_token_id = receiver.IM_START_TOKEN_ID = config.vision_start_token_id
    receiver.vision_end_token_id = receiver.IM_END_TOKEN_ID = config.vision_end_token_id
    receiver.IM_TOKEN_ID, receiver.VIDEO_TOKEN_ID = config.image_token_id, config.video_token_id
    receiver.audio_start_token_id = None
    receiver.mm_tokens = SimpleNamespace(audio_token_id=None, **ids)
    for parts, videos in QUESTIONS.values():
        text = "".join(part for part in parts if isinstance(part, str))
        made = [sglangs_own(video) for video in videos]
        own = processor(
            text=[text],
            videos=[frames for frames, _ in made],
            video_metadata=[metadata for _, metadata in made],
            do_sample_frames=False,
            return_tensors="pt",
        )
        clips = [shown(settings, info_of(video)) for video in videos]
        grids = torch.tensor([[len(clip.pairs), *clip.grid[1:]] for clip in clips])
        rows = torch.arange(int(grids.prod(1).sum()) // settings.merge_size**2)[:, None]
        laid_out = receiver.get_mm_data(
            processor.tokenizer.encode(text),
            {Modality.VIDEO: rows},
            video_grid_thw=grids,
            **times(clips),
        )
        assert laid_out.input_ids == own["input_ids"][0].tolist()
        positions, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=settings.merge_size,
            model_type=config.model_type,
            input_ids=own["input_ids"],
            video_grid_thw=own["video_grid_thw"],
            **ids,
        )
        assert torch.equal(laid_out.mrope_positions, positions.squeeze(1))
        assert torch.equal(laid_out.mrope_position_delta, delta)
        pairs = [item.precomputed_embeddings for item in laid_out.mm_items]
        assert torch.equal(torch.cat(pairs), rows)
        assert len(pairs) == sum(len(clip.pairs) for clip in clips)


@pytest.mark.story("a damaged video")
@pytest.mark.story("another video changes the answer")
@pytest.mark.story("videos of Qwen3-VL")
def test_an_engine_that_the_gateway_feeds_answers_as_by_sglangs_own_loader_and_tower(
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_of("qwen3_vl", tmp_path)
    with serving(checkpoint) as engine:
        own = {name: ask(engine, question) for name, question in QUESTIONS.items()}
    with (
        service_of(checkpoint) as service,
        fed(checkpoint, service, encoders=2) as (engine, gateway),
    ):
        distances: dict[str, float] = {}
        for name, question in QUESTIONS.items():
            pairs = gateway.count("images")
            distances[name] = ask(engine, question).distance(own[name])
            assert gateway.count("images") > pairs, f"{name}: SGLang used its own tower"
        assert max(distances.values()) <= TOLERANCE, distances
        other = ask(engine, ([VIDEO, "what happens"], [clip("mp4", frames=45, fps=10.0, seed=9)]))
        assert other.distance(own["made larger"]) > DIFFERENT
        refused = engine.generate([VIDEO], video_data=[url_of(DAMAGED)])
        assert refused.status_code == 503
        assert "video 0: " in gateway.log.read_text()
        assert ask(engine, QUESTIONS["upright"]).distance(own["upright"]) <= TOLERANCE
