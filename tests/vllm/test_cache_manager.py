"""With the cache manager, prefill runs exactly up to the first missing image, and continues when it arrives."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import CHUNK_TOKENS, VllmEngine
from tests.vllm.test_gate import TOLERANCE, begin_of_first, begin_of_second, step_until_parked, two_images


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: ServerProcess) -> Iterator[VllmEngine]:
    """An engine with the cache manager."""
    engine = VllmEngine(checkpoint, service.endpoint, exact=True)
    yield engine
    engine.close()


@pytest.mark.story("a prefill waits only for the images that it reads")
def test_prefill_runs_exactly_up_to_a_missing_image(engine: VllmEngine) -> None:
    first, second, prompt = two_images(510)
    engine.forget()
    engine.submit(first)
    request_id = engine.start(prompt)
    engine.step()
    begin = begin_of_second(engine)
    engine.run_until(lambda: engine.computed(request_id) > begin_of_first(engine))  # it has arrived
    assert begin % CHUNK_TOKENS, "gating by step must not end there, too"
    assert step_until_parked(engine, request_id) == begin
    engine.submit(second)
    assert engine.run(request_id)[request_id].distance(engine.ask(prompt, own=True)) <= TOLERANCE
    engine.assert_nothing_is_held()


def test_text_before_the_first_image_is_prefilled_without_rows(engine: VllmEngine) -> None:
    engine.forget()
    late = photo(180, 160, 5, "PNG")
    parts = ["t" * 150, late]
    request_id = engine.start(parts)
    begin = step_until_parked(engine, request_id)
    assert begin > 150
    engine.submit(late)
    assert engine.run(request_id)[request_id].distance(engine.ask(parts, own=True)) <= TOLERANCE
