"""A request waits for the images of its next step and not for later ones, as a real engine's steps show."""

import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from encoder_contract.turns import Room
from prefill_client.vllm import scheduler_side
from testing.photos import photo
from testing.vllm_engine import CHUNK_TOKENS, Part, VllmEngine

TOLERANCE = 1e-5


def two_images(seed: int) -> tuple[bytes, bytes, list[Part]]:
    """Return two new images, and a prompt with more than three steps between them."""
    first, second = photo(200, 150, 2 * seed, "PNG"), photo(190, 160, 2 * seed + 1, "PNG")
    return first, second, ["a", first, "b" * 300, second, "c" * 50]


def begin_of_first(engine: VllmEngine) -> int:
    (prompt,) = engine.side.gate._prompts.values()
    return prompt.spans[0].begin


def begin_of_second(engine: VllmEngine) -> int:
    (prompt,) = engine.side.gate._prompts.values()
    return prompt.spans[1].begin


def step_until_parked(engine: VllmEngine, request_id: str) -> int:
    """Step until the prefill stops; return how many tokens are prefilled."""
    before, same = -1, 0
    while same < 20:
        assert not engine.step()
        now = engine.computed(request_id)
        same = same + 1 if now == before else 0
        before = now
    return before


def test_tokens_before_a_missing_image_are_prefilled(engine: VllmEngine) -> None:
    first, second, prompt = two_images(500)
    engine.forget()
    engine.submit(first)
    request_id = engine.start(prompt)
    engine.run_until(lambda: engine.computed(request_id) > 0)
    begin = begin_of_second(engine)
    parked = step_until_parked(engine, request_id)
    assert parked % CHUNK_TOKENS == 0
    assert parked <= begin < parked + CHUNK_TOKENS, "it stops at the step that would reach the image"
    engine.submit(second)
    answer = engine.run(request_id)[request_id]
    assert answer.distance(engine.ask(prompt, own=True)) <= TOLERANCE
    engine.assert_nothing_is_held()


def test_request_gating_prefills_nothing_before_all_images_arrive(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, prompt = two_images(501)
    monkeypatch.setattr(engine.side.gate, "_gating", "request")
    engine.forget()
    engine.submit(first)
    request_id = engine.start(prompt)
    assert step_until_parked(engine, request_id) == 0
    engine.submit(second)
    engine.run(request_id)


def test_other_requests_run_while_one_is_parked(engine: VllmEngine) -> None:
    parked = engine.start(["never ", photo(120, 90, 3, "PNG")])
    for number in range(3):
        parts = ["other ", photo(130, 90, 10 + number, "PNG")]
        assert engine.ask(parts).reason == "length"
    assert engine.ask(["text alone"]).distance(engine.ask(["text alone"])) <= TOLERANCE
    engine.submit(photo(120, 90, 3, "PNG"))
    assert engine.run(parked)[parked].reason == "length"


def test_images_of_later_steps_are_requested_ahead(engine: VllmEngine) -> None:
    first, second, prompt = two_images(502)
    engine.forget()
    request_id = engine.start(prompt)
    engine.step()
    assert len(engine.side.table) == 2
    engine.submit(first, second)
    engine.run(request_id)
    engine.assert_nothing_is_held()


@pytest.mark.story("requests without images")
def test_raw_and_text_requests_do_not_touch_the_table(engine: VllmEngine) -> None:
    before = len(engine.side.table)
    first, second, _ = two_images(503)
    assert engine.ask(["x", first, second], own=True).reason == "length"
    assert engine.ask(["only text"]).reason == "length"
    assert len(engine.side.table) == before == 0


def test_preemption_in_any_state_does_not_change_the_answer(engine: VllmEngine) -> None:
    images = [photo(200, 150, 20 + number, "PNG") for number in range(5)]
    parts = [part for image in images for part in ("word " * 5, image)]
    right = engine.ask(parts, own=True)
    draw = random.Random(1)
    for preempt_at in range(1, 14):
        engine.forget()
        engine.submit(*images[: draw.randrange(6)])
        request_id, ended = engine.start(parts), {}
        for step in range(40):
            if step == preempt_at:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            ended |= engine.step()
        engine.submit(*images)
        ended = ended or engine.run(request_id)
        assert ended[request_id].distance(right) <= TOLERANCE, preempt_at
        engine.assert_nothing_is_held()


def test_an_aborted_request_releases_everything(engine: VllmEngine) -> None:
    images = [photo(200, 150, 30 + number, "PNG") for number in range(5)]
    for submitted in (0, 2, 5):
        for steps in (0, 1, 2, 4, 8, 30):
            engine.forget()
            fresh = [photo(200, 150, 1000 + 100 * submitted + 10 * steps + n, "PNG") for n in range(2)]
            engine.submit(*images[:submitted])
            request_id = engine.start([*images[:submitted], *fresh])
            for _ in range(steps):
                engine.step()
            engine.abort(request_id)
            engine.assert_nothing_is_held()
    assert engine.ask(images).distance(engine.ask(images, own=True)) <= TOLERANCE


def test_requests_queue_for_host_memory(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = engine.side.gate
    monkeypatch.setattr(gate, "_room", room := Room(200))
    prompts = [["p", *(photo(200, 150, 50 + 4 * k + n, "PNG") for n in range(4))] for k in range(6)]
    for parts in prompts:
        engine.submit(*parts[1:])
    started = [engine.start(parts) for parts in prompts]
    reserved = []
    ended: dict[str, Any] = {}
    while len(ended) < len(started):
        ended |= engine.step()
        reserved.append(room.held)
    assert 0 < max(reserved) <= 200
    assert all(answer.reason == "length" for answer in ended.values())
    assert room.held == 0


def test_decode_steps_hold_no_images(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = two_images(504)
    engine.submit(first)
    request_id = engine.start(["a", first], tokens=20)
    engine.run_until(lambda: engine.computed(request_id) > 60)
    engine.step()
    held = []
    monkeypatch.setattr(engine.side.gate, "_hold", lambda *_: held.append(1))
    engine.run(request_id)
    assert not held


def test_an_idle_engine_pauses_until_rows_arrive(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_side, "PAUSE_S", 600.0)
    late = photo(120, 90, 97, "PNG")
    request_id = engine.start(["a", late])
    arriving = threading.Timer(0.5, engine.submit, [late])
    arriving.start()
    begun_s = time.monotonic()
    # Thousands of steps fit into half a second of polling.
    assert engine.run(request_id, steps=100)[request_id].reason == "length"
    assert time.monotonic() - begun_s < 300, "the pause ends when rows arrive"
    arriving.join()


def test_a_busy_engine_does_not_pause(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(engine.side._fetcher, "wait", pauses.append)
    parked = engine.start(["never ", photo(120, 90, 98, "PNG")])
    other = engine.start(["text"], tokens=50)
    engine.run(other)
    assert not pauses
    for _ in range(10):
        engine.step()
    assert pauses
    engine.abort(parked)


def test_the_core_sleeps_only_while_every_request_waits_for_rows(engine: VllmEngine) -> None:
    side, requests = engine.side, engine.scheduler.get_num_unfinished_requests
    late = photo(120, 90, 96, "PNG")
    parked = engine.start(["late ", late])
    step_until_parked(engine, parked)
    assert side.sleep_s(0, requests) == scheduler_side.MAX_SLEEP_S
    assert side.sleep_s(side._empty_steps, requests) == 0, "a step that has not ended may have run something"
    other = engine.start(["text"])
    assert side.sleep_s(0, requests) == scheduler_side.PAUSE_S, "nobody knows what the other one waits for"
    engine.step()
    assert side.sleep_s(0, requests) == 0, "the step runs the other one"
    engine.run(other)
    step_until_parked(engine, parked)
    engine.submit(late)
    deadline = time.monotonic() + 60
    while side.sleep_s(0, requests):
        assert time.monotonic() < deadline, "rows end the sleep"
        time.sleep(0.001)
    assert engine.run(parked)[parked].reason == "length"


def test_the_core_steps_after_a_request_has_ended(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host memory goes to another request, whose rows only a step fetches."""
    side, requests, fetcher = engine.side, engine.scheduler.get_num_unfinished_requests, engine.side._fetcher
    monkeypatch.setattr(side.gate, "_room", Room(75))
    images = [photo(200, 150, 9900 + number, "PNG") for number in range(3)]
    first = engine.start(["a", images[0]])
    engine.step()
    failing, third = (engine.start(["a", image]) for image in images[1:])
    with monkeypatch.context() as patched:
        patched.setattr(fetcher, "_settings", replace(fetcher._settings, timeout_s=0.3))
        engine.step()
        time.sleep(0.1)  # the fetcher's thread reads the limit
    assert len(side.table) == 2, "no room for the third"
    while failing not in engine.step():
        pass
    assert len(side.table) == 1
    assert side.sleep_s(0, requests) == 0
    engine.step()
    assert len(side.table) == 2
    assert side.sleep_s(0, requests) == scheduler_side.MAX_SLEEP_S
    for request_id in (first, third):
        engine.abort(request_id)
    engine.assert_nothing_is_held()


def test_a_wait_that_the_prefix_cache_ends_is_counted(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two equal requests finds the blocks of its image in the prefix cache."""
    waits: list[float] = []
    monkeypatch.setattr(engine.side.counts, "waited", waits.append)
    late = photo(200, 150, 95, "PNG")
    parts: list[Part] = [late, "c" * 200]
    both = [engine.start(parts), engine.start(parts)]
    step_until_parked(engine, both[0])
    assert not waits
    engine.submit(late)
    assert {answer.reason for answer in engine.run(*both).values()} == {"length"}
    assert len(waits) == len(both)


def test_a_request_fails_at_timeout_s(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = engine.side._fetcher
    monkeypatch.setattr(fetcher, "_settings", replace(fetcher._settings, timeout_s=0.3))
    request_id = engine.start(["a", photo(90, 90, 99, "PNG")])
    assert engine.run(request_id)[request_id].reason == "error"
    engine.assert_nothing_is_held()
