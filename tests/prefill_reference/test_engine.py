"""The reference engine: chunked prefill with rows from outside against the one-shot model with pixels."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from encoder_contract.errors import InvalidRequestError, ModelMismatchError
from encoder_contract.geometry import Grid
from prefill_client import Layout, expand_prompt, plan
from prefill_reference.engine import Engine
from prefill_reference.language_model import load_language_model

pytestmark = pytest.mark.slow

GRIDS = [Grid(1, 8, 6), Grid(1, 4, 4), Grid(1, 10, 12), Grid(1, 2, 2)]
MERGE = 2
# Chunk sizes that cut images in the middle, one that cuts nowhere, and single tokens.
CHUNKS = [1, 7, 10, 16, 33, 1000]


@dataclass
class OneShot:
    """A checkpoint, its prompt, and the logits of one pass of `transformers` over prompt and pixels."""

    folder: Path
    layout: Layout
    rows: list[Tensor]
    logits: Tensor
    model: Any
    inputs: dict[str, Tensor]

    async def fetch(self, image: int, begin: int, end: int) -> Tensor:
        return self.rows[image][begin:end]


def reference_model(folder: Path) -> OneShot:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    grids = torch.tensor([list(grid) for grid in GRIDS])
    vision = model.config.vision_config
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(
        int(grids.prod(1).sum()), 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator
    )
    prompt = [5, 6, 7]
    for image in range(len(GRIDS)):
        prompt += [model.config.image_token_id, 20 + image, 21 + image]
    layout = expand_prompt(prompt, model.config.image_token_id, [g.patches // MERGE**2 for g in GRIDS])
    ids = torch.tensor(layout.token_ids)[None]
    inputs = {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": grids,
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
    }
    with torch.inference_mode():
        features = model.model.get_image_features(pixels, grids, return_dict=True)
        levels = getattr(features, "deepstack_features", None) or []
        rows = [
            torch.cat([features.pooler_output[i], *(level[i] for level in levels)], dim=1)
            for i in range(len(GRIDS))
        ]
        logits = model(**inputs).logits[0, -1]
    return OneShot(folder, layout, rows, logits, model, inputs)


@pytest.fixture(scope="module")
def qwen3_vl(kept_checkpoint: Callable[..., Path]) -> OneShot:
    return reference_model(kept_checkpoint("qwen3_vl"))


def engine_of(reference: OneShot) -> Engine:
    language_model = load_language_model(reference.folder, dtype=torch.float32)
    return Engine(language_model, row_width=reference.rows[0].shape[1])


async def prefill(
    engine: Engine, reference: OneShot, chunk_tokens: int, rows: Callable[[int, int, int], Awaitable[Tensor]]
) -> Tensor:
    """Prefill the prompt in chunks; return the last token's logits. `rows` is called with image, begin and end."""
    prompt = engine.start(reference.layout, GRIDS)
    logits = torch.empty(0)
    for chunk in plan(reference.layout, chunk_tokens):
        fetched = [await rows(window.image, window.row_begin, window.row_end) for window in chunk.windows]
        embedded = engine.embed(prompt, chunk, fetched)
        logits = await asyncio.to_thread(engine.run, prompt, chunk, embedded)
    return logits


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
async def test_chunked_prefill_equals_one_shot_logits(qwen3_vl: OneShot, chunk_tokens: int) -> None:
    logits = await prefill(engine_of(qwen3_vl), qwen3_vl, chunk_tokens, qwen3_vl.fetch)
    assert relative_error(logits, qwen3_vl.logits) < 5e-6


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen2_5_vl", "qwen3_5"])
async def test_other_architectures_equal_one_shot_logits(
    model_type: str, kept_checkpoint: Callable[..., Path]
) -> None:
    reference = reference_model(kept_checkpoint(model_type))
    for chunk_tokens in (10, 33):
        logits = await prefill(engine_of(reference), reference, chunk_tokens, reference.fetch)
        assert relative_error(logits, reference.logits) < 5e-6, chunk_tokens


async def test_every_level_of_every_row_reaches_the_logits(qwen3_vl: OneShot) -> None:
    engine, hidden = engine_of(qwen3_vl), qwen3_vl.rows[0].shape[1] // 4
    for level in range(4):

        async def without_level(image: int, begin: int, end: int, level: int = level) -> Tensor:
            rows = qwen3_vl.rows[image][begin:end].clone()
            rows[:, level * hidden : (level + 1) * hidden] = 0
            return rows

        logits = await prefill(engine, qwen3_vl, 16, without_level)
        assert relative_error(logits, qwen3_vl.logits) > 1e-2, level


def test_greedy_decode_continues_like_transformers(qwen3_vl: OneShot) -> None:
    engine = engine_of(qwen3_vl)
    prompt = engine.start(qwen3_vl.layout, GRIDS)
    logits = torch.empty(0)
    for chunk in plan(qwen3_vl.layout, 16):
        rows = [qwen3_vl.rows[w.image][w.row_begin : w.row_end] for w in chunk.windows]
        logits = engine.run(prompt, chunk, engine.embed(prompt, chunk, rows))
    ours = list(islice(engine.decode(prompt, logits), 6))
    with torch.inference_mode():
        theirs = qwen3_vl.model.generate(**qwen3_vl.inputs, max_new_tokens=6, do_sample=False)
    assert len(ours) == 6
    assert ours == theirs[0, qwen3_vl.layout.tokens :].tolist()


def test_the_tower_is_not_loaded(qwen3_vl: OneShot) -> None:
    engine = engine_of(qwen3_vl)
    names = [name for name, _ in engine.language_model.model.named_parameters()]
    theirs = dict(qwen3_vl.model.named_parameters())
    assert sorted(names) == sorted(name for name in theirs if "visual" not in name)
    assert all(torch.equal(p, theirs[n]) for n, p in engine.language_model.model.named_parameters())


@pytest.mark.parametrize("width", [128, 384, 513])
def test_rows_of_another_width_are_refused_at_start(qwen3_vl: OneShot, width: int) -> None:
    with pytest.raises(ModelMismatchError, match=f"{width} wide, this model takes 512"):
        Engine(load_language_model(qwen3_vl.folder), row_width=width)


def test_more_levels_than_layers_are_refused_at_start(kept_checkpoint: Callable[..., Path]) -> None:
    folder = kept_checkpoint(text_layers=2)
    with pytest.raises(ModelMismatchError, match="3 DeepStack levels, 2 layers"):
        load_language_model(folder)


async def test_rows_of_the_wrong_length_are_refused(qwen3_vl: OneShot) -> None:
    async def short(image: int, begin: int, end: int) -> Tensor:
        return qwen3_vl.rows[image][begin : end - 1]

    with pytest.raises(InvalidRequestError, match="image 0: 6 rows, not 7"):
        await prefill(engine_of(qwen3_vl), qwen3_vl, 10, short)


async def test_the_event_loop_stays_free_while_a_chunk_is_prefilled(qwen3_vl: OneShot) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticker = asyncio.create_task(tick())
    await prefill(engine_of(qwen3_vl), qwen3_vl, 4, qwen3_vl.fetch)
    ticker.cancel()
    assert ticks > 5
