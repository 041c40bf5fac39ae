"""The process of the reference prefill service: constructs the components, connects them, and serves."""

import asyncio
import socket
from contextlib import closing
from pathlib import Path

import torch
import transformers
import uvicorn

from encoder_contract.errors import ModelMismatchError
from encoder_contract.version import __version__
from encoder_contract.video import VideoSettings
from prefill_client import Description, EncoderClient
from prefill_client.http_server import HttpServer
from prefill_client.media.image_loader import ImageLoader
from prefill_client.plugin.model import checkpoint_differences
from prefill_reference.chat import Chat
from prefill_reference.config import ServiceConfig
from prefill_reference.engine import Engine
from prefill_reference.http_service import HttpService, Limits
from prefill_reference.language_model import load_language_model
from prefill_reference.prefix import PrefixCache

DRAIN_S = 30  # how long running requests may take after SIGTERM


async def serve(config: ServiceConfig, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT, then let running requests finish.

    Raises `EncoderError` if the encoder cannot be reached or serves another model, and `OSError` or `ValueError` if the
    model's folder cannot be used.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype, folder = getattr(torch, config.dtype), config.model
    language_model = load_language_model(folder, dtype=dtype, device=config.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    name = config.served_name or folder.resolve().name
    try:
        videos, refused = VideoSettings.from_folder(folder), ""
    except (OSError, ValueError) as error:
        videos, refused = None, f", no videos: {error}"
    async with await EncoderClient.connect(config.encoder, credentials=config.access.credentials) as client:
        await asyncio.to_thread(_check_model, folder, client.description)
        engine, prefixes = (
            Engine(language_model, row_width=client.description.width),
            PrefixCache(config.prefix_tokens),
        )
        chat = Chat(
            client, engine, tokenizer, chunk_tokens=config.chunk_tokens, prefixes=prefixes, videos=videos
        )
        images, clips = (
            ImageLoader(config.image_destinations, max_bytes=limit, timeout_s=config.image_s, what=what)
            for what, limit in (("image", config.max_image_bytes), ("video", config.max_video_bytes))
        )
        limits = Limits(config.max_requests, config.max_body_bytes, config.request_s)
        app = HttpService(chat, tokenizer, name, images, clips, limits).app()
        banner = (
            f"prefill-reference {__version__}\n"
            f"  model      {name} ({folder}), {config.dtype} on {config.device}\n"
            f"  encoder    {config.encoder}\n"
            f"  chunks     {config.chunk_tokens} tokens, KV cache of {config.prefix_tokens} kept\n"
            f"  images     data URLs{', ' + config.image_hosts if config.image_hosts else ''}{refused}\n"
            f"  listening  {config.listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
        )
        http = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S)
        with closing(chat):
            await HttpServer(http, banner).serve(sockets=[listener])


def _check_model(folder: Path, description: Description) -> None:
    """Raise `ModelMismatchError` if the encoder has other vision weights, or another image processor, than a folder."""
    if found := [*checkpoint_differences(folder, description)]:
        listed = "; ".join(f"{what}: {ours}, the encoder has {theirs}" for what, ours, theirs in found)
        raise ModelMismatchError(f"the encoder serves another model: {listed}")
