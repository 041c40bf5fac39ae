"""Starts a real SGLang server on the CPU as a process, and sends it prompts."""

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
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first image waits almost a minute for a compilation
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
    *("--disable-cuda-graph", "--chunked-prefill-size", str(CHUNK_TOKENS)),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "16384", "--max-running-requests", "8"),
]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}


class SglangEngine(EngineProcess):
    """An SGLang server. `flags` and `environment` are added to those of all servers."""

    def __init__(self, model: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        port = free_port()
        command: list[str | Path] = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)),
            *FLAGS,
            *flags,
        ]
        super().__init__(f"http://127.0.0.1:{port}", command, {**ENVIRONMENT, **(environment or {})})

    def generate(self, parts: Sequence[Part], *, tokens: int = 8, **body: Any) -> httpx.Response:
        """Request a completion of text and images; return the response, whatever its status."""
        text = "".join(IMAGE if isinstance(part, bytes) else part for part in parts)
        body_json = {
            "text": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
            "image_data": [data_url(part) for part in parts if isinstance(part, bytes)] or None,
            "return_logprob": True,
            "top_logprobs_num": 5,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            **body,
        }
        return httpx.post(f"{self.url}/generate", json=body_json, timeout=600)

    def ask(self, parts: Sequence[Part], *, tokens: int = 8) -> Answer:
        """Request a completion and return the answer. Raises `AssertionError` if the request is refused."""
        return answer_of(self.generate(parts, tokens=tokens))

    def forget(self) -> None:
        """Empty the caches, so that the next prompt reuses nothing. Retry while SGLang refuses: a request is ending."""
        for _ in range(100):
            if httpx.post(f"{self.url}/flush_cache", params={"timeout": 10}, timeout=60).status_code == 200:
                return
        raise AssertionError("SGLang does not empty its caches")

    def load(self, model: Path) -> None:
        """Load the weights of another checkpoint of the same shape into the running engine."""
        response = httpx.post(
            f"{self.url}/update_weights_from_disk", json={"model_path": str(model)}, timeout=600
        )
        assert response.status_code == 200, response.text

    def metrics(self) -> dict[str, float]:
        """Return our counters among its metrics; a key is the name with its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30, follow_redirects=True).text.splitlines()
        ours = (line.rpartition(" ") for line in lines if line.startswith("sglang:encoder_service_"))
        return {name: float(value) for name, _, value in ours}


def answer_of(response: httpx.Response) -> Answer:
    """Parse an answer. Raises `AssertionError` if the request was refused."""
    assert response.status_code == 200, response.text
    return answer_from(response.json()["meta_info"])


def answer_from(info: dict[str, Any]) -> Answer:
    """Parse the information that SGLang returns beside an answer."""
    return Answer(
        tuple(token for _, token, _ in info["output_token_logprobs"]),
        tuple({token: value for value, token, _ in step} for step in info["output_top_logprobs"]),
        info["finish_reason"]["type"],
    )


def package_variables(endpoint: str, **settings: object) -> dict[str, str]:
    """Return the environment of an engine that loads our packages and encodes images with the service."""
    from prefill_client.sglang.sglang_settings import VARIABLE
    from prefill_client.sglang.start import MODELS, PROCESSORS

    return {
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PROCESSORS,
        "SGLANG_EXTERNAL_MODEL_PACKAGE": MODELS,
        VARIABLE: json.dumps({"endpoints": endpoint, **settings}),
    }


def add_video_processor(folder: Path, family: str) -> Path:
    """Add the video settings, which SGLang reads at start, to a checkpoint; return its folder."""
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
