"""The newest release that pyproject allows. It requires a newer torch, but runs with the installed one."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testing.answers import data_url
from testing.engine_environments import SGLANG_FOLDER
from testing.photos import photo
from testing.sglang_engine import SglangEngine, serving
from tests.engines.answers import Own, assert_answers_equal
from tests.sglang.conftest import UNREADABLE, variables
from tests.sglang.test_faults import assert_a_request_without_rows_ends
from tests.vllm.restartable import Restartable


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: Restartable, own: object) -> Iterator[SglangEngine]:
    """An engine of that release."""
    newest = SGLANG_FOLDER / "newest"
    if not newest.exists():
        pytest.skip("make test-sglang installs it")
    with serving(checkpoint, environment=variables(service.endpoint, newest)) as engine:
        yield engine


@pytest.mark.story("the newest release")
def test_the_engine_is_the_newest_supported_release(engine: SglangEngine) -> None:
    assert httpx.get(f"{engine.url}/server_info", timeout=60).json()["version"] == "0.5.23"


@pytest.mark.story("the newest release")
def test_the_newest_release_answers_as_the_oldest_with_its_own_tower(engine: SglangEngine, own: Own) -> None:
    assert_answers_equal(engine, own)
    assert engine.by_own_tower() == 0


def test_a_damaged_image_is_400_with_our_text(engine: SglangEngine) -> None:
    file = photo(640, 480, 62)
    response = engine.generate(["x ", file, "?"], image_data=[data_url(file[: len(file) // 2])])
    assert response.status_code == 400
    assert "image 0: " in response.text


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_request_without_rows_is_503(
    engine: SglangEngine, service: Restartable, own: Own, name: str
) -> None:
    assert_a_request_without_rows_ends(engine, service, own, name)
