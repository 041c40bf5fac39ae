"""Other kinds of engines give the same answers: another family, two ranks, no tower, inline rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.server_process import ServerProcess, running
from testing.vllm_engine import Answer, VllmEngine
from tests.engines.answers import TOLERANCE, prompt
from tests.vllm.conftest import checkpoint_of
from tests.vllm.service import SERVICE, SETTINGS

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe")
PROMPTS = [prompt(600 + images, images) for images in range(1, 9)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family."""
    return checkpoint_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def served(family: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint."""
    with running(family, executable=SERVICE, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def right(family: Path, served: ServerProcess) -> list[Answer]:
    """The answers of the engine's own tower."""
    return answers(family, served, own=True)


def answers(model: Path, server: ServerProcess, *, own: bool = False, **options: Any) -> list[Answer]:
    """Send all prompts at once to an engine with these options."""
    engine = VllmEngine(model, server.endpoint, **options)
    try:
        ended = engine.ask_all(PROMPTS, own=own)
        engine.assert_nothing_is_held()
        return ended
    finally:
        engine.close()


def assert_all_equal(ours: list[Answer], right: list[Answer]) -> None:
    assert [answer.reason for answer in ours] == ["length"] * len(PROMPTS)
    assert max(each.distance(own) for each, own in zip(ours, right, strict=True)) <= TOLERANCE


@pytest.mark.story("Qwen3-VL-MoE")
@pytest.mark.story("Qwen2.5-VL")
def test_every_family_answers_as_with_its_own_tower(
    family: Path, served: ServerProcess, right: list[Answer]
) -> None:
    assert_all_equal(answers(family, served), right)


@pytest.mark.story("no tower in the engine")
def test_an_engine_without_a_tower_gives_the_same_answers(
    family: Path, served: ServerProcess, right: list[Answer]
) -> None:
    assert_all_equal(answers(family, served, limit_mm_per_prompt={"image": 0, "video": 0}), right)


@pytest.mark.story("tensor parallel, on one host")
def test_two_ranks_give_the_same_answers(family: Path, served: ServerProcess, right: list[Answer]) -> None:
    assert_all_equal(answers(family, served, tensor_parallel_size=2), right)


def test_inline_rows_give_the_same_answers(family: Path, served: ServerProcess, right: list[Answer]) -> None:
    assert_all_equal(answers(family, served, extra={"shared_memory": False}), right)
