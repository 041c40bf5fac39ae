"""Controls: without our checks, the same requests end an engine, corrupt its answers, or never end.

Each test removes one of our functions and shows the harm. In their order, the protections are: the gate compares name,
grid and rows before the scheduler counts on them; the grid is part of the name; identifiers need a key; the connector
pins rows from the gate until they are read, asks for them again, and releases them when the request ends; failures are
not remembered; the gate skips requests that are past their last image; fingerprints are compared before the weights
load, and the width of rows after it; an engine without a tower gets DeepStack back; a request that waits for rows keeps
the place of its LoRA adapter.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler

from encoder_contract.geometry import rows_of_grid
from prefill_client import Description
from prefill_client.plugin import model
from prefill_client.vllm import connector, deepstack
from prefill_client.vllm.features import Feature, VllmRequest
from prefill_client.vllm.gate import ImageSpan, PrefillGate, PromptImages
from prefill_client.vllm.image_name import ImageName, NameSigner
from prefill_client.vllm.row_table import RowSlot, RowTable
from prefill_client.vllm.scheduler_side import SchedulerSide
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import VllmEngine
from tests.vllm.conftest import SMALL
from tests.vllm.lora_adapters import RANK, write_adapter
from tests.vllm.test_hostile_requests import HOSTILE, IMAGE, TOLERANCE, forged

PATIENCE_STEPS = 1000  # some seconds, with a pause in each; an answer takes a hundredth of that


@pytest.fixture
def engine(checkpoint: Path, service: ServerProcess) -> Iterator[VllmEngine]:
    """A new engine for each test: most end it."""
    engine = VllmEngine(checkpoint, service.endpoint)
    yield engine
    engine.close()


def dying() -> AbstractContextManager[object]:
    """Expect an error that ends the engine. A request that never ends raises `TimeoutError`, which is not one."""
    return pytest.raises((AssertionError, AttributeError, KeyError, ValueError, RuntimeError))


def trusting(
    gate: PrefillGate,
    index: int,
    feature: Feature,
    description: Description,
    name: ImageName,
) -> ImageSpan:
    """Believe a name without comparing it with the grid of the part."""
    rows = rows_of_grid(name.grid, description.geometry)
    return replace(ImageSpan.of(index, feature, name), rows=rows)


def assert_dies_of(hostile: str, engine: VllmEngine) -> None:
    request_id = engine.start(["x", HOSTILE[hostile](engine)])
    with dying():
        engine.run(request_id, steps=PATIENCE_STEPS)


# 1. A grid without rows, or with another number of rows.


def test_without_the_check_an_image_without_rows_ends_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillGate, "_fail", lambda *_: None)
    assert_dies_of("no name", engine)


def test_without_the_check_a_larger_grid_ends_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillGate, "_span", trusting)
    engine.submit(IMAGE)
    assert_dies_of("a larger grid", engine)


def test_without_the_check_a_smaller_grid_gets_wrong_rows(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillGate, "_span", trusting)
    engine.submit(IMAGE)
    request_id = engine.start(["x", HOSTILE["a smaller grid"](engine)])
    assert engine.run(request_id)[request_id].reason == "length"


def test_a_request_that_does_not_wait_ends_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillGate, "may_prefill", lambda *_: True)
    request_id = engine.start(["x", photo(170, 130, 8001, "PNG")])
    with dying():
        engine.run(request_id, steps=50)


def test_rows_wrongly_reported_as_arrived_end_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillGate, "may_prefill", lambda *_: True)
    monkeypatch.setattr(RowTable, "is_here", lambda *_: True)
    monkeypatch.setattr(SchedulerSide, "allocated", lambda *_: None)
    request_id = engine.start(["x", photo(170, 130, 8002, "PNG")])
    with dying():
        engine.run(request_id, steps=50)


# 2. The right name with a transposed grid.


def test_without_the_check_a_grid_poisons_the_prefix_cache(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillGate, "_span", trusting)
    engine.submit(IMAGE)
    text = "a long text after the image, so that its blocks are cached " * 2
    right = engine.ask(["", IMAGE, text], own=True)
    engine.run(engine.start(["", HOSTILE["a transposed grid"](engine), text]))
    assert engine.ask(["", IMAGE, text]).distance(right) > 100 * TOLERANCE


# 3. Embeddings that callers name themselves. More on this, and 4, in test_without_middleware_cures.py.


def test_without_the_keyed_hash_a_forged_name_gets_the_rows(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.submit(IMAGE)
    right = engine.ask(["y", IMAGE], own=True)
    monkeypatch.setattr(NameSigner, "is_identifier", lambda *_: True)
    monkeypatch.setattr(NameSigner, "identifier", lambda *_: "0" * 64)
    request_id = engine.start(["y", forged(engine)])
    assert engine.run(request_id)[request_id].distance(right) <= TOLERANCE


# 5. Rows are held from the gate until they have been read, and again after a preemption.


def test_rows_released_between_gate_and_step_end_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_prefill = PrefillGate.may_prefill

    def forgetful(gate: PrefillGate, request: VllmRequest, computed: int) -> bool:
        ready = may_prefill(gate, request, computed)
        if ready:
            gate._release_all(request.request_id, gate._prompts[request.request_id])
        return ready

    monkeypatch.setattr(PrefillGate, "may_prefill", forgetful)
    engine.submit(IMAGE)
    request_id = engine.start(["x", IMAGE])
    with dying():
        engine.run(request_id, steps=PATIENCE_STEPS)


def test_rows_released_before_they_are_read_are_overwritten(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory must not get another image's rows while a step reads it."""
    engine.submit(IMAGE)
    right = engine.ask(["y", IMAGE], own=True)
    table, memory = engine.side.table, engine.side._memory
    hold = table.begin_load

    def overwritten(identifier: str) -> object:
        rows = hold(identifier)
        size = sum(length for _, length in rows.query.extents)
        memory.write(rows.query.extents, memory._bytes[:size] * 0)
        return rows

    monkeypatch.setattr(table, "begin_load", overwritten)
    assert engine.ask(["y", IMAGE]).distance(right) > 100 * TOLERANCE


def test_rows_held_only_once_are_missing_after_a_preemption(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, held = PrefillGate._hold, set()

    def once(gate: PrefillGate, request_id: str, prompt: PromptImages, computed: int) -> None:
        if request_id not in held:
            held.add(request_id)
            hold(gate, request_id, prompt, computed)

    monkeypatch.setattr(PrefillGate, "_hold", once)
    engine.submit(IMAGE)
    request_id = engine.start(["x", IMAGE], tokens=40)
    engine.run_until(lambda: not len(engine.side.table) and engine.computed(request_id) > 0)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(TimeoutError):
        engine.run(request_id, steps=PATIENCE_STEPS)


def test_without_request_finished_rows_are_never_released(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler.ec_connector, "request_finished", lambda *_, **__: (False, None))
    engine.submit(IMAGE)
    request_id = engine.start(["x", IMAGE, photo(170, 130, 8003, "PNG")])
    engine.run_until(lambda: any(rows.here for rows in engine.side.table._slots.values()))
    engine.abort(request_id)
    for _ in range(100):
        engine.step()
    assert len(engine.side.table)


# 6. Failures are not remembered.


def test_a_remembered_failure_blocks_later_requests(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher, late = engine.side._fetcher, photo(210, 120, 8004, "PNG")

    def remembering(table: RowTable, rows: RowSlot) -> None:
        table._memory.release(rows.query.extents)

    monkeypatch.setattr(fetcher, "_settings", replace(fetcher._settings, grace_s=0.02))
    monkeypatch.setattr(RowTable, "_free", remembering)
    monkeypatch.setattr(RowTable, "_remove_unheld", lambda *_: None)
    first = engine.start(["x", late])
    assert engine.run(first)[first].reason == "error", "it was not submitted"
    engine.submit(late)
    second = engine.start(["x", late])
    with pytest.raises(TimeoutError):
        engine.run(second, steps=PATIENCE_STEPS)


# 7. A decode step holds no images.


def test_without_its_last_image_a_request_is_checked_at_every_decode_step(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptImages, "end", property(lambda _: 1 << 30))
    engine.submit(IMAGE)
    request_id = engine.start(["x", IMAGE], tokens=20)
    engine.run_until(lambda: engine.computed(request_id) > 60)
    hold, held = engine.side.gate._hold, []

    def counted(*arguments: Any) -> None:
        held.append(1)
        hold(*arguments)

    monkeypatch.setattr(engine.side.gate, "_hold", counted)
    engine.run(request_id)
    assert held


# 8. The service is checked before the weights load.


def test_without_the_fingerprint_check_another_checkpoint_gives_wrong_text(
    service: ServerProcess, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path, preprocessor=SMALL["qwen3_vl"], seed=1)
    engine = VllmEngine(other, service.endpoint, extra={"model_fingerprint": "any"})
    try:
        right = engine.ask(["y", IMAGE], own=True)
        assert engine.ask(["y", IMAGE]).distance(right) > 100 * TOLERANCE
    finally:
        engine.close()


def test_without_the_width_check_other_rows_give_wrong_text(
    service: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = {"deepstack_visual_indexes": [1, 2]}
    other = write_checkpoint(tmp_path, preprocessor=SMALL["qwen3_vl"], vision=vision)
    monkeypatch.setattr(model, "differences", lambda *_: iter(()))
    engine = VllmEngine(other, service.endpoint, extra={"model_fingerprint": "any"})
    try:
        request_id = engine.start(["y", IMAGE])
        engine.submit(IMAGE)
        assert engine.run(request_id)[request_id].reason == "error", "the rows themselves are checked, too"
        right = engine.ask(["y", IMAGE], own=True)
        fetcher = engine.side._fetcher
        monkeypatch.setattr(fetcher, "_width", engine.client.description.width)
        assert engine.ask(["y", IMAGE]).distance(right) > 100 * TOLERANCE
    finally:
        engine.close()


# 9. DeepStack remains in an engine without a tower.


def test_wide_rows_end_an_engine_without_deepstack(
    checkpoint: Path, service: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepstack, "_set_deepstack", lambda *_: None)
    engine = VllmEngine(checkpoint, service.endpoint, limit_mm_per_prompt={"image": 0, "video": 0})
    try:
        engine.submit(IMAGE)
        request_id = engine.start(["x", IMAGE])
        with dying():
            engine.run(request_id, steps=PATIENCE_STEPS)
    finally:
        engine.close()


# 10. A request that waits for rows keeps the place of its LoRA adapter.


def test_another_adapter_beside_a_request_that_waits_ends_an_engine(
    checkpoint: Path, service: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to vLLM 0.32: newer releases have this protection themselves."""
    handle = Scheduler._handle_blocked_waiting_request
    monkeypatch.setattr(Scheduler, "_handle_blocked_waiting_request", getattr(handle, "__wrapped__", handle))
    monkeypatch.setattr(connector, "count_waiting_adapters", lambda: None)
    tuned, other = (
        LoRARequest(str(seed), seed, str(write_adapter(tmp_path / str(seed), checkpoint, seed)))
        for seed in (1, 2)
    )
    engine = VllmEngine(checkpoint, service.endpoint, exact=True, enable_lora=True, max_lora_rank=RANK)
    try:
        image = photo(170, 130, 8005, "PNG")
        waiting = engine.start(["a text before the image ", image], adapter=tuned)
        engine.run_until(lambda: engine.computed(waiting) > 0)
        running = engine.start(["only text"], adapter=other, tokens=2 * PATIENCE_STEPS)
        engine.run_until(lambda: engine.computed(running) > 0)
        engine.submit(image)
        with pytest.raises(AssertionError) as died:
            engine.run(waiting, steps=PATIENCE_STEPS)
        assert "max_loras" in str(died.traceback[-1].statement)
    finally:
        engine.close()
