"""With `gating` "chunk", a prefill starts while later images of its prompt are still being encoded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.answers import Part, data_url
from testing.photos import photo
from testing.sglang_engine import SglangEngine, answer_of, serving
from tests.engines.answers import USUAL, Own, assert_answers_equal, assert_equal
from tests.sglang.conftest import variables
from tests.sglang.counters import all_fetches
from tests.sglang.test_faults import assert_own_tower_takes_over
from tests.vllm.restartable import Restartable

JPEG = photo(640, 480, 62)
DAMAGED = JPEG[: len(JPEG) // 2]
"""Its header is whole: Submit takes it, and the service finds out when it decodes it."""


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: Restartable, own: object) -> Iterator[SglangEngine]:
    environment = variables(service.endpoint, gating="chunk")
    with serving(checkpoint, environment=environment) as engine:
        yield engine


def new_images(seed: int) -> list[Part]:
    return [part for number in range(16) for part in (f"{number}: ", photo(240, 250, seed + number))]


def test_answers_are_those_of_the_own_tower(engine: SglangEngine, own: Own) -> None:
    assert_answers_equal(engine, own)
    assert engine.by_own_tower() == 0


@pytest.mark.story("a prefill waits only for the images that it reads")
def test_with_chunk_gating_only_chunks_wait_for_images(engine: SglangEngine, service: Restartable) -> None:
    after = len(service.process.lines)
    engine.ask(new_images(6000))
    calls = all_fetches(service.process, after, 16)
    assert sum(calls) == 16
    assert max(calls) < 4, "no call waits for all images"


@pytest.mark.story("an image that cannot be encoded")
@pytest.mark.parametrize("wrong", [0, 8, 15])
def test_a_damaged_image_ends_its_request_alone_with_400_and_our_text(
    engine: SglangEngine, own: Own, wrong: int
) -> None:
    parts = new_images(6100)
    urls = [data_url(part) for part in parts if isinstance(part, bytes)]
    right = answer_of(engine.generate(parts))
    response = engine.generate(parts, image_data=[*urls[:wrong], data_url(DAMAGED), *urls[wrong + 1 :]])
    assert response.status_code == 400, response.text
    assert f"image {wrong}: " in response.text
    assert "the encoder service does not answer" not in response.text
    assert_equal(engine.ask(parts), right)
    assert_equal(engine.ask(USUAL["one png"]), own(USUAL["one png"]))
    assert engine.counted("lost_images") == engine.by_own_tower() == 0


def test_the_same_damaged_image_is_refused_again(engine: SglangEngine) -> None:
    for _ in range(3):
        response = engine.generate(["x ", b""], image_data=[data_url(DAMAGED)])
        assert response.status_code == 400, response.text
        assert "image 0: " in response.text


def test_a_service_that_dies_within_a_prefill_is_replaced_by_the_own_tower(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    assert_own_tower_takes_over(engine, service, own)
