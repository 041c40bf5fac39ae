"""Engines with their own towers share one store: each image is encoded once, and answers do not change."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefill_client.vllm.shared_store import image_key
from testing.photos import photo
from testing.server_process import running
from testing.vllm_engine import Answer, Engine, Part
from testing.vllm_sharing import OtherEngine, SharingEngine
from tests.vllm.conftest import HANG_S, LEASE_S
from tests.vllm.restartable import Restartable
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_answers import TOLERANCE, prompt

PROMPTS = [prompt(8000 + images, images) for images in range(1, 7)]
IMAGES = sum(isinstance(part, bytes) for parts in PROMPTS for part in parts)


def answers(engine: Engine) -> list[Answer]:
    """Send all prompts at once; return the answers."""
    started = [engine.start(parts, own=True) for parts in PROMPTS]
    ended = engine.run(*started)
    return [ended[request_id] for request_id in started]


@pytest.fixture(scope="module")
def right(checkpoint: Path, service: Any) -> list[Answer]:
    """The answers of an engine that shares nothing."""
    alone = Engine(checkpoint, service.endpoint)
    try:
        return answers(alone)
    finally:
        alone.close()


@pytest.fixture(scope="module")
def first(checkpoint: Path, store: Restartable, right: list[Answer]) -> tuple[int, list[Answer]]:
    """The number of images that a first engine encoded, and its answers; it has ended."""
    engine = SharingEngine(checkpoint, store.endpoint)
    try:
        answered = answers(engine)
        engine.assert_nothing_is_held()
        return engine.encoded, answered
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(checkpoint: Path, store: Restartable, first: tuple[int, list[Answer]]) -> Iterator[SharingEngine]:
    """A second engine on the same store."""
    engine = SharingEngine(checkpoint, store.endpoint)
    yield engine
    engine.close()


def assert_all_equal(ours: list[Answer], right: list[Answer]) -> None:
    assert [answer.reason for answer in ours] == ["length"] * len(right)
    assert max(each.distance(own) for each, own in zip(ours, right, strict=True)) <= TOLERANCE


def test_two_ranks_put_each_image_once(checkpoint: Path, right: list[Answer]) -> None:
    # Two processes on all cores: a step may take longer than a lease usually lasts.
    with running(checkpoint, executable=SERVICE, accept_put="yes", put_lease_s=HANG_S, **SETTINGS) as server:
        engine = SharingEngine(checkpoint, server.endpoint, tensor_parallel_size=2)
        try:
            for _ in range(2):
                assert_all_equal(answers(engine), right)
                engine.assert_nothing_is_held()
                assert server.metrics().total("put_images_total", outcome="kept") == IMAGES
                engine.forget()
        finally:
            engine.close()


def test_an_image_is_encoded_by_one_engine_only(
    engine: SharingEngine, first: tuple[int, list[Answer]], right: list[Answer]
) -> None:
    encoded, answered = first
    assert encoded == IMAGES
    assert_all_equal(answered, right)
    assert_all_equal(answers(engine), right)
    assert engine.encoded == 0
    engine.assert_nothing_is_held()


def test_an_image_in_several_requests_at_once_is_encoded_once(engine: SharingEngine) -> None:
    image = photo(200, 150, 8100, "PNG")
    engine.forget()
    assert engine.encoded_by(*(["x" * number, image, "y", image] for number in range(6))) == 1
    engine.forget()
    assert engine.encoded_by(["z", image]) == 0


def test_tenants_of_an_engine_share_nothing(engine: SharingEngine) -> None:
    image = photo(200, 150, 8150, "PNG")
    features = [engine.feature(["x", image]) for _ in range(2)]
    assert image_key(features[0].data, "a") == image_key(features[1].data, "a")
    assert image_key(features[0].data, "a") != image_key(features[1].data, "b")


@pytest.fixture
def other(engine: SharingEngine, store: Restartable) -> Iterator[OtherEngine]:
    """Another engine, closed at the latest when the test ends."""
    other = OtherEngine(engine, store.endpoint)
    yield other
    other.close()


def test_a_request_waits_for_another_engines_image_while_others_run(
    engine: SharingEngine, other: OtherEngine
) -> None:
    parts: list[Part] = ["a", photo(200, 150, 8200, "PNG")]
    engine.forget()
    assert other.name(parts).state == "yours"
    before = engine.encoded
    parked = engine.start(parts, own=True)
    others = engine.start(["b", photo(200, 150, 8300, "PNG")], own=True)
    engine.run(others)
    assert engine.computed(parked) == 0
    assert engine.encoded == before + 1
    other.close()  # this ends its lease
    assert engine.run(parked)[parked].reason == "length"
    assert engine.encoded == before + 2
    engine.assert_nothing_is_held()


def test_a_waiting_engine_encodes_when_the_first_is_killed(
    engine: SharingEngine, checkpoint: Path, store: Restartable
) -> None:
    command = [sys.executable, "-m", "tests.vllm.stuck_engine", str(checkpoint), store.endpoint, "8400"]
    stuck = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert stuck.stdout is not None
        assert "encoding\n" in iter(stuck.stdout.readline, "")
        before = engine.encoded
        request_id, ended = engine.start(prompt(8400, 1), own=True), {}
        for _ in range(50):
            ended |= engine.step()
        assert not ended
        assert engine.encoded == before, "it waits for the engine that encodes"
    finally:
        stuck.kill()
        stuck.wait()
    killed_s = time.monotonic()
    assert engine.run(request_id, steps=10_000_000)[request_id].reason == "length"
    assert time.monotonic() - killed_s < LEASE_S + 1
    assert engine.encoded == before + 1
    engine.assert_nothing_is_held()


def test_an_aborted_request_abandons_its_lease(engine: SharingEngine, other: OtherEngine) -> None:
    other_image, own_image = photo(200, 150, 8500, "PNG"), photo(200, 150, 8501, "PNG")
    engine.forget()
    before = engine.encoded
    assert other.name(["a", other_image]).state == "yours"
    parked = engine.start(["a", other_image, own_image], own=True)
    engine.run_until(engine.has_lease)
    engine.abort(parked)
    engine.assert_nothing_is_held()
    deadline = time.monotonic() + LEASE_S / 2
    while (answer := other.name(["a", own_image])).state != "yours":
        assert time.monotonic() < deadline, answer
    assert engine.encoded == before


def test_two_engines_that_wait_for_each_other_make_progress(
    engine: SharingEngine, other: OtherEngine
) -> None:
    other_image, own_image = photo(200, 150, 8510, "PNG"), photo(200, 150, 8511, "PNG")
    engine.forget()
    before = engine.encoded
    assert other.name(["a", other_image]).state == "yours"
    begun_s = time.monotonic()
    parked = engine.start(["a", other_image, own_image], own=True)
    engine.run_until(engine.has_lease)
    engine.run_until(lambda: not engine.has_lease())
    assert engine.computed(parked) == 0, "it still waits"
    assert other.name(["a", own_image]).state == "yours"
    assert time.monotonic() - begun_s < LEASE_S, "the lease has not expired"
    other.close()
    assert engine.run(parked)[parked].reason == "length"
    assert engine.encoded == before + 2
    engine.assert_nothing_is_held()


def test_abort_at_any_step_releases_everything(engine: SharingEngine) -> None:
    for steps in range(12):
        engine.forget()
        fresh = [photo(200, 150, 8600 + 10 * steps + number, "PNG") for number in range(3)]
        request_id = engine.start(["x", *fresh], own=True)
        for _ in range(steps):
            engine.step()
        engine.abort(request_id)
        engine.assert_nothing_is_held()


def test_preemption_at_any_step_does_not_change_the_answer(
    engine: SharingEngine, right: list[Answer]
) -> None:
    parts, own = PROMPTS[-1], right[-1]
    for preempt_at in range(1, 12, 2):
        engine.forget()
        request_id, ended = engine.start(parts, own=True), {}
        for step in range(30):
            if step == preempt_at:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            ended |= engine.step()
        ended = ended or engine.run(request_id)
        assert ended[request_id].distance(own) <= TOLERANCE, preempt_at
        engine.assert_nothing_is_held()
