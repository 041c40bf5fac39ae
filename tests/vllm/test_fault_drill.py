"""Replicas are killed, drained and restarted under forty callers: every request gets the right answer.

DRILL_S is the duration of each drill in seconds; DRILL_SEED decides which replicas end when. For a minute each:

    DRILL_S=60 ENCODER_SERVICE=.venv/bin/encoder-service .venv-vllm/bin/python -m pytest -o addopts=-q \\
      --confcutdir tests/vllm tests/vllm/test_fault_drill.py -s
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testing.processes import free_port
from tests.engines.answers import prompt
from tests.vllm.http_engine import HttpEngine
from tests.vllm.redis_process import redis_url
from tests.vllm.restartable import Restartable
from tests.vllm.test_middleware import assert_equal, content, top

CALLERS = 40
# Answers before the next replica ends, so that requests are answered however long a replica takes to start.
ANSWERS_BETWEEN = CALLERS // 4
DRILL_S = float(os.environ.get("DRILL_S", "12"))
SEED = int(os.environ.get("DRILL_SEED", "5"))
PROMPTS = [prompt(9700 + number, 1 + number % 3) for number in range(12)]
FLEET: dict[str, Any] = {
    "threads": 1,
    "decode_threads": 1,
    "drain_s": 10,
    "index_timeout_ms": 2000,
}


class Drill:
    """Forty callers of an engine, while replicas of its service end and restart."""

    def __init__(self, http: HttpEngine, replicas: list[Restartable], right: list[Any]) -> None:
        self._http = http
        self._replicas = replicas
        self._right = right
        self._over = threading.Event()
        self.answers: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def run(self) -> None:
        """Run for `DRILL_S`, and until a replica has ended and there were as many answers as callers."""
        with ThreadPoolExecutor(CALLERS + 1) as pool:
            callers = [pool.submit(self._call, number) for number in range(CALLERS)]
            chaos = pool.submit(self._end_and_begin)
            try:
                self._over.wait(DRILL_S)
                while not (self.ended and self.answers["200"] >= CALLERS):
                    if any(each.done() for each in (*callers, chaos)):
                        break  # it has failed
                    time.sleep(0.1)
            finally:
                self._over.set()
            chaos.result()
            for caller in callers:
                caller.result()

    def _call(self, number: int) -> None:
        draw = random.Random(1000 * SEED + number)
        count = 0
        while not self._over.is_set():
            count += 1
            kind = draw.randrange(len(PROMPTS))
            # Of its own salt: no rows and no prefix of another request serve this one.
            response = self._http.chat(
                content(PROMPTS[kind]), cache_salt=f"{SEED}-{number}-{count}-{time.time_ns()}"
            )
            self.answers[f"{response.status_code}"] += 1
            if response.status_code == 200:
                assert_equal(top(response.json()["choices"][0]), self._right[kind])
                continue
            # While no replica runs, the answer says when to retry.
            may_be_refused = len(self._replicas) == 1 and response.status_code == 503
            assert may_be_refused, f"{response.status_code}: {response.text}"
            self._over.wait(float(response.headers["retry-after"]))

    def _end_and_begin(self) -> None:
        draw = random.Random(SEED)
        while not self._over.wait(draw.uniform(0.2, 3.0)):
            replica = draw.choice(self._replicas)
            way = draw.choice(["kill", "drain"])
            getattr(replica, way)()
            self.ended[way] += 1
            self._over.wait(draw.uniform(0.0, 1.0))
            replica.start()
            due = self.answers["200"] + ANSWERS_BETWEEN
            while self.answers["200"] < due and not self._over.wait(0.1):
                pass


@contextmanager
def fleet(checkpoint: Path, endpoints: list[str], **settings: Any) -> Iterator[list[Restartable]]:
    """Replicas at these addresses."""
    replicas = [Restartable(checkpoint, **{**FLEET, **settings}) for _ in endpoints]
    try:
        for replica, endpoint in zip(replicas, endpoints, strict=True):
            replica.endpoint = endpoint
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            if replica.server is not None:
                replica.kill()


@dataclass
class Calm:
    """An engine, the addresses of its service's replicas, and its answers before the first replica ended."""

    http: HttpEngine
    endpoints: list[str]
    right: list[Any]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["one_replica", "two_replicas", "three_replicas"])
def calm(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Calm]:
    """An engine for this many replicas, none of which runs yet."""
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(request.param)]
    with fleet(checkpoint, endpoints) as replicas:
        http = HttpEngine(checkpoint, endpoints, timeout_s=300.0, submit_timeout_s=60.0, grace_s=1.0)
        try:
            http.wait_until_it_answers()
            answers = [http.chat(content(parts)) for parts in PROMPTS]
            for replica in replicas:
                replica.kill()
            yield Calm(http, endpoints, [top(answer.json()["choices"][0]) for answer in answers])
        finally:
            http.stop()


@pytest.mark.story("services are killed and started again under load")
@pytest.mark.parametrize("index", ["memory", "redis"])
@pytest.mark.timeout(900 + 20 * DRILL_S)
def test_no_request_fails_while_replicas_restart(checkpoint: Path, calm: Calm, index: str) -> None:
    with redis_url() as redis:
        where = {"index": redis} if index == "redis" else {}
        with fleet(checkpoint, calm.endpoints, **where) as replicas:
            drill = Drill(calm.http, replicas, calm.right)
            drill.run()
    print(
        f"\n{len(replicas)} replicas, {index}: {dict(drill.answers)}, ended {dict(drill.ended)}", flush=True
    )
