"""An unmodified `vllm serve` in its own process, with or without our three flags."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from testing.processes import EngineProcess, free_port
from testing.vllm_engine import CHUNK_TOKENS, CONNECTOR, MANAGER


class HttpEngine(EngineProcess):
    """One engine behind HTTP; its output is in `log`."""

    def __init__(
        self,
        model: Path,
        endpoint: str | list[str],
        *flags: str,
        exact: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
        **extra: Any,
    ) -> None:
        """Without an `endpoint`, the engine gets none of our flags, and its own tower encodes."""
        port = free_port()
        settings = {"endpoints": endpoint, "host_gib": 0.05, "grace_s": 5.0, **extra}
        our_flags = [
            "--middleware", "prefill_client.vllm.middleware.EncoderServiceMiddleware",
            "--ec-transfer-config", json.dumps({**CONNECTOR, "ec_connector_extra_config": settings}),
            *(["--ec-manager-config", json.dumps(MANAGER)] if exact else []),
        ]  # fmt: skip
        command = [
            Path(sys.executable).with_name("vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
            "--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK_TOKENS), "--block-size", "32",
            "--limit-mm-per-prompt", '{"image": 16, "video": 0}',
            *(our_flags if endpoint else []), *flags,
        ]  # fmt: skip
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
        super().__init__(f"http://127.0.0.1:{port}", command, variables)

    def chat(self, content: list[dict[str, Any]], **body: Any) -> httpx.Response:
        """Send a chat; return the response, whatever its status."""
        request = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 5,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            **body,
        }
        return httpx.post(self.url + "/v1/chat/completions", json=request, timeout=600)

    def metrics(self) -> dict[str, float]:
        """Return our counters on its /metrics, by name and labels."""
        lines = httpx.get(self.url + "/metrics", timeout=30).text.splitlines()
        ours = (line.rpartition(" ") for line in lines if line.startswith("vllm:encoder_service_"))
        return {name: float(value) for name, _, value in ours}


@contextmanager
def serving(model: Path, endpoint: str | list[str], *flags: str, **options: Any) -> Iterator[HttpEngine]:
    """Run an engine for the duration of a `with` block."""
    engine = HttpEngine(model, endpoint, *flags, **options)
    try:
        engine.wait_until_it_answers()
        yield engine
    finally:
        engine.stop()
