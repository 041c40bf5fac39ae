"""What an engine of vLLM gains: time to first token with its own tower, against the service, on the real engine.

One engine after the other in this process, with one core; the service has the other. Every prompt has new images. The
model is small and its parts are sized so that encoding an image and prefilling its tokens both matter, as they do on a
GPU. Three ways: the engine's own tower; ours, waiting for all images of a request; ours, by prefill step and with the
cache manager. Ratios say little on a machine that others use: the load is part of the answer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.method_timer import MethodTimer
from bench.vllm_parts.sharing import SIDES, sharing_figures
from testing.vllm_environment import ENVIRONMENT, PYTHON

if TYPE_CHECKING:
    from testing.vllm_engine import Engine

BENCHMARK = Benchmark(
    "vllm",
    "What does an engine of vLLM gain?",
    (
        Figure("own_16_ms", "first token of a prompt of 16 images: the engine's own tower", "ms"),
        Figure("request_16_ms", "ours, waiting for all of its images", "ms"),
        Figure("window_16_ms", "ours, by prefill step", "ms"),
        Figure("ttft_own_over_ours_16", "own tower / ours, 16 images", target=">= 1.3"),
        Figure("ttft_request_over_window", "all images first / by prefill step", target=">= 1.15"),
        Figure("own_round8_ms", "first token in round 8 of a chat with one new image each: own tower", "ms"),
        Figure("request_round8_ms", "ours, waiting for all images", "ms"),
        Figure("window_round8_ms", "ours, by prefill step", "ms"),
        Figure(
            "round8_own_over_ours",
            "own tower / ours, round 8",
            target=">= 1.0",
        ),
        Figure("step_overhead_ms", "connector in a step without our images", "ms", target="<= 0.1"),
        Figure("parked_core_percent", "of a core, while one request waits and nothing else runs", "%"),
        Figure(
            "share_step_overhead_percent",
            "an engine that shares what its tower makes: connector in a step when everything misses",
            "%",
            "<= 2",
        ),
        *(
            Figure(f"{way}_{side}_ms", f"first token of a {side}×{side} image, {told}", "ms")
            for side in SIDES
            for way, told in (("miss", "encoded by its own tower"), ("hit", "out of the store"))
        ),
        Figure("hit_over_miss", "out of the store / own tower, the worst of these", target="<= 1"),
        Figure("load_before", "processes that wanted a core when it began"),
    ),
    limit_s=360,
    quick=("--rounds", "1"),
    why_not=lambda: "" if PYTHON.exists() else "no .venv-vllm: make test-vllm",
)
SIDE_PIXELS = 512  # 256 tokens an image
IMAGES, CHAT_ROUNDS = 16, 8
STEPS = 300  # for what a step costs
METHODS = (  # all of the connector that runs in a decode step
    "ensure_cache_available", "has_cache_item", "build_connector_meta", "take_unavailable_requests",
    "update_connector_output", "get_ec_connector_stats", "start_load_caches", "build_connector_worker_meta",
)  # fmt: skip
IDLE_STEP_S = 0.001
PARKED_S = 3.0
WAYS: dict[str, dict[str, Any]] = {
    "own": {},
    "request": {"extra": {"gating": "request", "host_gib": 0.5}},
    "window": {"exact": True, "extra": {"host_gib": 0.5}},
}
VISION = {"depth": 6, "hidden_size": 288, "intermediate_size": 1080, "num_heads": 4}
TEXT_LAYERS, TEXT = 12, {"intermediate_size": 1024}
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 512, "max_model_len": 8192}


def main() -> None:
    """Run the benchmark, in the environment that has vLLM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each kind; medians are told")
    parser.add_argument("--here", action="store_true", help="in this interpreter, which has vLLM")
    arguments = parser.parse_args()
    if not arguments.here:
        sys.exit(_elsewhere())
    figures = _measure(arguments.rounds)
    if not arguments.json:
        sys.stdout.write("\n".join(f"{name:<28} {value}" for name, value in figures.items()) + "\n")
    sys.stdout.write(json.dumps(figures) + "\n")


def _elsewhere() -> int:
    if not PYTHON.exists():
        sys.stderr.write("bench.vllm needs .venv-vllm: make test-vllm\n")
        return 2
    service = Path(sys.executable).with_name("encoder-service")
    environment = {"ENCODER_SERVICE": str(service), **os.environ, **ENVIRONMENT}
    command: list[str | Path] = [PYTHON, "-m", "bench.vllm", "--here", *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode


def _measure(rounds: int) -> dict[str, Any]:
    from testing.checkpoints import write_checkpoint
    from testing.server_process import running
    from testing.vllm_engine import Engine

    told: dict[str, Any] = {"load_before": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        size = {"size": {"longest_edge": SIDE_PIXELS**2, "shortest_edge": 1024}}
        model = write_checkpoint(folder, vision=VISION, text_layers=TEXT_LAYERS, text=TEXT, preprocessor=size)
        service = Path(os.environ["ENCODER_SERVICE"])
        with running(
            model,
            executable=service,
            device="cpu",
            dtype="float32",
            store_host_gib=0.5,
            device_peak_tflops=0.1,
            accept_put="yes",
        ) as server:
            photos = _photos()  # of all ways: what one has submitted is stored for the next
            for way, options in WAYS.items():
                engine = Engine(model, server.endpoint, **ENGINE, **options)
                told |= _of_way(engine, way, rounds, photos)
                engine.close()
            told |= sharing_figures(model, server.endpoint, rounds, ENGINE)
    told["ttft_own_over_ours_16"] = _ratio(told, "own_16_ms", "window_16_ms")
    told["ttft_request_over_window"] = _ratio(told, "request_16_ms", "window_16_ms")
    told["round8_own_over_ours"] = _ratio(told, "own_round8_ms", "window_round8_ms")
    told["load_after"] = round(os.getloadavg()[0], 1)
    return told


def _of_way(engine: "Engine", way: str, rounds: int, photos: Iterator[bytes]) -> dict[str, Any]:
    """Measure one engine; the first prompt only warms it up."""
    own = way == "own"
    _first_token_ms(engine, [next(photos), "warm"], own=own)
    long_ms = [_first_token_ms(engine, [next(photos) for _ in range(IMAGES)], own=own) for _ in range(rounds)]
    chats_ms = [_chat_ms(engine, photos, own=own) for _ in range(rounds)]
    told: dict[str, Any] = {
        f"{way}_16_ms": round(median(long_ms), 1),
        f"{way}_round8_ms": round(median(chat[-1] for chat in chats_ms), 1),
    }
    if way == "window":
        told |= {
            "step_overhead_ms": _step_overhead_ms(engine),
            "parked_core_percent": _parked_core_percent(engine, photos),
        }
    return told


def _first_token_ms(engine: "Engine", parts: list[str | bytes], *, own: bool) -> float:
    begun = time.perf_counter()
    if not own:
        engine.submit(*(part for part in parts if isinstance(part, bytes)))
    request_id, ended = engine.start(parts, own=own, tokens=1), {}
    while request_id not in ended:
        step_begun = time.perf_counter()
        ended = engine.step()
        if time.perf_counter() - step_begun < IDLE_STEP_S:
            time.sleep(IDLE_STEP_S)  # as vLLM's own loop does when a step had nothing to run
    return 1000 * (time.perf_counter() - begun)


def _chat_ms(engine: "Engine", photos: Iterator[bytes], *, own: bool) -> list[float]:
    """Return the time to the first token of each round; what came before is in the prefix cache."""
    parts: list[str | bytes] = []
    rounds = []
    for number in range(CHAT_ROUNDS):
        parts += [next(photos), f" round {number} of the chat "]
        rounds.append(_first_token_ms(engine, parts, own=own))
    return rounds


def _step_overhead_ms(engine: "Engine") -> float:
    """Return what our connector takes of a decode step of eight requests, none with an image of ours."""
    timer = MethodTimer()
    timer.watch(engine.scheduler.ec_connector, METHODS)
    started = [engine.start([f"text {number}"], tokens=STEPS) for number in range(8)]
    engine.step()
    timer.spent_s = 0.0
    for _ in range(STEPS - 20):
        engine.step()
    per_step_ms = 1000 * timer.spent_s / (STEPS - 20)
    engine.run(*started)
    return round(per_step_ms, 4)


def _parked_core_percent(engine: "Engine", photos: Iterator[bytes]) -> float:
    """Return how much of a core the engine's loop takes while one request waits for an image that does not come."""
    request_id = engine.start([next(photos)], tokens=1)
    begun, spent = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begun < PARKED_S:
        engine.step()
        time.sleep(IDLE_STEP_S)
    percent = 100 * (time.thread_time() - spent) / (time.perf_counter() - begun)
    engine.abort(request_id)
    return round(percent, 1)


def _photos() -> Iterator[bytes]:
    from testing.photos import photo

    seed = int(time.time())
    while True:
        seed += 1
        yield photo(SIDE_PIXELS, SIDE_PIXELS, seed)


def _ratio(told: dict[str, Any], above: str, below: str) -> float:
    return round(float(str(told[above])) / float(str(told[below])), 2)


if __name__ == "__main__":
    main()
