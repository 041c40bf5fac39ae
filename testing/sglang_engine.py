"""Starts a real SGLang server on the CPU as a process, and sends it prompts."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from testing.answers import Answer, Part, data_url
from testing.engine_flags import CHUNK_TOKENS as CHUNK_TOKENS
from testing.engine_flags import SGLANG_FLAGS, SGLANG_VARIABLES
from testing.engine_flags import add_video_processor as add_video_processor
from testing.engine_flags import package_variables as package_variables
from testing.processes import EngineProcess, free_port

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class SglangEngine(EngineProcess):
    """An SGLang server. `flags` and `environment` are added to those of all servers."""

    def __init__(self, model: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        port = free_port()
        command: list[str | Path] = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)),
            *SGLANG_FLAGS,
            *flags,
        ]
        super().__init__(f"http://127.0.0.1:{port}", command, {**SGLANG_VARIABLES, **(environment or {})})

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

    def ask_all(self, prompts: Sequence[Sequence[Part]]) -> list[Answer]:
        """Request the completions of all prompts at once; return the answers."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.ask, prompts))

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
        lines = httpx.get(f"{self.url}/metrics", timeout=600, follow_redirects=True).text.splitlines()
        ours = (line.rpartition(" ") for line in lines if line.startswith("sglang:encoder_service_"))
        return {name: float(value) for name, _, value in ours}

    def counted(self, metric: str, label: str = "") -> float:
        """Return the sum of `sglang:encoder_service_<metric>_total`, of one label or all."""
        return sum(
            value
            for name, value in self.metrics().items()
            if name.startswith(f"sglang:encoder_service_{metric}_total") and label in name
        )

    def fetched(self) -> float:
        """Return how many images its prefill chunks have fetched the rows of."""
        return self.counted("images")

    def by_own_tower(self, reason: str = "") -> float:
        """Return how many images SGLang's own tower has encoded, for this reason or all."""
        return self.counted("own_tower_images", reason)


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


@contextmanager
def serving(model: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[SglangEngine]:
    """Run a server for the length of a `with` block."""
    engine = SglangEngine(model, *flags, environment=environment)
    try:
        engine.wait_until_it_answers()
        yield engine
    finally:
        engine.stop()
