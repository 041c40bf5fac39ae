"""A request whose first image is not encoded yet stays in the middleware: no process of the engine works for it."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from prefill_client.vllm.image_service import WORTH_PREFILLING_BYTES
from testing.photos import photo
from testing.server_process import ServerProcess
from tests.vllm.http_engine import PATIENT, HttpEngine, serving
from tests.vllm.test_middleware import content
from tests.waiting import until

TEXT = "worth a step "


@pytest.fixture(scope="module")
def http(checkpoint: Path, patient_service: ServerProcess) -> Iterator[HttpEngine]:
    """A `vllm serve` with our three flags."""
    with serving(checkpoint, patient_service.endpoint, **PATIENT) as engine:
        yield engine


@contextmanager
def stopped_device(service: ServerProcess) -> Iterator[None]:
    """Let the device of a service do nothing. One that is not `patient` kills it after 20 s."""
    children = psutil.Process(service.process.pid).children(recursive=True)
    (device,) = (each.pid for each in children if each.name().startswith("device"))
    os.kill(device, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(device, signal.SIGCONT)


def demanded(service: ServerProcess) -> float:
    """Return how many images are waited for by someone who wants their rows."""
    return service.metrics().total("queue_images", **{"class": "demanded"})


def in_engine(http: HttpEngine) -> float:
    """Return how many requests the engine has, running or waiting."""
    lines = httpx.get(http.url + "/metrics", timeout=600).text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def empty_steps(http: HttpEngine) -> float:
    """Return how many steps did nothing because all requests waited for rows."""
    return sum(
        value
        for name, value in http.metrics().items()
        if name.startswith("vllm:encoder_service_empty_steps_total")
    )


def test_the_engine_makes_no_step_before_the_first_image_is_encoded(
    http: HttpEngine, patient_service: ServerProcess
) -> None:
    before = empty_steps(http)
    with ThreadPoolExecutor(2) as threads:
        with stopped_device(patient_service):
            held = threads.submit(http.chat, content([photo(190, 120, 9100, "PNG"), "What is it?"]))
            until(lambda: demanded(patient_service) == 1)
            assert http.chat(content(["text alone"])).status_code == 200
            until(lambda: in_engine(http) == 0)
            assert empty_steps(http) == before
            text = TEXT * (WORTH_PREFILLING_BYTES // len(TEXT) + 1)
            parked = threads.submit(http.chat, content([text, photo(190, 120, 9101, "PNG")]))
            until(lambda: empty_steps(http) > before)
            assert in_engine(http) == 1
        assert held.result().status_code == parked.result().status_code == 200


def test_a_stored_first_image_does_not_hold_a_request_back(
    http: HttpEngine, patient_service: ServerProcess
) -> None:
    known = photo(190, 120, 9110, "PNG")
    assert http.chat(content([known, "What is it?"])).status_code == 200
    with ThreadPoolExecutor(1) as threads:
        with stopped_device(patient_service):
            parked = threads.submit(http.chat, content([known, "and", photo(190, 120, 9111, "PNG")]))
            until(lambda: in_engine(http) == 1)
        assert parked.result().status_code == 200


def test_the_images_of_a_caller_who_leaves_are_not_waited_for(
    http: HttpEngine, patient_service: ServerProcess
) -> None:
    with stopped_device(patient_service):
        with connected(http, content([photo(190, 120, 9120, "PNG"), "What is it?"])):
            until(lambda: demanded(patient_service) == 1)
        until(lambda: demanded(patient_service) == 0)
        assert in_engine(http) == 0
    assert http.chat(content(["text alone"])).status_code == 200


@contextmanager
def connected(http: HttpEngine, parts: list[dict[str, Any]]) -> Iterator[None]:
    """Send a chat, and leave at the end of the block."""
    host, _, port = http.url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": parts}]}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        yield


def test_a_broken_first_image_is_answered_without_the_engine(http: HttpEngine) -> None:
    whole = photo(190, 120, 9130, "PNG")
    broken = whole[: len(whole) // 2]
    response = http.chat(content([broken, "What is it?"]))
    assert response.status_code == 400, response.text
    assert "image 0" in response.json()["error"]["message"]
