"""The service or the engine ends while the engine sleeps, because its only request waits for rows."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from testing.photos import photo
from tests.vllm.http_engine import PATIENT, HttpEngine, serving
from tests.vllm.restartable import Restartable
from tests.vllm.test_held_back import demanded, in_engine, stopped_device
from tests.vllm.test_middleware import assert_equal, content, top
from tests.vllm.test_parked import answered
from tests.waiting import until

SEEDS = count(9500)
TIMEOUT_S, SUBMIT_TIMEOUT_S = 8.0, 6.0
SILENT_S = 2.0  # until a client gives up on a server that does not answer pings
SLACK_S = 10.0  # of a busy machine
ABORT_S = 60.0  # generous: it takes a fraction of a second


@pytest.fixture(scope="module")
def server(checkpoint: Path, patient_command: Path) -> Iterator[Restartable]:
    """A server that waits for a stopped device, and that tests may kill."""
    server = Restartable(checkpoint, executable=patient_command)
    server.start()
    yield server
    server.signal(signal.SIGCONT)
    server.kill()


@pytest.fixture(scope="module", params=["refuse", "own_tower"])
def without_service(request: pytest.FixtureRequest) -> str:
    """What the engine does without the service."""
    return str(request.param)


@pytest.fixture(scope="module")
def http(checkpoint: Path, server: Restartable, without_service: str) -> Iterator[HttpEngine]:
    """A `vllm serve` with our three flags and short time limits."""
    limits = {"timeout_s": TIMEOUT_S, "submit_timeout_s": SUBMIT_TIMEOUT_S, "grace_s": 0.5}
    with serving(checkpoint, server.endpoint, without_service=without_service, **limits) as engine:
        yield engine


def late() -> bytes:
    """Return a new image."""
    return photo(190, 120, next(SEEDS), "PNG")


def ended(
    http: HttpEngine, server: Restartable, parts: list[Any], number: signal.Signals
) -> tuple[httpx.Response, float]:
    """Send a signal to the service while a request waits; return the answer, and how many seconds it took."""
    # A killed server takes its device with it.
    with (
        ThreadPoolExecutor(1) as threads,
        suppress(ProcessLookupError),
        stopped_device(server.process),
    ):
        waiting = threads.submit(http.chat, content(parts))
        until(lambda: in_engine(http) == 1)
        answered(http, ["text alone"])
        server.signal(number)
        begun_s = time.monotonic()
        waiting.result()
        took_s = time.monotonic() - begun_s
    return waiting.result(), took_s


def until_served(http: HttpEngine, server: Restartable) -> None:
    """Ask about new images until the service has encoded one."""

    def is_served() -> bool:
        before = server.encodes()
        response = http.chat(content([late(), "What is it?"]))
        assert response.status_code in (200, 503), response.text
        return response.status_code == 200 and server.encodes() > before

    until(is_served)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_end_of_the_service_is_noticed_during_the_sleep(
    http: HttpEngine, server: Restartable, without_service: str, number: signal.Signals
) -> None:
    parts = [photo(190, 120, 9499, "PNG"), "and", late()]
    until_served(http, server)
    answered(http, parts[:2])
    response, took_s = ended(http, server, parts, number)
    print(f"{number.name}, {without_service}: {response.status_code} after {took_s:.1f} s")
    if number == signal.SIGKILL:
        server.kill()
        server.start()
    server.signal(signal.SIGCONT)
    if without_service == "own_tower":
        assert response.status_code == 200, response.text
        assert took_s < SILENT_S + SUBMIT_TIMEOUT_S + SLACK_S
    else:
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) > 0
        assert took_s < SILENT_S + TIMEOUT_S / 2 + SLACK_S
    until_served(http, server)
    again = http.chat(content(parts))
    assert again.status_code == 200, again.text
    if without_service == "own_tower":
        assert_equal(*(top(each.json()["choices"][0]) for each in (response, again)))


def test_an_engine_core_that_sleeps_ends_by_sigterm(checkpoint: Path, server: Restartable) -> None:
    """By default, the API server kills its engine core; SIGTERM lets the core abort its requests."""
    known, service = photo(190, 120, 9497, "PNG"), server.process
    with serving(checkpoint, server.endpoint, **PATIENT) as http:
        answered(http, [known, "a"])
        processes = psutil.Process(http.process.pid).children(recursive=True)
        (core,) = (each for each in processes if "VLLM::EngineCore" in each.cmdline())
        with ThreadPoolExecutor(1) as threads, stopped_device(service):
            waiting = threads.submit(http.chat, content([known, "and", late()]))
            until(lambda: in_engine(http) == 1)
            answered(http, ["text alone"])
            begun_s = time.monotonic()
            core.terminate()
            until(lambda: demanded(service) == 0)
            withdrawn_s = time.monotonic() - begun_s
        print(f"{waiting.result().status_code}: the image is withdrawn after {withdrawn_s:.2f} s")
        until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)
        ended_s = time.monotonic() - begun_s
        print(f"the engine core ends after {ended_s:.2f} s")
        assert withdrawn_s < ABORT_S
