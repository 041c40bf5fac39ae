"""The service is killed, paused or restarted at every step of a request: the request gets an answer or an error."""

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testing.photos import photo
from testing.vllm_engine import VllmEngine
from tests.engines.answers import TOLERANCE
from tests.vllm.restartable import Restartable

STEPS = range(0, 12, 2)  # a prompt of four images takes about six, and its answer eight


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Restartable]:
    """A server that tests may kill."""
    server = Restartable(checkpoint)
    server.start()
    yield server
    server.signal(signal.SIGCONT)
    server.kill()


@pytest.fixture(scope="module")
def engine(checkpoint: Path, server: Restartable) -> Iterator[VllmEngine]:
    """An engine of that server, for which an image is lost soon after the server says so."""
    engine = VllmEngine(checkpoint, server.endpoint, extra={"grace_s": 0.5})
    yield engine
    engine.close()


def images(seed: int) -> list[bytes]:
    return [photo(200, 150, 10 * seed + number, "PNG") for number in range(4)]


def submit(engine: VllmEngine, files: list[bytes]) -> None:
    """Submit, and retry until the service is back."""
    for _ in range(100):
        if all(answer.error is None for answer in engine.client.submit(files, timeout_s=10)):
            return
        time.sleep(0.2)
    raise AssertionError("the service does not come back")


@pytest.mark.story("the service dies during a prefill")
@pytest.mark.parametrize("steps", STEPS)
def test_a_request_ends_if_the_service_restarts_at_any_step(
    engine: VllmEngine, server: Restartable, steps: int
) -> None:
    files = images(4000 + steps)
    parts = ["x", *files]
    right = engine.ask(parts, own=True)
    engine.forget()
    submit(engine, files)
    request_id, ended = engine.start(parts), {}
    for _ in range(steps):
        ended |= engine.step()
    server.kill()
    server.start()
    ended = ended or engine.run(request_id)
    assert ended[request_id].reason == "error" or ended[request_id].distance(right) <= TOLERANCE
    engine.assert_nothing_is_held()
    submit(engine, files)
    again = engine.start(parts)
    assert engine.run(again)[again].distance(right) <= TOLERANCE
    engine.assert_nothing_is_held()


def test_arrived_rows_need_no_service(engine: VllmEngine, server: Restartable) -> None:
    files = images(5000)[:2]
    right = engine.ask(["x", *files], own=True)
    engine.forget()
    submit(engine, files)
    request_id = engine.start(["x", *files])
    engine.step()
    engine.run_until(lambda: all(rows.here for rows in engine.side.table._slots.values()))
    server.kill()
    assert engine.run(request_id)[request_id].distance(right) <= TOLERANCE
    server.start()


@pytest.mark.story("the service hangs")
def test_a_request_waits_for_a_service_that_pauses(engine: VllmEngine, server: Restartable) -> None:
    files = images(6000)
    right = engine.ask(["x", *files], own=True)
    engine.forget()
    submit(engine, files)
    server.signal(signal.SIGSTOP)
    request_id, ended = engine.start(["x", *files]), {}
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        ended |= engine.step()
    server.signal(signal.SIGCONT)
    ended = ended or engine.run(request_id)
    assert ended[request_id].reason == "error" or ended[request_id].distance(right) <= TOLERANCE
    engine.assert_nothing_is_held()


@pytest.mark.story("the service hangs")
def test_a_request_fails_at_timeout_s_if_the_service_hangs(
    engine: VllmEngine, server: Restartable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher, files = engine.side._fetcher, images(7000)
    monkeypatch.setattr(fetcher, "_settings", replace(fetcher._settings, timeout_s=8.0))
    submit(engine, images(7100))
    server.signal(signal.SIGSTOP)
    request_id = engine.start(["x", *files])
    begun = time.monotonic()
    assert engine.run(request_id, steps=10_000_000)[request_id].reason == "error"
    assert time.monotonic() - begun < 60
    server.signal(signal.SIGCONT)
    engine.assert_nothing_is_held()
