"""The load generators of vLLM and SGLang, run by their own commands, and the figures that they report."""

import json
import math
import os
import random
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.engine_environments import SGLANG_PYTHON, VLLM_PYTHON
from testing.photos import data_url, photo

MODEL_NAME = "tiny"
SIDE_PIXELS = 512  # 256 tokens an image, one image a request
TEXT_TOKENS, NEW_TOKENS = 64, 16
ALL_TOKENS = TEXT_TOKENS + (SIDE_PIXELS // 32) ** 2
MAX_CONCURRENCY = 128
TIMEOUT_S = 300.0
STAND_INS = Path(__file__).with_name("stand_ins")


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests of a generator, each with one image, of which the share `repeated` was in an earlier request.

    It is a closed loop of `concurrency` callers, or has `rate` requests a second. Without `images`, texts of as many
    tokens are sent.
    """

    requests: int
    concurrency: int = MAX_CONCURRENCY
    rate: float = math.inf
    repeated: float = 0.0
    images: int = 1

    @property
    def distinct(self) -> int:
        """The number of distinct images."""
        return max(1, round(self.requests * (1 - self.repeated))) * self.images


@dataclass(frozen=True, slots=True)
class Answered:
    """What a generator reports of a load: times in milliseconds, and its command with names instead of places."""

    figures: Mapping[str, float]
    command: str


VLLM_KEYS = {
    "requests_per_s": "request_throughput",
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_ms": "mean_tpot_ms",
    "itl_ms": "mean_itl_ms",
    "e2e_p50_ms": "median_e2el_ms",
    "e2e_p99_ms": "p99_e2el_ms",
}
SGLANG_KEYS = VLLM_KEYS | {"e2e_p50_ms": "median_e2e_latency_ms", "e2e_p99_ms": "p99_e2e_latency_ms"}


def send(engine: str, url: str, model: Path, load: OfferedLoad, *, seed: int, folder: Path) -> Answered:
    """Send a load to `url` with the generator of an engine. Raises `RuntimeError` if the generator fails.

    No other seed has any of its new images.
    """
    result = folder / f"result-{seed}.json"
    command, variables, keys = (_vllm if engine == "vllm" else _sglang)(
        url, model, load, seed=seed, result=result
    )
    done = subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    found = json.loads(result.read_text().splitlines()[-1])
    figures = {name: round(float(found[key]), 3) for name, key in keys.items()}
    named = {url: "URL", str(model): "MODEL", str(folder): "FOLDER", str(command[0]): Path(command[0]).name}
    shown = shlex.join(command)
    for place, name in named.items():
        shown = shown.replace(place, name)
    return Answered({**figures, "failed": load.requests - found["completed"]}, shown)


def _vllm(
    url: str, model: Path, load: OfferedLoad, *, seed: int, result: Path
) -> tuple[list[str], dict[str, str], Mapping[str, str]]:
    """Return the command of `vllm bench serve`, its variables, and the keys of its result."""
    command = [
        *(str(VLLM_PYTHON.with_name("vllm")), "bench", "serve", "--backend", "openai-chat"),
        *("--endpoint", "/v1/chat/completions", "--base-url", url, "--model", MODEL_NAME),
        *("--tokenizer", str(model), "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.concurrency), "--request-rate", str(load.rate), "--seed", str(seed)),
        *("--ignore-eos", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", "50,99", "--save-result"),
        *("--result-dir", str(result.parent), "--result-filename", result.name),
    ]
    if load.repeated:
        lines = [json.dumps({"content": content}) for content in chats(load, seed)]
        path = _written(result, lines)
        command += ["--dataset-name", "custom_image", "--dataset-path", str(path), "--disable-shuffle"]
        command += ["--custom-output-len", str(NEW_TOKENS)]
    elif not load.images:
        command += ["--dataset-name", "random", "--random-input-len", str(ALL_TOKENS)]
        command += ["--random-output-len", str(NEW_TOKENS)]
    else:
        command += [
            *("--dataset-name", "random-mm", "--random-input-len", str(TEXT_TOKENS)),
            *("--random-output-len", str(NEW_TOKENS), "--random-mm-base-items-per-request", "1"),
            *("--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}'),
            *("--random-mm-bucket-config", f"{{({SIDE_PIXELS}, {SIDE_PIXELS}, 1): 1.0}}"),
        ]
    return command, {}, VLLM_KEYS


def _sglang(
    url: str, model: Path, load: OfferedLoad, *, seed: int, result: Path
) -> tuple[list[str], dict[str, str], Mapping[str, str]]:
    """Return the command of `sglang.bench_serving`, its variables, and the keys of its result."""
    command = [
        *(str(SGLANG_PYTHON), "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", url, "--model", str(model), "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.concurrency), "--request-rate", str(load.rate), "--seed", str(seed)),
        *("--warmup-requests", "0", "--disable-tqdm", "--output-file", str(result)),
    ]
    if load.repeated:
        lines = [
            json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS})
            for content in chats(load, seed)
        ]
        command += ["--dataset-name", "openai", "--dataset-path", str(_written(result, lines))]
    elif not load.images:
        command += ["--dataset-name", "random-ids", "--random-range-ratio", "1"]
        command += ["--random-input-len", str(ALL_TOKENS), "--random-output-len", str(NEW_TOKENS)]
    else:
        command += [
            *("--dataset-name", "image", "--image-count", "1"),
            *("--image-resolution", f"{SIDE_PIXELS}x{SIDE_PIXELS}", "--random-range-ratio", "1"),
            *("--random-input-len", str(TEXT_TOKENS), "--random-output-len", str(NEW_TOKENS)),
        ]
    path = os.pathsep.join(filter(None, [str(STAND_INS), os.environ.get("PYTHONPATH", "")]))
    return command, {"PYTHONPATH": path}, SGLANG_KEYS


def _written(result: Path, lines: Sequence[str]) -> Path:
    path = result.with_suffix(".jsonl")
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def chats(load: OfferedLoad, seed: int) -> list[list[dict[str, object]]]:
    """Return the parts of each request: a text that no other request has, and a photo.

    In every second request the text comes first, as about a document that several callers share: its image is known,
    but not its prefix. In the others the image comes first, as in a chat.
    """
    draw = random.Random(seed)
    new = [0, *sorted(draw.sample(range(1, load.requests), load.distinct - 1))]
    photos = {
        number: data_url(photo(SIDE_PIXELS, SIDE_PIXELS, 1_000_000 + 1000 * seed + number)) for number in new
    }
    found: list[list[dict[str, object]]] = []
    for number in range(load.requests):
        image = number if number in photos else draw.choice([each for each in new if each < number])
        text = f"{seed}-{number} " + "".join(draw.choices("abcdefgh ", k=TEXT_TOKENS))
        parts: list[dict[str, object]] = [
            {"type": "image_url", "image_url": {"url": photos[image]}},
            {"type": "text", "text": text[:TEXT_TOKENS]},
        ]
        found.append(parts[::-1] if number % 2 else parts)
    return found
