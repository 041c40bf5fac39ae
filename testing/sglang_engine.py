"""A real SGLang server on the CPU, as a process of its own, its checkpoint, and how to ask it."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from testing.answers import Answer, Part, data_url
from testing.processes import EngineProcess, free_port

CHUNK_TOKENS = 96
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "TORCHDYNAMO_DISABLE": "1",  # the first image would be compiled for, almost a minute
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
FLAGS = [
    *(
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--random-seed",
        "0",
        "--enable-metrics",
    ),
    *("--attention-backend", "torch_native", "--mm-attention-backend", "sdpa"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--chunked-prefill-size", str(CHUNK_TOKENS)),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--max-running-requests", "8"),
]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}


class SglangEngine(EngineProcess):
    """A server with these flags and variables beside those that all need."""

    def __init__(self, model: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        port = free_port()
        command: list[str | Path] = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)),
            *FLAGS,
            *flags,
        ]
        super().__init__(f"http://127.0.0.1:{port}", command, {**ENVIRONMENT, **(environment or {})})

    def generate(self, parts: Sequence[Part], *, tokens: int = 8, **body: Any) -> httpx.Response:
        """Ask for a completion of text and images; return the response, whatever it is."""
        text = "".join(IMAGE if isinstance(part, bytes) else part for part in parts)
        asked = {
            "text": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
            "image_data": [data_url(part) for part in parts if isinstance(part, bytes)] or None,
            "return_logprob": True,
            "top_logprobs_num": 5,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            **body,
        }
        return httpx.post(f"{self.url}/generate", json=asked, timeout=600)

    def ask(self, parts: Sequence[Part], *, tokens: int = 8) -> Answer:
        """Ask, and return the answer. Raises `AssertionError` for a request that is refused."""
        return answer_of(self.generate(parts, tokens=tokens))

    def forget(self) -> None:
        """Empty the caches that one question would hand to the next. Refused while a request ends."""
        for _ in range(100):
            if httpx.post(f"{self.url}/flush_cache", params={"timeout": 10}, timeout=60).status_code == 200:
                return
        raise AssertionError("SGLang does not empty its caches")

    def metrics(self) -> dict[str, float]:
        """Its counters that are ours, by name and labels as they stand."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30, follow_redirects=True).text.splitlines()
        ours = (line.rpartition(" ") for line in lines if line.startswith("sglang:encoder_service_"))
        return {name: float(value) for name, _, value in ours}


def answer_of(response: httpx.Response) -> Answer:
    """Read an answer. Raises `AssertionError` for a request that was refused."""
    assert response.status_code == 200, response.text
    told = response.json()["meta_info"]
    return Answer(
        tuple(token for _, token, _ in told["output_token_logprobs"]),
        tuple({token: value for value, token, _ in step} for step in told["output_top_logprobs"]),
        told["finish_reason"]["type"],
    )


def package_variables(endpoint: str, **settings: object) -> dict[str, str]:
    """Return the environment of an engine that loads our packages and takes its images from the service."""
    from prefill_client.sglang.settings import VARIABLE
    from prefill_client.sglang.start import MODELS, PROCESSORS

    return {
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PROCESSORS,
        "SGLANG_EXTERNAL_MODEL_PACKAGE": MODELS,
        VARIABLE: json.dumps({"endpoints": endpoint, **settings}),
    }


def add_video_processor(folder: Path, family: str) -> Path:
    """Add the settings for videos, which SGLang reads before it serves, to a checkpoint; return its folder."""
    images = json.loads((folder / "preprocessor_config.json").read_text())
    videos = {**images, "video_processor_type": VIDEO[family]}
    del videos["image_processor_type"]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


@contextmanager
def serving(model: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[SglangEngine]:
    """Run a server for the length of a `with` block."""
    engine = SglangEngine(model, *flags, environment=environment)
    try:
        engine.wait_until_it_answers()
        yield engine
    finally:
        engine.stop()
