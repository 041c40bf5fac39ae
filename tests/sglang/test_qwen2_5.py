"""Qwen2.5-VL, whose features SGLang moves to the device before it asks the model for rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.sglang_engine import SglangEngine, serving
from tests.engines.answers import USUAL, Own, assert_answers_equal
from tests.sglang.conftest import LONG, answers_of, checkpoint_of, service_of, variables
from tests.sglang.gateways import assert_fed, fed
from tests.sglang.test_faults import assert_own_tower_takes_over
from tests.vllm.restartable import Restartable


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> Own:
    return answers_of(checkpoint, [*USUAL.values(), LONG])


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Restartable]:
    with service_of(checkpoint) as service:
        yield service


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: Restartable, own: object) -> Iterator[SglangEngine]:
    with serving(checkpoint, environment=variables(service.endpoint)) as engine:
        yield engine


@pytest.mark.story("Qwen2.5-VL")
def test_answers_are_those_of_the_own_tower(engine: SglangEngine, own: Own) -> None:
    assert_answers_equal(engine, own)
    assert engine.by_own_tower() == 0


@pytest.mark.story("Qwen2.5-VL")
def test_an_engine_that_the_gateway_feeds_answers_as_by_its_own_tower(
    checkpoint: Path, service: Restartable, own: Own
) -> None:
    with fed(checkpoint, service, encoders=3) as (engine, gateway):
        assert_fed(engine, gateway, own, USUAL)


def test_a_service_that_dies_within_a_prefill_is_replaced_by_the_own_tower(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    assert_own_tower_takes_over(engine, service, own)
