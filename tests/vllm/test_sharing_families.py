"""Engines of any family share a store that knows only the width of a row: each image is encoded once."""

from pathlib import Path
from typing import Any

import pytest

from testing.photos import photo
from testing.server_process import running
from testing.vllm_engine import Answer, Part
from testing.vllm_families import OPTIONS, SMALL, write_small_family
from testing.vllm_sharing import SharingEngine
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_answers import TOLERANCE

USUAL = ("gemma3", "idefics3")
PROMPT: list[Part] = ["a", photo(400, 250, 1, "PNG"), "b", photo(120, 333, 2, "PNG"), "c"]
WIDTH = 128


@pytest.fixture(
    scope="module",
    params=[name if name in USUAL else pytest.param(name, marks=pytest.mark.families) for name in SMALL],
)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family. The store does not have it."""
    return write_small_family(tmp_path_factory.mktemp(request.param), request.param)


def test_a_second_engine_runs_no_tower(model: Path) -> None:
    settings = {**SETTINGS, "store_only": "yes", "accept_put": "yes", "row_width": WIDTH}
    answers: list[Answer] = []
    with running(Path("a-model"), executable=SERVICE, **settings) as store:
        for encoded in (2, 0):
            engine = SharingEngine(model, store.endpoint, **OPTIONS)
            try:
                answers.append(engine.ask(PROMPT, own=True))
                engine.assert_nothing_is_held()
                assert engine.encoded == encoded
            finally:
                engine.close()
        assert store.metrics().total("put_images_total", outcome="kept") == 2
    first, second = answers
    assert first.reason == second.reason == "length"
    assert first.distance(second) <= TOLERANCE
