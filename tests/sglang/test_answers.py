"""Fed by the service, an engine answers as with its own tower; controls that must differ do."""

from collections.abc import Iterator

import httpx
import pytest

from testing.answers import data_url
from testing.photos import photo
from testing.sglang_engine import CHUNK_TOKENS, SglangEngine
from tests.engines.answers import *  # noqa: F403 - tests for these fixtures
from tests.engines.answers import PROMPTS, TOLERANCE, Own, assert_equal
from tests.sglang.conftest import AS_SEEN, CHUNKS, TRANSPARENT, TURNED, let_it_encode
from tests.sglang.counters import all_fetches
from tests.vllm.restartable import Restartable


@pytest.fixture(autouse=True)
def service_alone(engine: SglangEngine) -> Iterator[None]:
    """Check that SGLang's own tower encodes nothing."""
    before = engine.by_own_tower()
    yield
    assert engine.by_own_tower() == before


@pytest.mark.story("transparent and turned images")
@pytest.mark.parametrize(("file", "name"), [(TURNED, "upright"), (TRANSPARENT, "on white")])
def test_an_image_is_seen_upright_and_on_white(
    engine: SglangEngine, own: Own, file: bytes, name: str
) -> None:
    """SGLang's own processor ignores orientation and transparency."""
    assert_equal(engine.ask([file, *AS_SEEN[name][1:]]), own(AS_SEEN[name]))


@pytest.mark.story("chat completions")
def test_a_chat_is_answered_as_its_prompt(engine: SglangEngine) -> None:
    images = [photo(200, 300, 51), photo(128, 128, 52, "PNG")]
    content = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    asked = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}],
    }
    before = engine.fetched()
    response = httpx.post(f"{engine.url}/v1/chat/completions", json=asked, timeout=600)
    assert response.status_code == 200, response.text
    said = [each["logprob"] for each in response.json()["choices"][0]["logprobs"]["content"]]
    answer = engine.ask([*images, "what?"])
    likeliest = [step[token] for token, step in zip(answer.tokens, answer.top, strict=True)]
    assert said == pytest.approx(likeliest, abs=TOLERANCE)
    assert engine.fetched() - before == len(images), "the second request finds them in SGLang's cache"


@pytest.mark.story("prefix caching")
def test_a_second_request_finds_the_prompt_in_the_prefix_cache(engine: SglangEngine) -> None:
    parts = PROMPTS["text between"]
    engine.forget()
    told = [engine.generate(parts).json()["meta_info"] for _ in range(2)]
    assert told[0]["cached_tokens"] == 0
    assert told[1]["cached_tokens"] == told[1]["prompt_tokens"] - 1


def test_a_chunk_fetches_the_images_that_overlap_it_and_no_others(
    engine: SglangEngine, service: Restartable
) -> None:
    """The service has encoded the images before, so that every Fetch is that of a prefill chunk."""
    tokens = let_it_encode(service, CHUNKS)
    server = service.process
    after = len(server.lines)
    engine.forget()  # the beginning of a prompt that SGLang knows is in no chunk
    engine.ask(CHUNKS)
    first_chunks, position = [], 1 + len("user\n")
    for part in CHUNKS:
        if isinstance(part, bytes):
            first_chunks.append((position + 1) // CHUNK_TOKENS)
        position += 2 + tokens[part] if isinstance(part, bytes) else len(part)
    calls = all_fetches(server, after, len(tokens))
    assert calls == [first_chunks.count(chunk) for chunk in sorted({*first_chunks})]
