"""What happens while an engine sleeps, because all its requests wait for rows: nothing of it waits for the sleep's end.

A chat before each measurement lets the sleep begin anew, so whatever does not end it comes about a second late.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefill_client.vllm.scheduler_side import MAX_SLEEP_S
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.vllm.http_engine import PATIENT, HttpEngine, serving
from tests.vllm.test_held_back import connected, demanded, empty_steps, in_engine, stopped_device
from tests.vllm.test_middleware import assert_equal, content, top
from tests.vllm.test_parked import answered, took_s
from tests.waiting import until

SEEDS = count(9401)
ROUNDS = 5
LATE_S = MAX_SLEEP_S / 2
TOKENS = 20
# Routes of a vLLM in development mode that ask the engine core.
CALLS = ["/reset_prefix_cache", "/reset_mm_cache", "/collective_rpc"]
OTHER_ROUTES = ["/health", "/metrics"]
CHECK = {"method": "check_health"}


@pytest.fixture(scope="module")
def http(checkpoint: Path, patient_service: ServerProcess) -> Iterator[HttpEngine]:
    """A `vllm serve` with our three flags, and its routes for development."""
    with serving(
        checkpoint, patient_service.endpoint, environment={"VLLM_SERVER_DEV_MODE": "1"}, **PATIENT
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def known(http: HttpEngine) -> bytes:
    """An image with stored rows: a request that begins with it reaches the engine at once."""
    image = photo(190, 120, 9400, "PNG")
    answered(http, [image, "a"])
    return image


def late() -> bytes:
    """Return a new image."""
    return photo(190, 120, next(SEEDS), "PNG")


def sleep_anew(http: HttpEngine) -> None:
    """Let a sleep begin."""
    answered(http, ["text alone"])


@contextmanager
def parked(http: HttpEngine, service: ServerProcess, *requests: list[Any]) -> Iterator[list[Future[Any]]]:
    """Let requests wait in a sleeping engine during the block; their last images are not encoded."""
    with ThreadPoolExecutor(len(requests)) as threads, stopped_device(service):
        waiting = [threads.submit(http.chat, content(parts)) for parts in requests]
        until(lambda: in_engine(http) == len(requests))
        sleep_anew(http)
        yield waiting


@pytest.mark.story("callers hang up")
def test_the_only_waiting_request_of_a_caller_who_leaves_is_forgotten_at_once(
    http: HttpEngine, patient_service: ServerProcess, known: bytes
) -> None:
    def leave(*parts: Any, waits: int) -> float:
        with stopped_device(patient_service):
            with connected(http, content([*parts, late()])):
                until(lambda: (in_engine(http), demanded(patient_service)) == (waits, 1))
                sleep_anew(http)
            return took_s(lambda: until(lambda: demanded(patient_service) == 0))

    from_middleware_s = min(leave(waits=0) for _ in range(ROUNDS))
    from_engine_s = []
    next_s = []
    for _ in range(ROUNDS):
        from_engine_s.append(leave(known, "and", waits=1))
        next_s.append(took_s(lambda: sleep_anew(http)))
        until(lambda: in_engine(http) == 0)
    assert min(from_engine_s) - from_middleware_s < LATE_S, "the image is withdrawn during the sleep"
    assert min(next_s) - min(took_s(lambda: sleep_anew(http)) for _ in range(ROUNDS)) < LATE_S


def test_one_of_two_waiting_requests_leaves(
    http: HttpEngine, patient_service: ServerProcess, known: bytes
) -> None:
    shared, own = late(), late()
    encoded = patient_service.encodes()
    with parked(http, patient_service, [known, "and", shared]) as (stays,):
        with connected(http, content([known, "or", shared, "or", own])):
            until(lambda: (in_engine(http), demanded(patient_service)) == (2, 2))
            sleep_anew(http)
        until(lambda: (in_engine(http), demanded(patient_service)) == (1, 1))
    response = stays.result()
    assert response.status_code == 200, response.text
    assert patient_service.encodes() == encoded + 1, "nobody wants the other image"
    again = http.chat(content([known, "and", shared]))
    assert_equal(*(top(each.json()["choices"][0]) for each in (response, again)))


def test_text_and_stored_images_are_answered_as_without_a_waiting_request(
    http: HttpEngine, patient_service: ServerProcess, known: bytes
) -> None:
    for parts in (["text alone"], [known, "What is it?"]):
        ask = partial(answered, http, parts, TOKENS)
        alone_s = [took_s(ask) for _ in range(ROUNDS)]
        with parked(http, patient_service, [known, "and", late()]):
            beside_s = [took_s(ask) for _ in range(ROUNDS)]
            assert in_engine(http) == 1
        assert min(beside_s) - min(alone_s) < LATE_S


@pytest.mark.parametrize("route", [*CALLS, *OTHER_ROUTES])
def test_a_call_of_the_engine_is_answered_at_once(
    http: HttpEngine, patient_service: ServerProcess, known: bytes, route: str
) -> None:
    def call() -> None:
        response = http.post(route, CHECK) if route in CALLS else httpx.get(http.url + route, timeout=600)
        assert response.status_code == 200, response.text

    alone_s = [took_s(call) for _ in range(ROUNDS)]
    beside_s = []
    with parked(http, patient_service, [known, "and", late()]) as (waiting,):
        for _ in range(ROUNDS):
            sleep_anew(http)
            beside_s.append(took_s(call))
        assert in_engine(http) == 1
    assert min(beside_s) - min(alone_s) < LATE_S
    assert waiting.result().status_code == 200


def test_a_pause_is_answered_at_once_and_keeps_a_waiting_request(
    http: HttpEngine, patient_service: ServerProcess, known: bytes
) -> None:
    image = late()
    paused_s = []
    with parked(http, patient_service, [known, "and", image]) as (waiting,):
        for _ in range(ROUNDS):
            sleep_anew(http)
            paused_s.append(took_s(lambda: http.post("/pause?mode=keep", {}).raise_for_status()))
            http.post("/resume", {}).raise_for_status()
    assert min(paused_s) < LATE_S
    response = waiting.result()
    assert response.status_code == 200, response.text
    again = http.chat(content([known, "and", image]))
    assert_equal(*(top(each.json()["choices"][0]) for each in (response, again)))


def test_a_waiting_request_is_aborted_by_a_pause(
    http: HttpEngine, patient_service: ServerProcess, known: bytes
) -> None:
    with parked(http, patient_service, [known, "and", late()]) as (waiting,):
        assert took_s(lambda: http.post("/pause?mode=abort", {}).raise_for_status()) < 60
        waiting.result(60)
        until(lambda: demanded(patient_service) == 0)
        http.post("/resume", {}).raise_for_status()
    sleep_anew(http)


def test_a_waiting_request_is_prefilled_again_after_a_reset(
    http: HttpEngine, patient_service: ServerProcess, known: bytes
) -> None:
    image = late()
    with parked(http, patient_service, [known, "and", image]) as (waiting,):
        http.post("/reset_prefix_cache?reset_running_requests=true", {}).raise_for_status()
        before = empty_steps(http)
        until(lambda: empty_steps(http) > before)
    response = waiting.result()
    assert response.status_code == 200, response.text
    again = http.chat(content([known, "and", image]))
    assert_equal(*(top(each.json()["choices"][0]) for each in (response, again)))


def test_a_step_without_arguments_ends_no_worker(http: HttpEngine) -> None:
    """The worker's sleep depends on the arguments of a step, and anybody may call one in development mode."""
    assert http.post("/collective_rpc", {"method": "execute_model"}).status_code >= 500
    sleep_anew(http)
