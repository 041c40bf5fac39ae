"""The process of the reference prefill service: constructs the components, connects them, and serves."""

import logging
import socket
from pathlib import Path

import torch
import transformers
import uvicorn

from encoder_contract.certificates import Certificates
from encoder_contract.version import __version__
from encoder_contract.video import VideoSettings
from prefill_client import EncoderClient
from prefill_client.http_server import HttpServer
from prefill_client.media.image_loader import ImageLoader
from prefill_reference.chat import Chat
from prefill_reference.config import ServiceConfig
from prefill_reference.engine import Engine
from prefill_reference.http_service import HttpService, Limits, TraceFolder
from prefill_reference.language_model import load_language_model
from prefill_reference.metrics import Metrics
from prefill_reference.prefix import PrefixCache

log = logging.getLogger(__name__)

GIB = 1 << 30
DRAIN_S = 30  # how long running requests may take after SIGTERM


async def serve(config: ServiceConfig, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT, then let running requests finish.

    Raises `EncoderError` if the encoder cannot be reached or serves another model, and `OSError` or `ValueError` if the
    model's folder cannot be used.
    """
    certificates = Certificates(config.tls_cert, config.tls_key) if config.tls_cert else None
    if config.threads:
        torch.set_num_threads(config.threads)
    language_model = load_language_model(
        config.model, dtype=getattr(torch, config.dtype), device=config.device
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    name = config.served_name or config.model.resolve().name
    async with await EncoderClient.connect(config.encoder, credentials=config.credentials) as client:
        engine = Engine(language_model, row_width=client.description.width)
        prefixes = PrefixCache(config.prefix_tokens)
        chat = Chat(
            client,
            engine,
            tokenizer,
            chunk_tokens=config.chunk_tokens,
            prefixes=prefixes,
            videos=_video_settings(config.model),
        )
        images, videos = (
            ImageLoader(
                config.image_destinations,
                max_bytes=max_bytes,
                timeout_s=config.image_s,
                cache_bytes=int(config.image_cache_gib * GIB),
                default_fresh_s=config.image_fresh_s,
                what=what,
            )
            for what, max_bytes in (("image", config.max_image_bytes), ("video", config.max_video_bytes))
        )
        service = HttpService(
            chat,
            tokenizer,
            name,
            image_loader=images,
            video_loader=videos,
            metrics=Metrics(),
            limits=Limits(config.max_requests, config.max_body_bytes, config.request_s),
            traces=TraceFolder(Path(config.trace_folder)) if config.trace_folder else None,
        )
        await _serve_http(service, config, name, listener, certificates)
        chat.close()


def _video_settings(folder: Path) -> VideoSettings | None:
    """Return the settings of a checkpoint's video processor; None if it has no supported one."""
    try:
        return VideoSettings.from_folder(folder)
    except (OSError, ValueError) as error:
        log.info("no videos: %s", error)
        return None


async def _serve_http(
    service: HttpService,
    config: ServiceConfig,
    name: str,
    listener: socket.socket,
    certificates: Certificates | None,
) -> None:
    host = config.listen.rpartition(":")[0]
    server = HttpServer(
        uvicorn.Config(
            service.app(),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
            ssl_certfile=config.tls_cert or None,
            ssl_keyfile=config.tls_key or None,
        ),
        certificates=certificates,
        banner=f"prefill-client {__version__}\n"
        f"  model      {name} ({config.model}), {config.dtype} on {config.device}\n"
        f"  encoder    {config.encoder}\n"
        f"  chunks     {config.chunk_tokens} tokens, KV cache of {config.prefix_tokens} kept\n"
        f"  images     data URLs{', ' + config.image_hosts if config.image_hosts else ''}\n"
        f"  listening  {host}:{listener.getsockname()[1]}",
    )
    await server.serve(sockets=[listener])
