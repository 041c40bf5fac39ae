"""Qwen3.5 on a real engine, whose kernels for linear attention exist on a CPU in bfloat16 alone.

There two towers round differently, and no answer of the one is exactly that of the other. So its parts are compared:
the service's rows are near those of the engine's own tower, and in its place they give the same answers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_contract.digest import content_digest
from encoder_contract.video import VideoInfo, VideoSettings
from prefill_client import RowRequest
from prefill_client.images import Image
from prefill_client.vllm.image_name import ImageName
from prefill_client.vllm.videos import VIDEO_BEGIN, VIDEO_END, Sampling, prompt_parts
from testing.clips import clip
from testing.photos import photo
from testing.server_process import ServerProcess, running
from testing.vllm_engine import Answer, Part, VllmEngine
from tests.engines.answers import TOLERANCE
from tests.vllm.conftest import checkpoint_of
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_gate import begin_of_second, step_until_parked, two_images
from tests.vllm.test_videos import CLIP, PROCESSOR, video

COSINE = 0.999  # of a row of one tower and that of the other, both in bfloat16


def prompt(seed: int, images: int) -> list[Part]:
    """Images with enough text between them that no step begins two: the engine encodes only what fits into a step."""
    between = [(f"text {seed} " * 9, photo(250 - 9 * n, 250, 100 * seed + n, "PNG")) for n in range(images)]
    return [part for pair in between for part in pair]


PROMPTS = [prompt(900 + images, images) for images in range(1, 9)]
IMAGES = [part for parts in PROMPTS for part in parts if isinstance(part, bytes)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with three layers of linear attention and one of the other kind."""
    folder = checkpoint_of("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint."""
    with running(model, executable=SERVICE, **{**SETTINGS, "dtype": "bfloat16"}) as server:
        yield server


def started(model: Path, server: ServerProcess, **options: Any) -> VllmEngine:
    return VllmEngine(model, server.endpoint, dtype="bfloat16", **options)


@pytest.fixture(scope="module")
def engine(model: Path, served: ServerProcess) -> Iterator[VllmEngine]:
    """An engine with its tower."""
    engine = started(model, served)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ours(engine: VllmEngine) -> list[Answer]:
    """The engine's answers with the service's rows."""
    return [engine.ask(parts) for parts in PROMPTS]


class Tower:
    """The engine's own tower, with each image's rows replaced by the nearest rows of the service."""

    def __init__(self, encode: Any, rows: list[torch.Tensor]) -> None:
        self._encode = encode
        self._rows = rows
        self.cosines: list[float] = []

    def embed(self, **pixels: Any) -> list[torch.Tensor]:
        """Replace the model's `embed_multimodal`."""
        return [self._nearest(own) for own in self._encode(**pixels)]

    def _nearest(self, own: torch.Tensor) -> torch.Tensor:
        cosines = {
            number: float(torch.cosine_similarity(own.float(), rows.float(), dim=1).min())
            for number, rows in enumerate(self._rows)
            if rows.shape == own.shape
        }
        nearest = max(cosines, key=cosines.__getitem__)
        self.cosines.append(cosines[nearest])
        return self._rows[nearest].to(own)


@pytest.mark.story("Qwen3.5")
def test_rows_are_close_to_the_own_towers_and_give_the_same_answers(
    engine: VllmEngine, ours: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    with engine.client.fetch([RowRequest(content_digest(image)) for image in IMAGES]) as outcomes:
        tower = Tower(model.embed_multimodal, [rows.tensor().clone() for rows in outcomes])
    monkeypatch.setattr(model, "embed_multimodal", tower.embed)
    for parts, answer in zip(PROMPTS, ours, strict=True):
        engine.forget()
        assert answer.reason == "length"
        assert answer.distance(engine.ask(parts, own=True)) <= TOLERANCE
    assert len(tower.cosines) == len(IMAGES)
    assert min(tower.cosines) >= COSINE


def test_other_images_or_another_order_change_the_answer(engine: VllmEngine, ours: list[Answer]) -> None:
    for parts, answer in zip(PROMPTS, ours, strict=True):
        others = [photo(250, 250, 99, "PNG") if isinstance(part, bytes) else part for part in parts]
        assert engine.ask(others).distance(answer) > 100 * TOLERANCE


# Closing an engine breaks the other engines of its process, so each test below has its own engine.


@pytest.mark.story("videos of Qwen3.5")
def test_a_video_gets_the_answer_of_the_own_loader(
    model: Path, served: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with images: the engine's own path, with the service's rows instead of its tower's."""
    settings = VideoSettings.from_folder(model)
    engine = started(model, served, limit_mm_per_prompt={"image": 16, "video": 1})
    try:
        answers, wholes = [], []
        for data in (CLIP, clip("mp4", frames=45, fps=10.0, seed=2)):
            chosen = Sampling().clip(settings, VideoInfo(45, 45, 10.0, 160, 96))
            pairs = [
                Image(data, content_digest(data), pair.grid, settings.tokens(pair), frames=pair)
                for pair in chosen.pairs
            ]
            named = [
                {
                    "type": "image_embeds",
                    "image_embeds": {"image_grid_thw": list(pair.grid)},
                    **engine.named_fields(ImageName(content_digest(data), pair.grid, engine.producer, pair)),
                }
                for pair in chosen.pairs
            ]
            assert [answer.error for answer in engine.client.submit(pairs)] == [None] * 5
            shown = [VIDEO_BEGIN, *prompt_parts(chosen, named), VIDEO_END]
            answers.append(engine.ask(["what happens", *shown]))
            with engine.client.fetch([RowRequest.of(pair) for pair in pairs]) as outcomes:
                rows = {outcome.index: outcome.tensor().clone() for outcome in outcomes}
            wholes.append(torch.cat([rows[index] for index in range(5)]))
        tower = Tower(engine.model.embed_multimodal, wholes[:1])
        monkeypatch.setattr(engine.model, "embed_multimodal", tower.embed)
        engine.forget()
        own = engine.ask(["what happens", video(CLIP)], own=True)
        assert len(tower.cosines) == 1
        assert tower.cosines[0] >= COSINE
        assert answers[0].distance(own) <= TOLERANCE
        assert answers[1].distance(own) > 100 * TOLERANCE, "another video"
        engine.assert_nothing_is_held()
    finally:
        engine.close()


@pytest.mark.parametrize(
    "options",
    [{"limit_mm_per_prompt": {"image": 0, "video": 0}}, {"extra": {"shared_memory": False}}],
    ids=["its tower left out", "rows that come inline"],
)
def test_other_engines_give_the_same_answers(
    model: Path, served: ServerProcess, ours: list[Answer], options: dict[str, Any]
) -> None:
    engine = started(model, served, **options)
    try:
        distances = [engine.ask(parts).distance(right) for parts, right in zip(PROMPTS, ours, strict=True)]
        engine.assert_nothing_is_held()
    finally:
        engine.close()
    assert max(distances) <= TOLERANCE


def test_prefill_runs_exactly_up_to_a_missing_image(model: Path, served: ServerProcess) -> None:
    """Although linear attention also restricts where a step may end."""
    engine = started(model, served, exact=True)
    try:
        first, second, parts = two_images(520)
        engine.submit(first)
        request_id = engine.start(parts)
        engine.step()
        begin = begin_of_second(engine)
        engine.run_until(lambda: engine.computed(request_id) > begin - 200)
        assert step_until_parked(engine, request_id) == begin
        engine.submit(second)
        assert engine.run(request_id)[request_id].reason == "length"
        engine.assert_nothing_is_held()
    finally:
        engine.close()
