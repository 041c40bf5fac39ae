"""vLLM's own encoder disaggregation: an instance that only encodes, whose rows an engine reads from a shared folder."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from testing.engine_environments import VLLM_VARIABLES
from testing.engine_flags import transfer
from testing.processes import EngineProcess, free_port
from testing.vllm_engine import raw

TIMEOUT_S = 300.0
MODEL_NAME = "tiny"


class EncoderInstance:
    """An engine of vLLM that only encodes, and what vLLM's example of a proxy does with it."""

    def __init__(self, url: str, threads: ThreadPoolExecutor) -> None:
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._threads = threads

    def encode(self, images: Sequence[bytes]) -> None:
        """Send each image in a request of its own, all at once, and wait until the rows of all are stored."""
        for response in self._threads.map(self._sent, images):
            response.raise_for_status()

    def _sent(self, image: bytes) -> httpx.Response:
        message = {"role": "user", "content": [raw(image)]}
        return self._client.post(
            "/v1/chat/completions", json={"model": MODEL_NAME, "messages": [message], "max_tokens": 1}
        )


@contextmanager
def encoder_instance(
    model: Path, folder: Path, *, images: int, settings: Mapping[str, Any]
) -> Iterator[EncoderInstance]:
    """Run an instance that stores rows in a folder. `settings` are those of the engine that reads them."""
    port = free_port()
    command: list[str | Path] = [
        Path(sys.executable).with_name("vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching",
        "--max-model-len", str(settings["max_model_len"]), "--limit-mm-per-prompt", '{"image": 1, "video": 0}',
        "--ec-transfer-config", json.dumps(transfer(folder, "ec_producer")),
    ]  # fmt: skip
    variables = {**VLLM_VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    engine = EngineProcess(f"http://127.0.0.1:{port}", command, variables)
    try:
        engine.wait_until_it_answers()
        with ThreadPoolExecutor(images) as threads:
            yield EncoderInstance(engine.url, threads)
    finally:
        engine.stop()
