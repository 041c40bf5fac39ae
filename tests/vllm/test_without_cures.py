"""Controls: without what keeps it safe, the same requests end an engine or corrupt its answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_client.vllm.gate import Feature, Gate, Span
from prefill_client.vllm.row_table import RowTable
from prefill_client.vllm.scheduler_side import SchedulerSide
from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import Engine
from tests.vllm.test_hostile_requests import HOSTILE, IMAGE, TOLERANCE


@pytest.fixture
def engine(checkpoint: Path, service: ServerProcess) -> Iterator[Engine]:
    """An engine of its own for each test: most do not survive it."""
    engine = Engine(checkpoint, service.endpoint)
    yield engine
    engine.close()


def trusting(gate: Gate, index: int, feature: Feature) -> Span:
    """Believe a name and the grid beside it."""
    name, position = gate._signer.name(feature.identifier), feature.mm_position
    assert name is not None
    begin, end = position.offset, position.offset + position.length
    return Span(begin, end, index, feature.identifier, name, position.get_num_embeds())


def test_a_grid_that_is_believed_poisons_the_prefix_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "_span", trusting)
    engine.submit(IMAGE)
    text = "a long text after the image, so that its blocks are cached " * 2
    right = engine.ask(["", IMAGE, text], own=True)
    engine.run(engine.start(["", HOSTILE["a transposed grid"](engine), text]))
    assert engine.ask(["", IMAGE, text]).distance(right) > 100 * TOLERANCE


def test_a_request_that_does_not_wait_ends_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "may_prefill", lambda *_: True)
    request_id = engine.start(["x", photo(170, 130, 8001, "PNG")])
    with pytest.raises((AssertionError, KeyError, ValueError, RuntimeError)):
        engine.run(request_id, steps=50)


def test_saying_that_rows_are_here_when_they_are_not_ends_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "may_prefill", lambda *_: True)
    monkeypatch.setattr(RowTable, "is_here", lambda *_: True)
    monkeypatch.setattr(SchedulerSide, "allocated", lambda *_: None)
    request_id = engine.start(["x", photo(170, 130, 8002, "PNG")])
    with pytest.raises((AssertionError, KeyError, ValueError, RuntimeError)):
        engine.run(request_id, steps=50)


def test_rows_let_go_before_they_are_read_are_anothers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is not given to another image while a step reads it: without that, answers are wrong."""
    engine.submit(IMAGE)
    right = engine.ask(["y", IMAGE], own=True)
    table, memory = engine.side.table, engine.side._memory
    hold = table.begin_load

    def overwritten(identifier: str) -> object:
        rows = hold(identifier)
        size = sum(length for _, length in rows.wanted.extents)
        memory.write(rows.wanted.extents, memory._bytes[:size] * 0)
        return rows

    monkeypatch.setattr(table, "begin_load", overwritten)
    assert engine.ask(["y", IMAGE]).distance(right) > 100 * TOLERANCE
