"""With `own_tower`, an engine starts and continues without its service, and requests do not wait for it."""

import signal
import time
from pathlib import Path

import pytest

from testing.checkpoints import write_checkpoint
from tests.engines.answers import prompt
from tests.vllm.conftest import SMALL
from tests.vllm.http_engine import HttpEngine
from tests.vllm.restartable import Restartable
from tests.vllm.test_middleware import assert_equal, content, top

PARTS = prompt(9900, 2)
SUBMIT_TIMEOUT_S = 20.0
PATIENCE_S = 300.0


def served_by(http: HttpEngine, service: Restartable) -> bool:
    """Ask about images with a new salt; return whether the service encoded them. Fails for any other answer."""
    before = service.encodes()
    response = http.chat(content(PARTS), cache_salt=str(time.time_ns()))
    assert response.status_code == 200, response.text
    return service.encodes() > before


def until_served_by(http: HttpEngine, service: Restartable) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not served_by(http, service):
        assert time.monotonic() < deadline, http.log.read_text()
        time.sleep(0.2)


def time_of(http: HttpEngine, times: int) -> float:
    """Ask this many times; return how long that took, in seconds."""
    begun = time.monotonic()
    for _ in range(times):
        response = http.chat(content(PARTS), cache_salt=str(time.time_ns()))
        assert response.status_code == 200, response.text
    return time.monotonic() - begun


@pytest.mark.story("without the service")
def test_own_tower_serves_while_the_service_is_down(checkpoint: Path, tmp_path: Path) -> None:
    service = Restartable(checkpoint)
    service.start()
    service.kill()
    http = HttpEngine(
        checkpoint, service.endpoint, without_service="own_tower", submit_timeout_s=SUBMIT_TIMEOUT_S
    )
    try:
        http.wait_until_it_answers()
        response = http.chat(content(PARTS))
        assert response.status_code == 200, "no service yet"
        own = top(response.json()["choices"][0])
        service.start()
        until_served_by(http, service)
        assert_equal(top(http.chat(content(PARTS)).json()["choices"][0]), own)
        # A service that hangs delays only the first request.
        service.signal(signal.SIGSTOP)
        time_of(http, 1)
        assert time_of(http, 5) < 5 * SUBMIT_TIMEOUT_S
        service.signal(signal.SIGCONT)
        until_served_by(http, service)
        # A service of another model delays none: its rows have another width.
        service.kill()
        other = Restartable(
            write_checkpoint(
                tmp_path, preprocessor=SMALL["qwen3_vl"], vision={"deepstack_visual_indexes": [1, 2]}
            )
        )
        other.endpoint = service.endpoint
        other.start()
        assert time_of(http, 5) < 5 * SUBMIT_TIMEOUT_S
        assert not served_by(http, other)
        other.kill()
    finally:
        service.kill()
        http.stop()
