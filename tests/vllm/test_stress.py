"""Five hundred requests with late images, aborts and preemptions: none hangs, leaks or gets a wrong answer."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.photos import photo
from testing.server_process import running
from testing.vllm_engine import VllmEngine
from tests.vllm.service import SERVICE, SETTINGS

TOLERANCE = 1e-5


@pytest.fixture(
    scope="module", params=[(False, 0.0), (True, 0.0), (True, 0.01)], ids=["by step", "exact", "device"]
)
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    """An engine without the cache manager, one with it, and one whose worker can copy few rows from the device."""
    exact, tier_gib = request.param
    with running(checkpoint, executable=SERVICE, **SETTINGS, store_device_gib=tier_gib) as service:
        engine = VllmEngine(checkpoint, service.endpoint, exact=exact, extra={"device_gib": 0.001})
        yield engine
        engine.close()


def test_five_hundred_random_requests_answer_as_with_the_own_tower(engine: VllmEngine) -> None:
    draw = random.Random(7)
    pool = [
        photo(
            draw.randrange(40, 300),
            draw.randrange(40, 300),
            (3000 if engine.side.gate.exact else 2000) + n,
            "PNG",
        )
        for n in range(24)
    ]
    kinds = [
        [f"kind {n} ", *draw.sample(pool, draw.randrange(1, 6)), " end" * draw.randrange(40)]
        for n in range(30)
    ]
    right = [engine.ask(parts, own=True, tokens=4) for parts in kinds]
    engine.forget()
    arriving = threading.Thread(target=arrive, args=(engine, pool, random.Random(8)))
    arriving.start()
    waiting: dict[str, int] = {}
    started = answered = hung_up = 0
    while started < 500 or waiting:
        while started < 500 and len(waiting) < 12:
            kind = draw.randrange(len(kinds))
            waiting[engine.start(kinds[kind], tokens=4)] = kind
            started += 1
        if draw.random() < 0.02:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if draw.random() < 0.02 and waiting:
            gone = draw.choice(list(waiting))
            engine.abort(gone)
            del waiting[gone]
            hung_up += 1
        for request_id, answer in engine.step().items():
            kind = waiting.pop(request_id, None)
            if kind is not None:
                assert answer.distance(right[kind]) <= TOLERANCE
                answered += 1
    arriving.join()
    assert answered + hung_up == 500
    assert hung_up > 5
    engine.assert_nothing_is_held()


def arrive(engine: VllmEngine, images: list[bytes], draw: random.Random) -> None:
    """Submit images one by one, in any order, with pauses."""
    for image in draw.sample(images, len(images)):
        time.sleep(draw.random() * 0.2)
        engine.submit(image)
