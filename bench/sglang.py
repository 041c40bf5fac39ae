"""Compares SGLang with the service to SGLang with its own tower and its own encoder server: first token and hits.

Real engines encode the images of one checkpoint in three ways: with SGLang's own tower; with the service through the
gateway; with SGLang's own encoder server. The gateway and that server feed the same language server in turn. The ways
take turns on both cores while the other engines idle, and every prompt has new photos. The model is small. On a busy
machine the ratios mean little. `bench.engines` measures the packages that SGLang loads.

Every step prints its duration and its figures. Rounds for which no time is left are skipped.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self
from urllib.request import Request, urlopen
from uuid import uuid4

import psutil
import zmq

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, step
from bench.harness.budget import TimeBudget
from bench.harness.calls import ms_of, submit_and_fetch
from bench.harness.memory import private_bytes
from bench.harness.service import parsed_in, service_for_engines
from bench.vllm import TEXT, TEXT_LAYERS
from prefill_client import EncoderClient
from testing.engine_environments import SGLANG_PYTHON
from testing.photos import data_url, photo

if TYPE_CHECKING:
    from testing.sglang_engine import SglangEngine
    from testing.sglang_gateway import GatewayProcess

WAYS = ("own", "encoder", "gateway")
# Smaller than in bench.vllm, because this model also encodes photos of 14,400 patches.
VISION = {"depth": 3, "hidden_size": 144, "num_heads": 2, "deepstack_visual_indexes": [0, 1, 2]}
IMAGES, CHAT_IMAGES, HIT_IMAGES = 16, 8, 4
SIDE = (512, 512)  # 256 tokens an image
HIT_SIZE = (2560, 1440)
HIT_ROUNDS = 5  # hits are short, and vary more
HITS = {"gateway": "hit_1440p_ms", "encoder": "encoder_hit_1440p_ms"}
# The seeds of photos that no other part of this program sends, so nothing of them is stored.
WARM_SEED, HIT_SEED, PART_SEED, PROMPT_SEED = 0, 100, 200, 1000
CHECK_MS = 1000  # how often to check whether an encoder has failed
PARTS, WARM_PARTS = 1000, 200  # of one image each, all hits

BENCHMARK = Benchmark(
    "sglang",
    "What does SGLang gain?",
    (
        Figure("ttft_own_over_ours_16", "own tower / through the gateway, 16 photos", target=">= 1.0"),
        Figure(
            "ttft_encoder_over_ours_16",
            "own encoder server / through the gateway, 16 photos",
            target=">= 1.2",
        ),
        Figure(
            "round2_encoder_over_ours",
            "own encoder server / through the gateway, chat with one new photo",
            target=">= 3",
        ),
        Figure(
            "hit_1440p_ms",
            "four stored 2560×1440 photos through the gateway",
            "ms",
            "<= 30",
            compare="SGLang's encoder server, elsewhere: 382-466 ms",
        ),
        Figure("part_over_hit_ms", "one stored photo: the gateway's time beyond the service's", "ms", "<= 2"),
        Figure("growth_mib", f"growth of the gateway over {PARTS} parts", "MiB", "<= 8"),
    ),
    limit_s=600,
    dry_run=("--rounds", "1"),
    why_not=lambda: "" if SGLANG_PYTHON.exists() else "no .venv-sglang: make test-sglang",
)
# Idle engines must sleep, otherwise they would take the cores of the engine under test.
FLAGS = ("--chunked-prefill-size", "512", "--sleep-on-idle")
# Less than ten minutes: engines take some seconds to end, and the last round may be the slowest.
BUDGET_S = 540.0


def main() -> None:
    parser = command_line(__doc__, budget_s=BUDGET_S)
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each kind; the medians count")
    args = parsed_in(SGLANG_PYTHON, "bench.sglang", parser)
    # Engines run in their own process groups, so they must be stopped before this process ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    budget = TimeBudget(args.budget_s)
    figures = _measure(args.rounds, budget)
    print_figures({**figures, "left_out": budget.left_out}, args)


def _measure(rounds: int, budget: TimeBudget) -> dict[str, Any]:
    from testing.checkpoints import write_checkpoint
    from testing.sglang_engine import add_video_processor
    from testing.sglang_gateway import running_gateway

    with ExitStack() as held:
        with step("start the service and the gateway"):
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            write_checkpoint(folder, vision=VISION, text_layers=TEXT_LAYERS, text=TEXT)
            model = add_video_processor(folder, "qwen3_vl")
            server = held.enter_context(service_for_engines(model))
            gateway = held.enter_context(running_gateway(server.endpoint, language_model=model))
        with step(f"{PARTS} parts"):
            figures = _found(asyncio.run(_parts(server.endpoint, gateway)))
        sides = Sides(model, gateway.url)
        held.callback(sides.stop)
        sides.start("encoder", "language")
        with step("four photos of 2560×1440 again"):
            figures |= _found(_hits_1440p(sides, rounds))
        sides.start("own")
        with step("a first prompt"):
            for way in WAYS:
                sides.first_token_ms(way, [next(_photos(*SIDE, WARM_SEED)), "warm"])
        return figures | _first_tokens(sides, rounds, budget)


def _found(figures: dict[str, float]) -> dict[str, float]:
    """Print figures at once, so that an interrupted run has printed them; return them."""
    print(" ", *(f" {name} {value}" for name, value in figures.items()), flush=True)
    return figures


class Sides:
    """The engines of all ways."""

    def __init__(self, model: Path, gateway_url: str) -> None:
        from testing.processes import free_port

        port = free_port()
        self._bootstrap_url = f"http://127.0.0.1:{port}"
        self._model = model
        back_end = ("--encoder-transfer-backend", "zmq_to_tokenizer", "--encoder-bootstrap-port", str(port))
        self._flags = {
            "language": ("--language-only", *back_end),
            "encoder": ("--encoder-only", "--enable-prefix-mm-cache", *back_end),
        }
        self._engines: dict[str, SglangEngine] = {}
        self.encoders = {"gateway": [f"{gateway_url}/v{number}" for number in range(IMAGES)]}
        """The encoders of the language server, by way."""

    def start(self, *names: str) -> None:
        """Start engines in parallel and wait until they answer."""
        from testing.sglang_engine import SglangEngine

        threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
        with step(f"start {', '.join(names)}"):
            for name in names:
                flags = (*FLAGS, *self._flags.get(name, ()))
                self._engines[name] = SglangEngine(self._model, *flags, environment=threads)
            for name in names:
                self._engines[name].wait_until_it_answers()
        if "encoder" in names:
            self.encoders["encoder"] = [self._engines["encoder"].url]

    def stop(self) -> None:
        """Stop all engines."""
        for engine in self._engines.values():
            engine.stop()

    def first_token_ms(self, way: str, parts: Sequence[str | bytes]) -> float:
        """Return the milliseconds to the first and only token of a prompt."""
        if way in self.encoders:
            self._use(self.encoders[way])
        engine = self._engines["language" if way in self.encoders else way]
        began = time.perf_counter()
        response = engine.generate(parts, tokens=1, return_logprob=False)
        ms = 1000 * (time.perf_counter() - began)
        response.raise_for_status()
        return ms

    def _use(self, encoders: Sequence[str]) -> None:
        """Register exactly these encoders at the language server."""
        listed = json.loads(_http("GET", f"{self._bootstrap_url}/list_encoder_urls"))["encoder_urls"]
        for url in {*listed} - {*encoders}:
            _http(
                "DELETE", f"{self._bootstrap_url}/unregister_encoder_url", json.dumps({"url": url}).encode()
            )
        for url in encoders:
            _http("POST", f"{self._bootstrap_url}/register_encoder_url", json.dumps({"url": url}).encode())


def _first_tokens(sides: Sides, rounds: int, budget: TimeBudget) -> dict[str, float]:
    """Run as many rounds as there is time for; return the medians of both prompts, and ratios."""
    photos = _photos(*SIDE, PROMPT_SEED)
    ms: dict[str, list[float]] = {f"{way}_{kind}_ms": [] for kind in ("16", "round2") for way in WAYS}
    longest_s = 0.0
    for number in range(rounds):
        if not budget.affords(f"round {number + 1}", longest_s):
            break
        began = time.perf_counter()
        begin = number % len(WAYS)
        in_turn = WAYS[begin:] + WAYS[:begin]  # each round begins with another way
        with step(f"round {number + 1} of {rounds}"):
            for way in in_turn:
                took_ms = sides.first_token_ms(way, [*islice(photos, IMAGES), "Which is it?"])
                ms[f"{way}_16_ms"].append(*_found({f"{way}_16_ms": round(took_ms, 1)}).values())
            for way in in_turn:
                first: list[str | bytes] = [*islice(photos, CHAT_IMAGES), "Which is it?"]
                sides.first_token_ms(way, first)
                took_ms = sides.first_token_ms(way, [*first, next(photos), "And now?"])
                ms[f"{way}_round2_ms"].append(*_found({f"{way}_round2_ms": round(took_ms, 1)}).values())
        longest_s = max(longest_s, time.perf_counter() - began)
    figures = {name: round(median(each), 1) for name, each in ms.items() if each}
    ratios = {
        "ttft_own_over_ours_16": ("own_16_ms", "gateway_16_ms"),
        "ttft_encoder_over_ours_16": ("encoder_16_ms", "gateway_16_ms"),
        "round2_encoder_over_ours": ("encoder_round2_ms", "gateway_round2_ms"),
    }
    return figures | {
        name: round(figures[above] / figures[below], 2)
        for name, (above, below) in ratios.items()
        if {above, below} <= {*figures}
    }


def _hits_1440p(sides: Sides, rounds: int) -> dict[str, float]:
    """Return the milliseconds to the last frame of rows, for photos that each encoder has encoded before.

    The gateway gets all photos at once, each as a part. SGLang's encoder server gets them one by one: it encodes photos
    that arrive together in one batch, without its cache, and on a CPU with a mask over all patches (16 GB here).
    """
    files = [*islice(_photos(*HIT_SIZE, HIT_SEED), HIT_IMAGES)]
    calls = {
        "gateway": [(sides.encoders["gateway"][:HIT_IMAGES], files)],
        "encoder": [(sides.encoders["encoder"], [file]) for file in files],
    }
    found: dict[str, list[float]] = {way: [] for way in calls}
    with SglangReceiver() as receiver:

        def ask(way: str) -> tuple[float, int]:
            answers = [receiver.frames_ms(*call) for call in calls[way]]
            return sum(ms for ms, _ in answers), sum(row_bytes for _, row_bytes in answers)

        for way in calls:
            first_ms, row_bytes = ask(way)
            _found({f"{way}_first_1440p_ms": round(first_ms)})
        for _ in range(HIT_ROUNDS * rounds):
            for way in calls:
                found[way].append(ask(way)[0])
    figures = {HITS[way]: round(median(ms), 1) for way, ms in found.items()}
    return {**figures, "hit_mib": round(row_bytes / 2**20, 1)}


async def _parts(endpoint: str, gateway: "GatewayProcess") -> dict[str, float]:
    """Time a part of one stored photo, and the service's own answer; return both, and the gateway's growth."""
    photos = [*islice(_photos(*SIDE, PART_SEED), 8)]
    urls = [f"{gateway.url}/v0"]
    through_ms, direct_ms, before = [], [], 0
    async with await EncoderClient.connect(endpoint) as client:
        with SglangReceiver() as receiver:
            for number in range(WARM_PARTS + PARTS):
                if number == WARM_PARTS:
                    before = private_bytes(psutil.Process(gateway.process.pid))
                file = photos[number % len(photos)]
                ms, _ = await asyncio.to_thread(receiver.frames_ms, urls, [file])
                direct = await ms_of(submit_and_fetch(client, [file]))
                if number >= WARM_PARTS:
                    through_ms.append(ms)
                    direct_ms.append(direct)
    return {
        "part_ms": round(median(through_ms), 2),
        "service_hit_ms": round(median(direct_ms), 2),
        "part_over_hit_ms": round(median(through_ms) - median(direct_ms), 2),
        "growth_mib": round((private_bytes(psutil.Process(gateway.process.pid)) - before) / 2**20, 1),
    }


class SglangReceiver:
    """Does what SGLang does with encoders of the back end zmq_to_tokenizer, without SGLang."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._callers = ThreadPoolExecutor(HIT_IMAGES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._callers.shutdown()
        self._context.destroy(linger=0)

    def frames_ms(self, urls: Sequence[str], files: Sequence[bytes]) -> tuple[float, int]:
        """Send images, one part to each encoder; return the milliseconds to the last frame, and the bytes of rows."""
        rid, each = uuid4().hex, len(files) // len(urls)
        with self._context.socket(zmq.PULL) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            bodies = [
                json.dumps(
                    {
                        "mm_items": [data_url(file) for file in files[part * each : (part + 1) * each]],
                        "num_parts": len(urls),
                        "part_idx": part,
                        "req_id": f"{rid}_local_part_{part}",
                        "modality": "IMAGE",
                        "prefill_host": "127.0.0.1",
                        "embedding_port": port,
                        "encoder_idx": part,
                        "encoder_url": url,
                        "time_stats_json": None,
                    }
                ).encode()
                for part, url in enumerate(urls)
            ]
            began = time.perf_counter()
            posting = [
                self._callers.submit(_http, "POST", f"{url}/encode", body)
                for url, body in zip(urls, bodies, strict=True)
            ]
            frames = []
            for _ in urls:
                while not socket.poll(CHECK_MS):
                    for posted in posting:
                        if posted.done():
                            posted.result()  # raises the error of an encoder that will send nothing
                frames.append(socket.recv_multipart(copy=False))
            ms = 1000 * (time.perf_counter() - began)
        for posted in posting:
            posted.result()
        return ms, sum(len(rows.buffer) for _, rows in frames)


def _http(method: str, url: str, body: bytes | None = None) -> bytes:
    """Make a call on a new connection, as SGLang does. Raises `OSError` if it fails."""
    request = Request(url, body, {"Content-Type": "application/json"}, method=method)
    with urlopen(request, timeout=600) as answer:
        return bytes(answer.read())


def _photos(width: int, height: int, seed: int) -> Iterator[bytes]:
    """Yield distinct photos."""
    return (photo(width, height, number) for number in count(seed))


if __name__ == "__main__":
    main()
