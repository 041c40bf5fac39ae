"""Compares a real vLLM engine with its own tower to one with the service: time to first token.

Engines run one by one in this process, on one core; the service has the other core. Every prompt has new images. The
model is small, but sized so that both encoding an image and prefilling its tokens take time, as on a GPU. Images are
encoded in four ways: by the engine's own tower; by the service, where a request waits for all its images; by the
service, where each prefill step waits for its images, with the cache manager; by vLLM's own encoder disaggregation, in
an instance that has the other core instead of the service. On a busy machine the ratios mean little.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.service import parsed_in, service_for_engines
from testing.engine_environments import VLLM_PYTHON, VLLM_VARIABLES
from testing.photos import photo

if TYPE_CHECKING:
    from testing.vllm_engine import VllmEngine

Submit = Callable[[Sequence[bytes]], None]
"""Lets something encode images before the engine gets their request."""
FirstToken = Callable[[list[str | bytes]], float]
"""Returns the milliseconds to the first token of a prompt."""
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

BENCHMARK = Benchmark(
    "vllm",
    "What does an engine of vLLM gain?",
    (
        Figure("own_16_ms", "time to first token of 16 images: vLLM's own tower", "ms"),
        Figure("window_16_ms", "time to first token of 16 images: ours, by prefill step", "ms"),
        Figure("ttft_own_over_ours_16", "own tower / ours, 16 images", target=">= 1.3"),
        Figure("ttft_request_over_window", "ours, 16 images: all first / by prefill step", target=">= 1.15"),
        Figure(
            "round8_own_over_ours", "own tower / ours, one new image in round 8 of a chat", target=">= 1.0"
        ),
        Figure("disaggregated_over_ours_16", "own disaggregation / ours, 16 images", target=">= 1.3"),
        Figure("round8_disaggregated_over_ours", "own disaggregation / ours, round 8", target=">= 1.3"),
        Figure("fetch_16_ms", "connector's processor time, 16 hits", "ms", "<= 7"),
        Figure("step_overhead_ms", "connector's time in a step without images", "ms", target="<= 0.1"),
    ),
    limit_s=480,
    dry_run=("--rounds", "1"),
    why_not=lambda: "" if VLLM_PYTHON.exists() else "no .venv-vllm: make test-vllm",
)
SIDE_PIXELS = 512  # 256 tokens an image
IMAGES, CHAT_ROUNDS = 16, 8
STEPS = 300  # to measure the cost of a step
STEP_METHODS = (  # the connector's methods that run in a decode step
    "ensure_cache_available", "has_cache_item", "build_connector_meta", "take_unavailable_requests",
    "update_connector_output", "get_ec_connector_stats", "start_load_caches", "build_connector_worker_meta",
)  # fmt: skip
FETCH_METHODS = ("update_state_after_alloc", "update_state_after_free", "request_finished", *STEP_METHODS)
FETCHES, FETCHED_PIXELS = 12, 256  # 64 tokens an image
IDLE_STEP_S = 0.001
WAYS: dict[str, dict[str, Any]] = {
    "own": {},
    "request": {"extra": {"gating": "request", "host_gib": 0.5}},
    "window": {"exact": True, "extra": {"host_gib": 0.5}},
}
VISION = {"depth": 6, "hidden_size": 288, "intermediate_size": 1080, "num_heads": 4}
TEXT_LAYERS, TEXT = 12, {"intermediate_size": 1024}
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 512, "max_model_len": 8192}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each kind; the medians count")
    args = parsed_in(VLLM_PYTHON, "bench.vllm", parser, VLLM_VARIABLES)
    print_figures(_measure(args.rounds), args)


def _measure(rounds: int) -> dict[str, Any]:
    from bench.vllm_parts.disaggregation import encoder_instance
    from testing.checkpoints import write_checkpoint
    from testing.engine_flags import transfer
    from testing.vllm_engine import VllmEngine

    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = {"size": {"longest_edge": SIDE_PIXELS**2, "shortest_edge": 1024}}
        model = write_checkpoint(folder, vision=VISION, text_layers=TEXT_LAYERS, text=TEXT, preprocessor=size)
        with service_for_engines(model) as server:
            # One iterator for all ways: the service has stored what an earlier way submitted.
            photos = _photos(SIDE_PIXELS)
            for way, options in WAYS.items():
                engine = VllmEngine(model, server.endpoint, **ENGINE, **options)
                submit = _nothing if way == "own" else partial(_submit, engine)
                figures |= _way_figures(engine, way, rounds, photos, submit)
                engine.close()
            rows = Path(folder) / "rows"
            with encoder_instance(model, rows, images=IMAGES, settings=ENGINE) as encoder:
                engine = VllmEngine(model, server.endpoint, transfer=transfer(rows, "ec_consumer"), **ENGINE)
                figures |= _way_figures(engine, "disaggregated", rounds, photos, encoder.encode)
                engine.close()
    ratios = {
        "ttft_own_over_ours_16": ("own_16_ms", "window_16_ms"),
        "ttft_request_over_window": ("request_16_ms", "window_16_ms"),
        "round8_own_over_ours": ("own_round8_ms", "window_round8_ms"),
        "disaggregated_over_ours_16": ("disaggregated_16_ms", "window_16_ms"),
        "round8_disaggregated_over_ours": ("disaggregated_round8_ms", "window_round8_ms"),
    }
    return figures | {
        name: round(figures[above] / figures[below], 2) for name, (above, below) in ratios.items()
    }


def _way_figures(
    engine: "VllmEngine", way: str, rounds: int, photos: Iterator[bytes], submit: Submit
) -> dict[str, Any]:
    """Measure an engine, after a warm-up prompt."""
    first_token_ms = partial(_first_token_ms, engine, submit, own=way in ("own", "disaggregated"))
    first_token_ms([next(photos), "warm"])
    long_ms = [first_token_ms([next(photos) for _ in range(IMAGES)]) for _ in range(rounds)]
    chats_ms = [_chat_ms(first_token_ms, photos) for _ in range(rounds)]
    figures: dict[str, Any] = {
        f"{way}_16_ms": round(median(long_ms), 1),
        f"{way}_round8_ms": round(median(chat[-1] for chat in chats_ms), 1),
    }
    if way == "window":
        figures |= {
            "step_overhead_ms": _step_overhead_ms(engine),
            "fetch_16_ms": _fetch_ms(engine, first_token_ms),
        }
    return figures


def _nothing(_: Sequence[bytes]) -> None:
    pass


def _submit(engine: "VllmEngine", images: Sequence[bytes]) -> None:
    engine.submit(*images)


def _first_token_ms(engine: "VllmEngine", submit: Submit, parts: list[str | bytes], *, own: bool) -> float:
    """Return the time of a request, with that of `submit`. With `own`, vLLM gets the images themselves."""
    begun = time.perf_counter()
    submit([part for part in parts if isinstance(part, bytes)])
    request_id, ended = engine.start(parts, own=own, tokens=1), {}
    while request_id not in ended:
        step_begun = time.perf_counter()
        ended = engine.step()
        if time.perf_counter() - step_begun < IDLE_STEP_S:
            time.sleep(IDLE_STEP_S)  # as vLLM's own loop does when a step had nothing to run
    return 1000 * (time.perf_counter() - begun)


def _chat_ms(first_token_ms: FirstToken, photos: Iterator[bytes]) -> list[float]:
    """Return the time to the first token of each round. Earlier rounds are in the prefix cache."""
    parts: list[str | bytes] = []
    rounds = []
    for number in range(CHAT_ROUNDS):
        parts += [next(photos), f" round {number} of the chat "]
        rounds.append(first_token_ms(parts))
    return rounds


def _fetch_ms(engine: "VllmEngine", first_token_ms: FirstToken) -> float:
    """Return the processor time that 16 stored images cost this process beside the model's, as a median.

    It is that of the connector's methods in the engine's thread, and that of the threads that fetch and copy.
    """
    photos = _photos(FETCHED_PIXELS)
    timer = MethodTimer(time.thread_time)
    timer.watch(engine.scheduler.ec_connector, FETCH_METHODS)
    found_ms = []
    for _ in range(FETCHES):
        images = [next(photos) for _ in range(IMAGES)]
        first_token_ms([*images, "so that the service stores them"])
        engine.forget()
        engine.submit(*images)
        timer.spent_s, others_ms = 0.0, _other_threads_ms()
        engine.run(engine.start(images, tokens=1))
        found_ms.append(1000 * timer.spent_s + _other_threads_ms() - others_ms)
    return round(median(found_ms), 2)


def _other_threads_ms() -> float:
    """Return the processor time of this process's other threads, without those of PyTorch's process groups."""
    spent_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != threading.get_native_id() and "gloo" not in (thread / "comm").read_text():
            spent_ns += int((thread / "schedstat").read_text().split()[0])
    return spent_ns / 1e6


def _step_overhead_ms(engine: "VllmEngine") -> float:
    """Return the time of our connector in a decode step of eight requests without images."""
    timer = MethodTimer()
    timer.watch(engine.scheduler.ec_connector, STEP_METHODS)
    started = [engine.start([f"text {number}"], tokens=STEPS) for number in range(8)]
    engine.step()
    timer.spent_s = 0.0
    for _ in range(STEPS - 20):
        engine.step()
    per_step_ms = 1000 * timer.spent_s / (STEPS - 20)
    engine.run(*started)
    return round(per_step_ms, 4)


class MethodTimer:
    """Adds up the time that watched methods take by a clock, in `spent_s`; a measurement sets it to 0."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.spent_s = 0.0

    def watch(self, watched: object, methods: Iterable[str]) -> None:
        """Replace methods of an object by timed ones. The methods must not call each other."""
        for name in methods:
            setattr(watched, name, self._timed(getattr(watched, name)))

    def _timed(self, method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        def timed(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
            began = self._clock()
            try:
                return method(*arguments, **named)
            finally:
                self.spent_s += self._clock() - began

        return timed


def _photos(side: int) -> Iterator[bytes]:
    """Yield photos that no other run has, so nothing of them is stored."""
    seed = time.time_ns() // 1000
    while True:
        seed += 1
        yield photo(side, side, seed)


if __name__ == "__main__":
    main()
