"""An unmodified `vllm serve` in its own process, with or without our three flags."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import httpx

from testing.processes import EngineProcess, free_port
from testing.vllm_engine import CHUNK_TOKENS, CONNECTOR, MANAGER

VLLM = Path(sys.executable).with_name("vllm")
Server = TypeVar("Server", bound="HttpEngine")
# Settings for tests in which the service takes long: the client retries while its queue is full.
PATIENT = {"submit_timeout_s": 300.0, "timeout_s": 600.0}


class HttpEngine(EngineProcess):
    """One engine behind HTTP; its output is in `log`."""

    COMMAND: ClassVar[list[Path | str]] = [VLLM, "serve"]

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
        command = [
            *self.COMMAND, model, "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
            "--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK_TOKENS), "--block-size", "32",
            "--limit-mm-per-prompt", '{"image": 16, "video": 0}',
            *(self._our_flags(endpoint, exact=exact, **extra) if endpoint else []), *flags,
        ]  # fmt: skip
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
        super().__init__(f"http://127.0.0.1:{port}", command, variables)

    def _our_flags(self, endpoint: str | list[str], *, exact: bool, **extra: Any) -> list[str]:
        settings = {"endpoints": endpoint, "host_gib": 0.05, "grace_s": 5.0, **extra}
        return [
            "--middleware", "prefill_client.vllm.middleware.EncoderServiceMiddleware",
            "--ec-transfer-config", json.dumps({**CONNECTOR, "ec_connector_extra_config": settings}),
            *(["--ec-manager-config", json.dumps(MANAGER)] if exact else []),
        ]  # fmt: skip

    def chat(self, content: list[dict[str, Any]], **body: Any) -> httpx.Response:
        """Send a chat; return the response, whatever its status."""
        return self.post("/v1/chat/completions", chat_body(content, **body))

    def post(self, route: str, body: Any) -> httpx.Response:
        """Send a request; return the response, whatever its status."""
        return httpx.post(self.url + route, json=body, timeout=600)

    def metrics(self) -> dict[str, float]:
        """Return our counters on its /metrics, by name and labels."""
        lines = httpx.get(self.url + "/metrics", timeout=600).text.splitlines()
        ours = (line.rpartition(" ") for line in lines if line.startswith("vllm:encoder_service_"))
        return {name: float(value) for name, _, value in ours}


class RenderServer(HttpEngine):
    """A render server, with two of our flags."""

    COMMAND: ClassVar[list[Path | str]] = [VLLM, "launch", "render"]

    def render(self, content: list[dict[str, Any]], **body: Any) -> httpx.Response:
        """Send a chat to be laid out; return the response, whatever its status."""
        return self.post("/v1/chat/completions/render", chat_body(content, **body))

    def _our_flags(self, endpoint: str | list[str], *, exact: bool, **extra: Any) -> list[str]:
        return super()._our_flags(endpoint, exact=False, **extra)


def chat_body(content: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """Return a chat of eight tokens, of which each comes with the five likeliest."""
    return {
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


@contextmanager
def serving(model: Path, endpoint: str | list[str], *flags: str, **options: Any) -> Iterator[HttpEngine]:
    """Run an engine for the duration of a `with` block."""
    with running(HttpEngine(model, endpoint, *flags, **options)) as engine:
        yield engine


@contextmanager
def rendering(model: Path, endpoint: str, *flags: str, **options: Any) -> Iterator[RenderServer]:
    """Run a render server for the duration of a `with` block."""
    with running(RenderServer(model, endpoint, *flags, **options)) as server:
        yield server


@contextmanager
def running(engine: Server) -> Iterator[Server]:
    """Wait until an engine answers, and end it with the `with` block."""
    try:
        engine.wait_until_it_answers()
        yield engine
    finally:
        engine.stop()
