"""An engine whose requests all wait for rows sleeps: what it takes of the cores, and how soon it wakes."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefill_client.vllm.scheduler_side import MAX_SLEEP_S
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import ServerProcess, running
from tests.vllm.http_engine import PATIENT, HttpEngine, serving
from tests.vllm.service import SETTINGS
from tests.vllm.test_held_back import empty_steps, in_engine, stopped_device
from tests.vllm.test_middleware import content
from tests.waiting import until

IMAGES = 16
SIDE_PIXELS = 512  # 256 tokens an image
# An image takes several times as long to encode as its tokens take to prefill, so each prefill step is followed by a
# wait.
VISION = {"depth": 24, "hidden_size": 288, "intermediate_size": 1080, "num_heads": 4}
TEXT_LAYERS, TEXT = 12, {"intermediate_size": 1024}
FLAGS = ("--max-num-batched-tokens", "512", "--max-model-len", "8192", "--no-enable-prefix-caching")
ROUNDS = 2
WINDOW_S = 3.0
# For each image that an engine waits for: it looks a few times before it sleeps, and after each pause. Without sleep, a
# hundred.
EMPTY_STEPS = 10
CHATS = 6
TRIES = 20
ASLEEP_S = 0.2  # after this, an engine that waits sleeps, for nearly the rest of `MAX_SLEEP_S`


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a slow tower."""
    size = {"size": {"longest_edge": SIDE_PIXELS**2, "shortest_edge": 1024}}
    folder = tmp_path_factory.mktemp("slow")
    return write_checkpoint(folder, vision=VISION, text_layers=TEXT_LAYERS, text=TEXT, preprocessor=size)


@pytest.fixture(scope="module")
def encoder(slow: Path, patient_command: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint, on one core, which waits for a stopped device."""
    with running(slow, executable=patient_command, threads=1, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def http(slow: Path, encoder: ServerProcess) -> Iterator[HttpEngine]:
    """A `vllm serve` with our three flags."""
    with serving(slow, encoder.endpoint, *FLAGS, host_gib=0.5, **PATIENT) as engine:
        yield engine


def spent_s(http: HttpEngine) -> float:
    """Return the processor time of all processes of an engine so far, in seconds."""
    process, spent = psutil.Process(http.process.pid), 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            spent += times.user + times.system
    return spent


def answered(http: HttpEngine, parts: list[Any], tokens: int = 1) -> None:
    response = http.chat(content(parts), max_tokens=tokens)
    assert response.status_code == 200, response.text


def cost_s(http: HttpEngine, run: Callable[[], None]) -> float:
    """Return the processor time of an engine while `run` runs, in seconds."""
    before = spent_s(http)
    run()
    return spent_s(http) - before


def share_of_a_core(http: HttpEngine, seconds: float) -> float:
    """Let time pass; return the share of it that an engine spends on a core."""
    begun_s = time.monotonic()
    cost = cost_s(http, lambda: time.sleep(seconds))
    return cost / (time.monotonic() - begun_s)


def test_images_that_arrive_one_by_one_cost_an_engine_a_few_steps_each(http: HttpEngine) -> None:
    """Each image of the request is prefilled in a step of its own, and the engine sleeps in between."""
    answered(http, [photo(SIDE_PIXELS, SIDE_PIXELS, 9200, "PNG"), "warm"])
    for number in range(ROUNDS):
        seeds = range(9300 + number * IMAGES, 9300 + (number + 1) * IMAGES)
        parts = [*(photo(SIDE_PIXELS, SIDE_PIXELS, seed, "PNG") for seed in seeds), "What is new?"]
        before, begun_s = empty_steps(http), time.monotonic()
        new_s = cost_s(http, lambda parts=parts: answered(http, parts))
        empty, pauses = empty_steps(http) - before, (time.monotonic() - begun_s) / MAX_SLEEP_S
        known_s = cost_s(http, lambda parts=parts: answered(http, parts))
        print(
            f"processor seconds of the engine: {new_s:.2f}, of stored images {known_s:.2f}; {empty} empty steps"
        )
        assert 0 < empty <= EMPTY_STEPS * IMAGES + pauses


def test_an_engine_that_waits_for_a_later_image_leaves_the_cores_to_others(
    http: HttpEngine, encoder: ServerProcess
) -> None:
    known, late = photo(190, 120, 9210, "PNG"), photo(190, 120, 9211, "PNG")
    answered(http, [known, "a"])
    with ThreadPoolExecutor(1) as threads:
        with stopped_device(encoder):
            parked = threads.submit(answered, http, [known, "and", late])
            until(lambda: in_engine(http) == 1)
            before = empty_steps(http)
            until(lambda: empty_steps(http) > before)
            share = share_of_a_core(http, WINDOW_S)
        parked.result()
    print(f"an engine that waits takes {100 * share:.1f} % of a core")
    assert share <= 0.1


def took_s(run: Callable[[], None]) -> float:
    """Return how long `run` takes, in seconds."""
    begun_s = time.monotonic()
    run()
    return time.monotonic() - begun_s


def is_woken(ask_s: Callable[[], float], alone_s: float) -> bool:
    """Whether an engine that sleeps answers one of some requests before its pause ends: nothing else would."""
    return any(ask_s() - alone_s < MAX_SLEEP_S / 4 for _ in range(TRIES))


def test_a_new_request_wakes_an_engine_that_waits(http: HttpEngine, encoder: ServerProcess) -> None:
    known, late = photo(190, 120, 9220, "PNG"), photo(190, 120, 9221, "PNG")
    answered(http, [known, "a"])

    def chat_s(after_s: float = 0.0) -> float:
        time.sleep(after_s)
        return took_s(lambda: answered(http, ["text alone"]))

    alone_s = min(chat_s() for _ in range(CHATS))
    with ThreadPoolExecutor(1) as threads:
        with stopped_device(encoder):
            parked = threads.submit(answered, http, [known, "and", late])
            until(lambda: in_engine(http) == 1)
            assert is_woken(partial(chat_s, ASLEEP_S), alone_s), "each waited for the end of a pause"
            assert in_engine(http) == 1
        parked.result()


def test_rows_wake_an_engine_that_waits(http: HttpEngine, encoder: ServerProcess) -> None:
    known = photo(190, 120, 9230, "PNG")
    answered(http, [known, "a"])
    seeds = count(9231)

    def parts() -> list[Any]:
        return [known, "and", photo(190, 120, next(seeds), "PNG")]

    def rows_s() -> float:
        with ThreadPoolExecutor(1) as threads:
            with stopped_device(encoder):
                parked = threads.submit(answered, http, parts())
                until(lambda: in_engine(http) == 1)
                time.sleep(ASLEEP_S)
            return took_s(parked.result)

    alone_s = min(took_s(lambda: answered(http, parts())) for _ in range(CHATS))
    assert is_woken(rows_s, alone_s), "each waited for the end of a pause"
