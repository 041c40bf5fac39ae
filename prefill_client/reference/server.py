"""The reference prefill service as a process: how its parts are put together."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn

from encoder_contract.version import __version__
from prefill_client.client import EncoderClient
from prefill_client.reference.chat import Chat
from prefill_client.reference.config import ServiceConfig
from prefill_client.reference.engine import Engine
from prefill_client.reference.http_service import HttpService, Limits
from prefill_client.reference.image_urls import ImageUrls
from prefill_client.reference.language_model import load_language_model
from prefill_client.reference.metrics import Metrics
from prefill_client.reference.prefix import PrefixCache
from prefill_client.reference.trace_folder import TraceFolder

DRAIN_S = 30  # what running requests are given after SIGTERM


class _Server(uvicorn.Server):
    """uvicorn, except that a signal ends the process with 0 and not by that signal once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True


async def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end.

    Raises `EncoderError` when the encoder cannot be reached or the model does not fit it, `OSError` when the
    model's folder or the port cannot be had.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    language_model = load_language_model(
        config.model, dtype=getattr(torch, config.dtype), device=config.device
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    name = config.served_name or config.model.resolve().name
    async with await EncoderClient.connect(config.encoder) as client:
        engine = Engine(language_model, row_width=client.description.width)
        prefixes = PrefixCache(config.prefix_tokens)
        chat = Chat(client, engine, tokenizer, chunk_tokens=config.chunk_tokens, prefixes=prefixes)
        hosts = [host.strip() for host in config.image_hosts.split(",") if host.strip()]
        service = HttpService(
            chat,
            tokenizer,
            name,
            image_urls=ImageUrls(hosts, max_bytes=config.max_image_bytes, timeout_s=config.image_s),
            metrics=Metrics(),
            limits=Limits(config.max_requests, config.max_body_bytes, config.request_s),
            traces=TraceFolder(Path(config.trace_folder)) if config.trace_folder else None,
        )
        await _listen(service, config, name)
        chat.close()


async def _listen(service: HttpService, config: ServiceConfig, name: str) -> None:
    host, _, port = config.listen.rpartition(":")
    with socket.create_server((host.strip("[]"), int(port)), family=_family(host)) as listener:
        endpoint = f"{host}:{listener.getsockname()[1]}"
        print(  # noqa: T201 - the one block that says what was chosen
            f"prefill-client {__version__}\n"
            f"  model      {name} ({config.model}), {config.dtype} on {config.device}\n"
            f"  encoder    {config.encoder}\n"
            f"  chunks     {config.chunk_tokens} tokens, KV cache of {config.prefix_tokens} kept\n"
            f"  images     data URLs{', ' + config.image_hosts if config.image_hosts else ''}\n"
            f"  listening  {endpoint}",
            flush=True,
        )
        server = uvicorn.Config(
            service.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S
        )
        await _Server(server).serve(sockets=[listener])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if host.startswith("[") else socket.AF_INET


def main(given: Mapping[str, Any]) -> None:
    """Serve with the flags of the command line and what the environment says; raises what `serve` raises.

    A bad setting is a `ConfigError`.
    """
    asyncio.run(serve(ServiceConfig.read(given, os.environ)))
