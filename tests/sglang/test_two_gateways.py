"""Two gateways registered at one SGLang, under load, as services and gateways are killed and started again."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from testing.answers import data_url
from testing.photos import photo
from testing.sglang_engine import IMAGE, SglangEngine, answer_of
from testing.sglang_gateway import GatewayProcess, running_gateway
from tests.engines.answers import PROMPTS, Own, assert_equal
from tests.sglang.conftest import service_of
from tests.sglang.gateways import language_server
from tests.vllm.restartable import Restartable
from tests.waiting import until

ASKED = ("one png", "one jpeg", "text between", "the same twice")
CALLERS = 3
# Of a caller: SGLang itself sends nothing a second time. It checks its encoders every 10 s, and leaves out one that has
# failed three checks in a row.
RETRIES, RETRY_S = 60, 1.0
PATIENCE_S = 300.0


@dataclass
class Pair:
    """An SGLang, two services and two gateways, each of which may be gone for a while."""

    engine: SglangEngine
    bootstrap: str
    """Where gateways register at the engine."""
    services: list[Restartable]
    start_gateway: Callable[[], GatewayProcess]
    gateways: list[GatewayProcess]

    @property
    def endpoints(self) -> str:
        return ",".join(service.endpoint for service in self.services)


@pytest.fixture(scope="module")
def pair(checkpoint: Path, own: Own) -> Iterator[Pair]:
    """Two services with gateways, and an engine."""
    with ExitStack() as held:
        services = [held.enter_context(service_of(checkpoint)) for _ in range(2)]
        engine, bootstrap = held.enter_context(language_server(checkpoint))
        endpoints = ",".join(service.endpoint for service in services)

        def start_gateway() -> GatewayProcess:
            gateway = running_gateway(
                endpoints, language_model=checkpoint, register_at=bootstrap, virtual_encoders=2, part_s=100
            )
            return held.enter_context(gateway)

        pair = Pair(engine, bootstrap, services, start_gateway, [start_gateway(), start_gateway()])
        until(lambda: len(registered(bootstrap)) == 4)
        yield pair


def registered(bootstrap: str) -> list[str]:
    return list(httpx.get(f"{bootstrap}/list_encoder_urls", timeout=PATIENCE_S).json()["encoder_urls"])


@dataclass
class Load:
    """What came of the questions of some callers."""

    served: int = 0
    refused: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_on(self, engine: SglangEngine, own: Own, *, retries: int) -> None:
        """Ask until the end. Raises `AssertionError` for a wrong answer, and for a refusal after all retries."""
        number = 0
        while not self.ended.is_set():
            parts = PROMPTS[ASKED[number % len(ASKED)]]
            number += 1
            for attempt in range(retries + 1):
                response = engine.generate(parts)
                if response.status_code == 503 and attempt < retries:
                    with self._lock:
                        self.refused += 1
                    time.sleep(RETRY_S)
                    continue
                assert_equal(answer_of(response), own(parts))
                with self._lock:
                    self.served += 1
                break

    def serves_more(self, requests: int = 6) -> None:
        """Wait until `requests` more requests have been answered."""
        goal = self.served + requests
        until(lambda: self.served >= goal or self.ended.is_set())


@contextmanager
def loaded(pair: Pair, own: Own, *, retries: int = 0) -> Iterator[Load]:
    """Run callers in the background; raise the first error of a caller."""
    load = Load()
    with ThreadPoolExecutor(CALLERS) as pool:
        asking = [pool.submit(load.ask_on, pair.engine, own, retries=retries) for _ in range(CALLERS)]
        for each in asking:
            each.add_done_callback(lambda _: load.ended.set())
        try:
            load.serves_more()
            yield load
            load.serves_more()
        finally:
            load.ended.set()
    for each in asking:
        each.result()
    assert pair.engine.process.poll() is None


@pytest.mark.story("services are killed and started again under load")
def test_no_request_fails_as_services_are_killed_and_started_again(pair: Pair, own: Own) -> None:
    with loaded(pair, own) as load:
        pair.services[0].kill()
        load.serves_more()
        pair.services[0].start()
        pair.services[1].kill()
        load.serves_more()
        pair.services[0].kill()  # none is left for a while
        pair.services[0].start()
        pair.services[1].start()
    assert load.refused == 0


def test_no_request_fails_as_a_gateway_is_ended_and_started_again(pair: Pair, own: Own) -> None:
    with loaded(pair, own) as load:
        assert pair.gateways.pop(0).terminate() == 0
        load.serves_more()
        pair.gateways.append(pair.start_gateway())
    assert load.refused == 0


def test_requests_of_a_killed_gateway_are_refused_and_served_when_retried(pair: Pair, own: Own) -> None:
    with loaded(pair, own, retries=RETRIES) as load:
        pair.gateways.pop(0).kill()
        load.serves_more(12)
        pair.gateways.append(pair.start_gateway())
    until(lambda: len(registered(pair.bootstrap)) == 4)  # without the killed one
    served = pair.gateways[-1]
    before = served.count("parts", 'outcome="served"')
    with loaded(pair, own):
        until(lambda: served.count("parts", 'outcome="served"') > before)


@pytest.mark.story("callers hang up")
def test_hanging_up_affects_no_other_request(pair: Pair, own: Own) -> None:
    def hang_up(number: int) -> None:
        asked = {"text": IMAGE, "image_data": [data_url(photo(300, 200, 4000 + number))]}
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{pair.engine.url}/generate", json=asked, timeout=2)

    with loaded(pair, own) as load:
        for service in pair.services:
            service.signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(hang_up, range(8)))
        finally:
            for service in pair.services:
                service.signal(signal.SIGCONT)
        load.serves_more()
    assert load.refused == 0
