"""The benchmark of updates: what counts as stale, when it refuses to begin, and a small run of a real engine."""

import json
from time import monotonic

import pytest

from bench.updates import BENCHMARK
from bench.updates_parts.chats import (
    FAR,
    PHOTOS,
    REPEATS,
    TOLERANCE,
    Answer,
    Chats,
    Outcomes,
    Prompts,
    check_that_versions_differ,
)
from bench.updates_parts.versions import FROZEN, START, TRAINED, Timeline
from testing.engine_environments import VLLM_PYTHON
from tests.bench.benchmark_run import figures_of_run

ANSWERS: dict[str, Answer] = {START: (-1.0, -2.0), FROZEN: (-1.0, -3.0), TRAINED: (-1.5, -2.0)}
REFERENCES = {version: [answer] * PHOTOS for version, answer in ANSWERS.items()}


def judged(timeline: Timeline, answer: Answer, began_s: float, ended_s: float) -> Outcomes:
    outcomes = Outcomes()
    Chats("", Prompts(), REFERENCES, timeline).judge(outcomes, 0, answer, (began_s, ended_s))
    return outcomes


def test_an_answer_is_that_of_a_version_that_the_engine_had_during_the_request() -> None:
    timeline, before_s = Timeline(START), monotonic()
    assert timeline.between(before_s, before_s) == {START}
    with timeline.update(TRAINED):
        during_s = monotonic()
        assert timeline.between(during_s, during_s) == {START, TRAINED}
    after_s = monotonic()
    assert timeline.between(before_s, after_s) == {START, TRAINED}
    assert timeline.between(after_s, after_s) == {TRAINED}
    assert judged(timeline, ANSWERS[TRAINED], after_s, after_s).right == {TRAINED: 1}
    assert judged(timeline, ANSWERS[START], before_s, after_s).right == {START: 1}
    assert len(judged(timeline, ANSWERS[START], after_s, after_s).stale) == 1
    assert len(judged(timeline, ANSWERS[TRAINED], before_s - 1, before_s).stale) == 1
    assert len(judged(timeline, ANSWERS[FROZEN], before_s, after_s).stale) == 1
    assert len(judged(timeline, (-1.25, -2.0), before_s, after_s).mixed) == 1
    nearly = (-1.0 - 3 * TOLERANCE, -2.0)
    assert len(judged(timeline, nearly, before_s, after_s).mixed) == 1
    assert len(judged(timeline, nearly, after_s, after_s).stale) == 1, "however it differs from its version"


def test_versions_that_answer_alike_are_refused() -> None:
    """Stale rows could not be told from right ones, so the benchmark could not fail."""
    check_that_versions_differ(REFERENCES)
    alike = [*REFERENCES[START][:-1], (-1.0, -3.0 + FAR / 2)]
    with pytest.raises(RuntimeError, match=f"picture {PHOTOS - 1}: {START} and {FROZEN}"):
        check_that_versions_differ({**REFERENCES, START: alike})


def test_requests_in_a_row_share_a_file_and_no_later_ones_do() -> None:
    prompts = Prompts()
    contents = [json.dumps(prompts.content(number)) for number in range(2 * PHOTOS * REPEATS)]
    assert len(set(contents)) == 2 * PHOTOS
    assert contents[0] == contents[REPEATS - 1] != contents[REPEATS]
    assert prompts.picture(0) == prompts.picture(PHOTOS * REPEATS)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no .venv-vllm: make test-vllm")
def test_a_real_engine_is_updated_and_every_answer_is_compared() -> None:
    found = figures_of_run(BENCHMARK.command(dry_run=True))
    assert found["answers"] >= 64
    assert {found[wrong] for wrong in ("stale", "mixed", "failed_frozen", "failed_trained")} == {0}
    assert min(found["updates_frozen"], found["updates_trained"]) >= 2
