"""Qwen2.5-VL, whose features SGLang moves to the device before it asks the model for rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.sglang_engine import SglangEngine, answer_of, serving
from tests.sglang.conftest import (
    LONG,
    PROMPTS,
    Own,
    answers_of,
    assert_equal,
    checkpoint_of,
    images_in,
    service_of,
    variables,
)
from tests.sglang.counters import by_own_tower, fetched
from tests.sglang.gateways import fed
from tests.sglang.test_faults import asked_as_the_service_dies
from tests.vllm.restartable import Restartable

ASKED = [PROMPTS[name] for name in ("one png", "text between", "the same twice", "sixteen")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> Own:
    return answers_of(checkpoint, [*ASKED, LONG])


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Restartable]:
    with service_of(checkpoint) as service:
        yield service


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: Restartable, own: object) -> Iterator[SglangEngine]:
    with serving(checkpoint, environment=variables(service.endpoint)) as engine:
        yield engine


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_an_answer_is_that_of_the_own_tower(engine: SglangEngine, own: Own, number: int) -> None:
    before = fetched(engine)
    assert_equal(engine.ask(ASKED[number]), own(ASKED[number]))
    assert fetched(engine) - before == len(images_in(ASKED[number]))
    assert by_own_tower(engine) == 0


def test_an_engine_that_the_gateway_feeds_answers_as_by_its_own_tower(
    checkpoint: Path, service: Restartable, own: Own
) -> None:
    with fed(checkpoint, service, encoders=3) as (engine, gateway):
        for parts in ASKED:
            before, images = gateway.count("images"), sum(isinstance(part, bytes) for part in parts)
            assert_equal(engine.ask(parts), own(parts))
            assert gateway.count("images") - before == images


def test_a_service_that_dies_within_a_prefill_is_replaced_by_the_own_tower(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    assert_equal(answer_of(asked_as_the_service_dies(engine, service, LONG)), own(LONG))
    assert by_own_tower(engine, "rows") > 0
    assert engine.process.poll() is None
