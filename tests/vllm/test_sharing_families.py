"""Engines of any family share a store of which only the width of a row is known: each image runs one tower once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.photos import photo
from testing.server_process import running
from testing.vllm_engine import Answer, Engine, Part
from testing.vllm_families import SMALL, write_small_family
from testing.vllm_sharing import SharingEngine
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_answers import TOLERANCE

USUAL = ("gemma3", "idefics3")
PROMPT: list[Part] = ["a", photo(400, 250, 1, "PNG"), "b", photo(120, 333, 2, "PNG"), "c"]
CHUNK_TOKENS = 512  # Gemma's rows attend to each other in both directions: one step prefills them all
WIDTH = 128


def engine_of(kind: type[Engine], model: Path, endpoint: str, **options: Any) -> Engine:
    """An engine whose steps are long enough for the images of every family."""
    given = {"limit_mm_per_prompt": {"image": 4}, "max_num_batched_tokens": CHUNK_TOKENS, **options}
    return kind(model, endpoint, **given)


@pytest.fixture(
    scope="module",
    params=[name if name in USUAL else pytest.param(name, marks=pytest.mark.families) for name in SMALL],
)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of each family; nothing of it is where the store runs."""
    yield write_small_family(tmp_path_factory.mktemp(request.param), request.param)


def test_a_second_engine_runs_no_tower(model: Path) -> None:
    settings = {**SETTINGS, "store_only": "yes", "accept_put": "yes", "row_width": WIDTH}
    answers: list[Answer] = []
    with running(Path("a-model"), executable=SERVICE, **settings) as store:
        for encoded in (2, 0):
            engine = engine_of(SharingEngine, model, store.endpoint)
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
