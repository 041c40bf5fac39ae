"""Families whose images vLLM lays out itself: the service's rows give the answers of the engine's own tower."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.photos import photo
from testing.server_process import ServerProcess, running
from testing.vllm_engine import VllmEngine
from testing.vllm_families import OPTIONS, PROMPTS, SMALL, WIDE, compare, write_small_family
from tests.vllm.service import SERVICE, SETTINGS

USUAL = ("gemma3", "idefics3")
ROWS_TOLERANCE = 1e-5
"""Relative difference of a row from that of vLLM's own tower, another implementation of the same layers."""
TOLERANCE = 1e-5
"""Difference of a log-probability that follows from such rows."""


@pytest.fixture(
    scope="module",
    params=[name if name in USUAL else pytest.param(name, marks=pytest.mark.families) for name in SMALL],
)
def family(request: Any) -> str:
    """The model type."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint."""
    return write_small_family(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint."""
    with running(model, executable=SERVICE, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def engine(model: Path, service: ServerProcess) -> Iterator[VllmEngine]:
    """An engine of that checkpoint."""
    engine = VllmEngine(model, service.endpoint, **OPTIONS)
    yield engine
    engine.close()


@pytest.mark.story("models of `transformers`")
def test_the_service_gives_the_answers_of_the_own_tower(engine: VllmEngine) -> None:
    found = compare(engine)
    assert found.rows <= ROWS_TOLERANCE
    assert found.answers <= TOLERANCE
    assert not found.encoded, "the engine's own tower ran"
    engine.assert_nothing_is_held()


def test_another_picture_of_the_same_size_changes_the_answer(engine: VllmEngine) -> None:
    other = photo(400, 250, 99, "PNG")
    one, two = engine.ask(["x", WIDE]), engine.ask(["x", other])
    assert one.distance(two) > 10 * TOLERANCE


def test_preemption_at_any_step_does_not_change_the_answer(engine: VllmEngine) -> None:
    own = engine.ask(PROMPTS[-1], own=True)
    for preempt_at in (1, 2, 4):
        engine.forget()
        request_id, ended = engine.start(PROMPTS[-1]), {}
        for step in range(30):
            if step == preempt_at:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            ended |= engine.step()
        ended = ended or engine.run(request_id)
        assert ended[request_id].distance(own) <= TOLERANCE
        engine.assert_nothing_is_held()
