"""Chat requests end to end: a real server, the prefetching session and the reference engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from encoder_contract.errors import InvalidImageError, InvalidRequestError, ModelMismatchError
from prefill_client import EncoderClient, Layout, expand_prompt
from prefill_reference.chat import Chat, Prefilled
from prefill_reference.engine import Engine
from prefill_reference.language_model import LanguageModel, load_language_model
from prefill_reference.prefix import PrefixCache
from testing.photos import photo
from testing.reference_model import OneShot
from tests.gate import Gate
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

PHOTOS = [photo(300, 220, 1), photo(256, 400, 2, orientation=6), photo(280, 280, 3, orientation=3)]
# Float32 rounding: the server's rows differ by up to 1e-5 of their size from those of `transformers`.
MAX_ERROR = 5e-5


@pytest.fixture(scope="module")
def language_model(checkpoint: Path) -> LanguageModel:
    return load_language_model(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def reference_model(checkpoint: Path) -> OneShot:
    return OneShot(checkpoint)


@pytest.fixture
def engine(language_model: LanguageModel) -> Engine:
    return Engine(language_model, row_width=language_model.width)


@pytest.fixture
async def chat(client: EncoderClient, engine: Engine, tokenizer: Any) -> AsyncIterator[Chat]:
    chat = Chat(client, engine, tokenizer, chunk_tokens=50, prefixes=PrefixCache(10_000))
    yield chat
    chat.close()


def user(text: str, *images: bytes) -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def error_of(prefilled: Prefilled, reference_model: OneShot, images: list[bytes]) -> float:
    grids = [image.grid for image in prefilled.images]
    expected = reference_model.logits(prefilled.layout.token_ids.tolist(), images, grids)
    return float((prefilled.logits - expected).abs().max() / expected.abs().max())


async def test_chunked_prefill_with_fetched_rows_equals_one_shot_logits(
    chat: Chat, reference_model: OneShot
) -> None:
    prefilled = await chat.prefill([user("What is this?", *PHOTOS)])
    assert len(prefilled.runs) > 4
    assert error_of(prefilled, reference_model, PHOTOS) < MAX_ERROR


async def test_a_prompt_is_laid_out_with_the_servers_grid_of_a_rare_image(
    chat: Chat, reference_model: OneShot
) -> None:
    images = [PHOTOS[0], photo(256, 400, 2, "TIFF", orientation=6), photo(280, 300, 3, "PPM")]
    prefilled = await chat.prefill([user("What is this?", *images)])
    assert error_of(prefilled, reference_model, images) < MAX_ERROR


async def test_a_follow_up_reuses_the_kv_cache(chat: Chat, reference_model: OneShot, tokenizer: Any) -> None:
    messages = [user("What is this?", *PHOTOS[:2])]
    first = await chat.prefill(messages)
    tokens = [token async for token in chat.decode(first, max_tokens=6)]
    messages += [{"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)}]
    second = await chat.prefill([*messages, user("And this?", PHOTOS[2])])
    assert second.prefix_tokens >= first.layout.tokens - 1
    fetched = {window.image for run in second.runs for window in run.chunk.windows}
    assert fetched == {2}
    assert set(second.submitted) == {2}
    assert error_of(second, reference_model, PHOTOS) < MAX_ERROR


async def test_a_prompt_with_another_image_shares_the_prefix_before_it(
    chat: Chat, reference_model: OneShot
) -> None:
    first = await chat.prefill([user("What is this?", PHOTOS[0], photo(280, 280, 4))])
    _ = [token async for token in chat.decode(first, max_tokens=1)]
    second = await chat.prefill([user("What is this?", PHOTOS[0], PHOTOS[2])])
    assert second.prefix_tokens == second.layout.spans[1].begin
    assert error_of(second, reference_model, [PHOTOS[0], PHOTOS[2]]) < MAX_ERROR


async def test_a_request_prefills_while_another_one_waits(chat: Chat, gate: Gate) -> None:
    with gate.closed():
        waiting = asyncio.create_task(chat.prefill([user("What is this?", PHOTOS[0])]))
        other = await asyncio.wait_for(chat.prefill([user("Hello")]), PATIENCE_S)
        assert not waiting.done()
    assert len(other.runs) >= 1
    assert len((await waiting).images) == 1


BAD = {
    "no image": b"no image",
    "one that only the server reads": photo(256, 400, 2, "TIFF")[:40],
    "undecodable": PHOTOS[1][:-3000],
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_image_is_named_by_its_place_in_the_prompt(chat: Chat, what: str) -> None:
    with pytest.raises(InvalidImageError, match="image 1 of the prompt") as bad:
        await chat.prefill([user("What is this?", PHOTOS[0], BAD[what])])
    assert bad.value.image == 1
    assert len((await chat.prefill([user("And this?", PHOTOS[0])])).images) == 1


async def test_placeholder_in_a_users_text_is_refused(chat: Chat) -> None:
    with pytest.raises(InvalidRequestError, match="placeholders"):
        await chat.prefill([user("look: <|image_pad|>", PHOTOS[0])])


async def test_an_encoder_of_another_model_is_refused_at_start(
    client: EncoderClient, kept_checkpoint: Callable[..., Path]
) -> None:
    other = load_language_model(kept_checkpoint("qwen2_5_vl"), dtype=torch.float32)
    with pytest.raises(ModelMismatchError, match="512 wide, this model takes 128"):
        Engine(other, row_width=client.description.width)


class TestPrefixCache:
    IMAGE = 7

    def kept(self, engine: Engine, prefixes: PrefixCache, layout: Layout, *generated: int) -> None:
        cache = engine.language_model.new_cache()
        tokens = torch.zeros(1, layout.tokens + len(generated), dtype=torch.int64)
        embeddings = engine.language_model.embed(tokens)
        positions = torch.arange(tokens.shape[1]).expand(3, 1, -1)
        engine.language_model.forward(embeddings, positions, cache, None)
        prefixes.put(layout, generated, [bytes([i]) for i in range(len(layout.spans))], cache)

    def test_an_image_ends_the_prefix_unless_its_digest_is_the_same(self, engine: Engine) -> None:
        layout = expand_prompt([1, self.IMAGE, 2, self.IMAGE, 3], self.IMAGE, [4, 5])
        for digests, tokens in (([b"\0", b"\1"], 11), ([b"\0", b"x"], 6), ([b"x", b"\1"], 1)):
            prefixes = PrefixCache(100)
            self.kept(engine, prefixes, layout)
            prefix = prefixes.take(layout, digests)
            assert prefix is not None
            assert (prefix.tokens, prefix.cache.get_seq_length()) == (tokens, tokens)
            assert prefixes.take(layout, digests) is None

    def test_a_placeholder_in_a_generated_answer_is_not_an_image(self, engine: Engine) -> None:
        prefixes = PrefixCache(100)
        self.kept(engine, prefixes, expand_prompt([1, 2], self.IMAGE, []), self.IMAGE, 3)
        prefix = prefixes.take(expand_prompt([1, 2, self.IMAGE, 3, 4], self.IMAGE, [1]), [b"\0"])
        assert prefix is not None
        assert prefix.tokens == 2

    def test_take_returns_the_longest_prefix_and_put_evicts_the_oldest(self, engine: Engine) -> None:
        prefixes = PrefixCache(20)
        for length in (4, 8, 6):
            self.kept(engine, prefixes, expand_prompt(np.arange(100, 100 + length), self.IMAGE, []))
        assert prefixes.tokens == 18
        self.kept(engine, prefixes, expand_prompt(np.arange(50, 55), self.IMAGE, []))
        assert prefixes.tokens == 19  # the one of 4 is gone
        prefix = prefixes.take(expand_prompt(np.arange(100, 130), self.IMAGE, []), [])
        assert prefix is not None
        assert prefix.tokens == 8
        self.kept(engine, prefixes, expand_prompt(np.arange(200, 221), self.IMAGE, []))
        assert prefixes.tokens == 11  # one that is too long for the bound is not kept

    def test_a_linear_attention_cache_is_reused_only_completely(
        self, kept_checkpoint: Callable[..., Path]
    ) -> None:
        model = load_language_model(kept_checkpoint("qwen3_5"), dtype=torch.float32)
        engine, prefixes = Engine(model, row_width=model.width), PrefixCache(100)
        self.kept(engine, prefixes, expand_prompt([1, 2, 3, 4], self.IMAGE, []))
        assert prefixes.take(expand_prompt([1, 2, 3, 5, 6], self.IMAGE, []), []) is None
        prefix = prefixes.take(expand_prompt([1, 2, 3, 4, 5], self.IMAGE, []), [])
        assert prefix is not None
        assert prefix.tokens == 4
