"""Stored images cost no extra step: a prompt takes as many prefill steps as with the engine's own tower."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from prefill_client.vllm import gate
from prefill_client.vllm.image_name import RequestInfo
from prefill_client.vllm.scheduler_side import MAX_SLEEP_S
from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import CHUNK_TOKENS, Part, VllmEngine, raw
from tests.vllm.test_without_middleware_cures import behind_middleware

SPACED: list[Part] = [
    part for n in range(6) for part in (photo(250, 250, 7000 + n, "PNG"), "text between " * 7)
]
"""With so much text between images, no step begins two images, so a step encodes only images that fit into it."""
DENSE: list[Part] = ["a", *(photo(200, 150, 7100 + n, "PNG") for n in range(8))]


@pytest.fixture(scope="module", params=[False, True], ids=["by step", "exact"])
def engine(checkpoint: Path, service: ServerProcess, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    """An engine without the cache manager, and one with it."""
    engine = VllmEngine(checkpoint, service.endpoint, exact=request.param)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for stored images even on a slow machine."""
    monkeypatch.setattr(gate, "SOON_S", 1e6)


def images_of(parts: list[Part]) -> list[bytes]:
    return [part for part in parts if isinstance(part, bytes)]


def encode(engine: VllmEngine, images: list[bytes]) -> None:
    """Submit images until the service has stored their rows."""
    deadline = time.monotonic() + 60
    while not all(answer.cached for answer in engine.client.submit(images)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.submit(*images)


@contextmanager
def counting(engine: VllmEngine) -> Iterator[list[int]]:
    """Yield a list that gets the number of tokens of each step that prefills any."""
    schedule, planned = engine.scheduler.schedule, []

    def counted(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        planned.extend([output.total_num_scheduled_tokens] if output.total_num_scheduled_tokens else [])
        return output

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.scheduler, "schedule", counted)
        yield planned


def steps_to_prefill(engine: VllmEngine, parts: list[Part], *, own: bool = False) -> list[int]:
    """Return the tokens of each step until the first is generated."""
    with counting(engine) as planned:
        run(engine, engine.start(parts, own=own, tokens=1))
    return planned


def run(engine: VllmEngine, request_id: str) -> None:
    """Step to the end of a request; wait for all requested rows after each step."""
    while request_id not in engine.step():
        settle(engine)


def settle(engine: VllmEngine) -> None:
    deadline = time.monotonic() + 60
    while engine.side.table.has_running:
        assert time.monotonic() < deadline
        engine.side.gate.failed()  # processes arrived rows
        time.sleep(0.001)


def test_stored_images_take_as_many_steps_as_with_the_own_tower(engine: VllmEngine) -> None:
    encode(engine, images_of(SPACED))
    engine.forget()
    own = steps_to_prefill(engine, SPACED, own=True)
    engine.forget()
    ours = steps_to_prefill(engine, SPACED)
    assert ours == own
    assert len(ours) == ceil(sum(ours) / CHUNK_TOKENS)
    assert len(ours) > 6


def test_adjacent_images_take_no_more_steps_than_with_the_own_tower(engine: VllmEngine) -> None:
    encode(engine, images_of(DENSE))
    engine.forget()
    own = steps_to_prefill(engine, DENSE, own=True)
    engine.forget()
    ours = steps_to_prefill(engine, DENSE)
    assert sum(ours) == sum(own)
    assert len(ours) <= len(own)


def test_a_chat_turn_prefills_only_its_new_tokens(engine: VllmEngine) -> None:
    """While a new image is being encoded, the text before it may take an extra step."""
    engine.forget()
    parts: list[Part] = []
    for number in range(4):
        before = len(parts)
        parts += [photo(200, 150, 7200 + number, "PNG"), f" round {number} of the chat "]
        engine.submit(*images_of(parts))
        first = steps_to_prefill(engine, parts)
        engine.forget()
        if before:
            steps_to_prefill(engine, parts[:before])
        encode(engine, images_of(parts))
        again = steps_to_prefill(engine, parts)
        assert sum(first) == sum(again)
        assert len(first) <= len(again) + engine.side.gate.exact
        assert len(again) == ceil(sum(again) / CHUNK_TOKENS)


def test_images_prefilled_before_a_preemption_cost_no_step(engine: VllmEngine) -> None:
    encode(engine, images_of(SPACED))
    engine._stored.clear()  # as if they were encoded after their Submit
    engine.forget()
    request_id = engine.start(SPACED, tokens=1)
    while engine.computed(request_id) < 600:
        engine.step()
        settle(engine)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    with counting(engine) as planned:
        run(engine, request_id)
    assert len(planned) == ceil(sum(planned) / CHUNK_TOKENS)
    engine.assert_nothing_is_held()


def test_the_core_does_not_sleep_past_a_wait_for_stored_images(
    engine: VllmEngine, service: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait may have ended after the last step looked, and before the core would sleep."""
    image = photo(160, 120, 7310 + engine.side.gate.exact, "PNG")
    encode(engine, [image])
    engine.forget()
    side, requests = engine.side, engine.scheduler.get_num_unfinished_requests
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        request_id = engine.start(["text before ", image], tokens=1)
        engine.step()
        assert side.sleep_s(0, requests) == MAX_SLEEP_S, "the wait for a stored image is longer"
        monkeypatch.setattr(gate, "SOON_S", 0.0)
        assert side.sleep_s(0, requests) == (0 if side.gate.exact else MAX_SLEEP_S)
        engine.step()
        assert (engine.computed(request_id) > 0) == side.gate.exact, "the text is worth a step"
        for _ in range(2):
            engine.step()
        assert side.sleep_s(0, requests) == MAX_SLEEP_S
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    run(engine, request_id)
    engine.assert_nothing_is_held()


def test_the_middleware_lists_stored_images(engine: VllmEngine) -> None:
    known, new = photo(160, 120, 7300, "PNG"), photo(160, 120, 7301 + engine.side.gate.exact, "PNG")
    encode(engine, [known])
    status, body = behind_middleware(engine, [raw(new), raw(known)])
    assert status == 200
    assert body is not None
    assert body["ec_transfer_params"][RequestInfo.KEY]["stored"] == [1]
