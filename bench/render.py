"""Compares a render server of vLLM with its middleware to a stock one: processor time, bytes, and what engines read.

Both servers (`vllm launch render`) run at the same time and take the same requests in turn. What counts is the
processor time of each server's own process, which a busy machine changes less than elapsed time. Photos are new to the
server that gets them, then known to it. The model has the published limits on pixels, so that no photo is made smaller.
"""

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.service import parsed_in, service_for_engines
from bench.harness.timing import cpu_ms
from testing.engine_environments import VLLM_PYTHON, VLLM_VARIABLES
from testing.photos import photo
from testing.processes import EngineProcess, free_port

BENCHMARK = Benchmark(
    "render",
    "What does a render server without pixels save?",
    (
        Figure("stock_4_new_ms", "four new 720p photos, processor time: stock", "ms"),
        Figure("ours_4_new_ms", "four new 720p photos, processor time: ours", "ms", "<= 8"),
        Figure("stock_4_known_ms", "four known 720p photos: stock", "ms"),
        Figure("ours_4_known_ms", "four known 720p photos: ours", "ms", "<= 6"),
        Figure("stock_1_over_text_ms", "one new 720p photo, over text alone: stock", "ms"),
        Figure("ours_1_over_text_ms", "one new 720p photo, over text alone: ours", "ms", "<= 3"),
        Figure("stock_text_ms", "text alone: stock", "ms"),
        Figure("ours_text_ms", "text alone: ours", "ms"),
        Figure("stock_bytes", "answer for four 720p photos: stock", "kB", scale=1e-3),
        Figure("ours_bytes", "answer for four 720p photos: ours", "kB", "<= 20", scale=1e-3),
        Figure("stock_read_ms", "engine reads it, processor time: stock", "ms"),
        Figure("ours_read_ms", "engine reads it, processor time: ours", "ms", "<= 1.5"),
        Figure(
            "requests_ours_over_stock",
            "requests a second of one core, 16 callers: ours / stock",
            target=">= 20",
        ),
    ),
    limit_s=540,
    dry_run=("--rounds", "2", "--loop-s", "2"),
    why_not=lambda: "" if VLLM_PYTHON.exists() else "no .venv-vllm: make test-vllm",
)
SIZE = (1280, 720)
PHOTOS = {"text": 0, "1": 1, "4": 4}
"""The photos of each case."""
CALLERS = 16
FIRST_SEED = 720_000
READS = 15
# Work of a server after its answer, such as the end of a call, counts too.
SETTLED_S = 0.1
TIMEOUT_S = 300.0
MODEL_NAME = "tiny"
MAX_PIXELS = 16_777_216
ROUTE = "/v1/chat/completions/render"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="requests of each kind; the medians count")
    parser.add_argument(
        "--loop-s", type=float, default=12.0, help="seconds of the closed loop at each server"
    )
    args = parsed_in(VLLM_PYTHON, "bench.render", parser, VLLM_VARIABLES)
    print_figures(_measure(args.rounds, args.loop_s), args)


class RenderServer(EngineProcess):
    """A render server of vLLM, with our two flags if it has an `endpoint` of the service."""

    def __init__(self, model: Path, endpoint: str = "") -> None:
        port = free_port()
        command: list[str | Path] = [
            Path(sys.executable).with_name("vllm"), "launch", "render", model, "--host", "127.0.0.1",
            "--port", str(port), "--served-model-name", MODEL_NAME, "--dtype", "float32",
            "--max-model-len", "16384", "--limit-mm-per-prompt", '{"image": 16, "video": 0}',
            *(_our_flags(endpoint) if endpoint else ()),
        ]  # fmt: skip
        super().__init__(f"http://127.0.0.1:{port}", command, VLLM_VARIABLES)

    def render(self, body: bytes) -> bytes:
        """Have a chat laid out; return the answer."""
        import httpx

        headers = {"content-type": "application/json"}
        response = httpx.post(self.url + ROUTE, content=body, headers=headers, timeout=TIMEOUT_S)
        answer: bytes = response.raise_for_status().content
        return answer

    def cost_ms(self, body: bytes) -> float:
        """Have a chat laid out; return the processor time that it took."""
        before = cpu_ms(self.process.pid)
        self.render(body)
        time.sleep(SETTLED_S)
        return cpu_ms(self.process.pid) - before


def _our_flags(endpoint: str) -> list[str]:
    from testing.vllm_engine import CONNECTOR

    transfer = {**CONNECTOR, "ec_connector_extra_config": {"endpoints": endpoint}}
    middleware = "prefill_client.vllm.middleware.EncoderServiceMiddleware"
    return ["--middleware", middleware, "--ec-transfer-config", json.dumps(transfer)]


Servers = dict[str, RenderServer]
"""The stock render server and ours, by name."""


def _measure(rounds: int, loop_s: float) -> dict[str, Any]:
    from prefill_client.vllm.name_key import VARIABLE
    from testing.checkpoints import write_checkpoint

    os.environ[VARIABLE] = secrets.token_hex(32)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = {"size": {"longest_edge": MAX_PIXELS, "shortest_edge": 1024}}
        model = write_checkpoint(folder, preprocessor=size)
        with (
            service_for_engines(model, max_queue_s=100_000) as service,
            _started({"stock": RenderServer(model), "ours": RenderServer(model, service.endpoint)}) as both,
        ):
            seeds = iter(range(FIRST_SEED, FIRST_SEED + 1_000_000))
            figures |= _costs(both, rounds, seeds)
            figures |= _answers(both, seeds)
            figures |= _requests_per_core(both, loop_s, seeds)
    return figures


@contextmanager
def _started(servers: Servers) -> Iterator[Servers]:
    try:
        for server in servers.values():
            server.wait_until_it_answers()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def _chat(count: int, seeds: Iterator[int]) -> bytes:
    """Return the body of a chat with so many new photos."""
    from testing.answers import data_url

    text = f"look {next(seeds)} what?"
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for _ in range(count):
        url = data_url(photo(*SIZE, next(seeds)))
        parts.append({"type": "image_url", "image_url": {"url": url}})
    message = {"role": "user", "content": parts}
    return json.dumps({"model": MODEL_NAME, "messages": [message], "max_tokens": 1}).encode()


def _costs(servers: Servers, rounds: int, seeds: Iterator[int]) -> dict[str, float]:
    """Return the median processor time of each case at each server, with new photos, and of four known ones.

    The servers take turns in being first. The first round warms them up.
    """
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for case, count in PHOTOS.items():
            body = _chat(count, seeds)
            for name in sorted(servers, reverse=bool(number % 2)):
                new_ms, known_ms = servers[name].cost_ms(body), servers[name].cost_ms(body)
                if number:
                    found.setdefault(f"{name}_{case}", []).append(new_ms)
                    found.setdefault(f"{name}_{case}_known", []).append(known_ms)
    cost_ms = {key: median(each) for key, each in found.items()}
    figures: dict[str, float] = {}
    for name in servers:
        figures |= {
            f"{name}_text_ms": cost_ms[f"{name}_text"],
            f"{name}_1_over_text_ms": cost_ms[f"{name}_1"] - cost_ms[f"{name}_text"],
            f"{name}_4_new_ms": cost_ms[f"{name}_4"],
            f"{name}_4_known_ms": cost_ms[f"{name}_4_known"],
        }
    return {key: round(value, 2) for key, value in figures.items()}


def _answers(servers: Servers, seeds: Iterator[int]) -> dict[str, float]:
    """Return the bytes of the answer for four photos, and the processor time in which an engine reads them."""
    body = _chat(4, seeds)
    readers = {"stock": _read, "ours": _named_reader()}
    figures: dict[str, float] = {}
    for name, server in servers.items():
        answer = server.render(body)
        figures[f"{name}_bytes"] = len(answer)
        figures[f"{name}_read_ms"] = round(_read_ms(readers[name], answer), 3)
    return figures


def _read(request: bytes) -> None:
    """Read a request of tokens as vLLM does."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    features = GenerateRequest.model_validate(json.loads(request)).features
    assert features is not None
    mm_kwargs_from_features(features)


def _named_reader() -> Callable[[bytes], None]:
    """Return what reads a request of tokens as our middleware does, and then vLLM."""
    from prefill_client.vllm.image_name import NameSigner
    from prefill_client.vllm.name_key import read_name_key
    from prefill_client.vllm.token_requests import TokenRequest

    signer = NameSigner(read_name_key(""))

    def read(request: bytes) -> None:
        tokens = TokenRequest(json.loads(request), signer)
        assert len(tokens.images) == 4, "all images have names"
        tokens.write(tokens.info)
        _read(json.dumps(tokens.body).encode())

    return read


def _read_ms(read: Callable[[bytes], None], request: bytes) -> float:
    spent_ms = []
    for _ in range(READS + 1):
        began = time.process_time()
        read(request)
        spent_ms.append(1000 * (time.process_time() - began))
    return median(spent_ms[1:])


def _requests_per_core(servers: Servers, loop_s: float, seeds: Iterator[int]) -> dict[str, float]:
    """Return how many requests of four known photos a core of each server serves, with 16 callers that wait in turn."""
    bodies = [_chat(4, seeds) for _ in range(CALLERS)]
    rates = {}
    for name, server in servers.items():
        _loop(server, bodies, 0.0)
        before = cpu_ms(server.process.pid)
        count = _loop(server, bodies, loop_s)
        time.sleep(SETTLED_S)
        rates[name] = count / (cpu_ms(server.process.pid) - before) * 1000
    figures = {f"{name}_requests_per_core": round(rate, 2) for name, rate in rates.items()}
    return {**figures, "requests_ours_over_stock": round(rates["ours"] / rates["stock"], 2)}


def _loop(server: RenderServer, bodies: Sequence[bytes], seconds: float) -> int:
    """Send each body again and again from a caller of its own, at least once; return the number of answers."""
    until = time.monotonic() + seconds

    def call(body: bytes) -> int:
        count = 0
        while not count or time.monotonic() < until:
            server.render(body)
            count += 1
        return count

    with ThreadPoolExecutor(len(bodies)) as callers:
        return sum(callers.map(call, bodies))


if __name__ == "__main__":
    main()
