"""Two tensor-parallel ranks: each fetches its rows, and both agree on who encodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.sglang_engine import SglangEngine, serving
from tests.engines.answers import Own, assert_answers_equal
from tests.sglang.conftest import variables
from tests.sglang.gateways import assert_fed, fed
from tests.sglang.test_faults import (
    assert_a_request_without_rows_ends,
    assert_own_tower_takes_over,
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


@pytest.mark.story("tensor parallel, on one host")
def test_two_ranks_answer_as_one(engine: SglangEngine, own: Own) -> None:
    """One of them counts what it fetches."""
    assert_answers_equal(engine, own)
    assert engine.by_own_tower() == 0


@pytest.mark.story("the service dies during a prefill")
def test_a_service_that_dies_within_a_prefill_is_replaced_by_the_tower_of_both(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    assert_own_tower_takes_over(engine, service, own)
    assert service.encodes() > 0


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


@pytest.mark.story("tensor parallel, on one host")
@pytest.mark.parametrize("back_end", ["zmq_to_tokenizer", "zmq_to_scheduler"])
def test_two_ranks_that_the_gateway_feeds_answer_as_one(
    checkpoint: Path, service: Restartable, own: Own, monkeypatch: pytest.MonkeyPatch, back_end: str
) -> None:
    for name, value in BOUND.items():
        monkeypatch.setenv(name, value)
    with fed(checkpoint, service, *TWO_RANKS, encoders=2, back_end=back_end) as (engine, gateway):
        assert_fed(engine, gateway, own, ("text alone", "text between", "sixteen"))
