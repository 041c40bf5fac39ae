"""Two tensor-parallel ranks: each fetches its rows, and both agree on who encodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.sglang_engine import SglangEngine, answer_of, serving
from tests.sglang.conftest import AT_ONCE, LONG, PROMPTS, Own, assert_equal, images_in, variables
from tests.sglang.counters import by_own_tower, fetched
from tests.sglang.gateways import fed
from tests.sglang.test_faults import (
    asked_as_the_service_dies,
    assert_a_request_without_rows_ends,
    until_served,
)
from tests.sglang.test_weights import Versions, assert_parameters_are_compared, assert_rows_follow
from tests.sglang.test_weights import versions as versions
from tests.sglang.trainers import broadcasting, send
from tests.vllm.restartable import Restartable

TWO_RANKS = ("--tp", "2")
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: Restartable, own: object) -> Iterator[SglangEngine]:
    """An engine of two ranks that takes its images from the service."""
    environment = {**variables(service.endpoint), **BOUND}
    with serving(checkpoint, *TWO_RANKS, environment=environment) as engine:
        yield engine


@pytest.mark.parametrize("name", ["one png", "text between", "sixteen"])
def test_two_ranks_answer_as_one(engine: SglangEngine, service: Restartable, own: Own, name: str) -> None:
    engine.forget()
    before = fetched(engine)
    assert_equal(engine.ask(AT_ONCE[name]), own(AT_ONCE[name]))
    assert fetched(engine) - before == len(images_in(AT_ONCE[name])), "one rank counts"
    assert by_own_tower(engine) == 0


def test_a_service_that_dies_within_a_prefill_is_replaced_by_the_tower_of_both(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    assert_equal(answer_of(asked_as_the_service_dies(engine, service, LONG)), own(LONG))
    assert by_own_tower(engine, "rows") > 0
    assert engine.process.poll() is None
    service.start()
    until_served(engine)
    assert service.process.encodes() > 0


def test_both_ranks_end_a_request_without_rows(engine: SglangEngine, service: Restartable, own: Own) -> None:
    assert_a_request_without_rows_ends(engine, service, own, "in a chunk with more to come")


def test_rows_follow_the_tensors_that_a_trainer_writes_to_both(
    engine: SglangEngine, checkpoint: Path, own: Own, versions: Versions
) -> None:
    assert_rows_follow(
        engine, lambda engine, tensors: send(engine, tensors, tensors), checkpoint, own, versions
    )
    with broadcasting(engine, ranks=2) as write:
        assert_rows_follow(engine, write, checkpoint, own, versions)


@pytest.mark.attack("a trainer that writes into the memory of one rank")
def test_both_ranks_know_what_was_written_to_one(engine: SglangEngine, checkpoint: Path, own: Own) -> None:
    assert_parameters_are_compared(engine, checkpoint, own, before_last=1)


@pytest.mark.parametrize("back_end", ["zmq_to_tokenizer", "zmq_to_scheduler"])
def test_two_ranks_that_the_gateway_feeds_answer_as_one(
    checkpoint: Path, service: Restartable, own: Own, monkeypatch: pytest.MonkeyPatch, back_end: str
) -> None:
    for name, value in BOUND.items():
        monkeypatch.setenv(name, value)
    with fed(checkpoint, service, *TWO_RANKS, encoders=2, back_end=back_end) as (engine, gateway):
        for name in ("text alone", "text between", "sixteen"):
            before, images = gateway.count("images"), sum(isinstance(part, bytes) for part in PROMPTS[name])
            assert_equal(engine.ask(PROMPTS[name]), own(PROMPTS[name]))
            assert gateway.count("images") - before == images, "each part is read once for both ranks"
