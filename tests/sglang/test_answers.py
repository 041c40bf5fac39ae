"""Fed by the service, an engine answers as with its own tower; controls that must differ do."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import httpx
import pytest

from testing.answers import Part, data_url
from testing.photos import photo
from testing.sglang_engine import CHUNK_TOKENS, SglangEngine
from tests.sglang.conftest import (
    AT_ONCE,
    CHUNKS,
    PROMPTS,
    TOLERANCE,
    TRANSPARENT,
    TURNED,
    Own,
    assert_equal,
    images_in,
    let_it_encode,
)
from tests.sglang.counters import all_fetches, by_own_tower, fetched
from tests.vllm.restartable import Restartable


@pytest.mark.parametrize("name", PROMPTS)
def test_an_answer_is_that_of_the_own_tower(
    engine: SglangEngine, service: Restartable, own: Own, name: str
) -> None:
    engine.forget()
    different = images_in(PROMPTS[name])
    encoded, before, own_before = service.process.encodes(), fetched(engine), by_own_tower(engine)
    assert_equal(engine.ask(PROMPTS[name]), own(PROMPTS[name]))
    assert fetched(engine) - before == len(different)
    assert service.process.encodes() - encoded == len(different), "each image is encoded once, by the service"
    assert by_own_tower(engine) == own_before


@pytest.mark.parametrize(("file", "name"), [(TURNED, "upright"), (TRANSPARENT, "on white")])
def test_an_image_is_seen_upright_and_on_white(
    engine: SglangEngine, own: Own, file: bytes, name: str
) -> None:
    """SGLang's own processor ignores orientation and transparency."""
    assert_equal(engine.ask([file, *PROMPTS[name][1:]]), own(PROMPTS[name]))


def test_all_at_once_are_answered_as_each_alone(engine: SglangEngine, own: Own) -> None:
    before, own_before = fetched(engine), by_own_tower(engine)
    with ThreadPoolExecutor(len(AT_ONCE)) as pool:
        together = list(pool.map(engine.ask, AT_ONCE.values()))
    for parts, answer in zip(AT_ONCE.values(), together, strict=True):
        assert_equal(answer, own(parts))
    assert fetched(engine) - before == len(images_in(chain(*AT_ONCE.values())))
    assert by_own_tower(engine) == own_before


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
    before = fetched(engine)
    response = httpx.post(f"{engine.url}/v1/chat/completions", json=asked, timeout=600)
    assert response.status_code == 200, response.text
    said = [each["logprob"] for each in response.json()["choices"][0]["logprobs"]["content"]]
    answer = engine.ask([*images, "what?"])
    likeliest = [step[token] for token, step in zip(answer.tokens, answer.top, strict=True)]
    assert said == pytest.approx(likeliest, abs=TOLERANCE)
    assert fetched(engine) - before == len(images), "the second request finds them in SGLang's cache"


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


def test_other_images_or_another_order_change_the_answer(engine: SglangEngine) -> None:
    first, second, third = (photo(256, 192, seed, "PNG") for seed in (31, 32, 33))
    right = engine.ask(["A: ", first, " B: ", second, " differ?"])
    others: list[list[Part]] = [
        ["A: ", first, " B: ", third, " differ?"],
        ["A: ", second, " B: ", first, " differ?"],
    ]
    for parts in others:
        other = engine.ask(parts)
        distances = [
            abs(a[token] - b[token])
            for a, b in zip(right.top[:1], other.top[:1], strict=True)
            for token in a.keys() & b.keys()
        ]
        assert right.tokens != other.tokens or max(distances) > 100 * TOLERANCE
