"""The process of the gateway: constructs the components, connects them, and serves."""

import asyncio
import logging
import socket
from functools import partial
from pathlib import Path

import uvicorn

from encoder_contract.errors import EncoderError
from encoder_contract.version import __version__
from prefill_client import EncoderClient
from prefill_client.http_server import HttpServer, bound
from prefill_client.media.image_loader import ImageLoader
from prefill_client.plugin.door import Door
from prefill_client.sglang_gateway.config import GatewayConfig
from prefill_client.sglang_gateway.delivery import Delivery
from prefill_client.sglang_gateway.frames import SUPPORTED
from prefill_client.sglang_gateway.gateway import Gateway
from prefill_client.sglang_gateway.http_service import GatewayHttp
from prefill_client.sglang_gateway.metrics import GatewayMetrics
from prefill_client.sglang_gateway.model_check import check_family, check_model
from prefill_client.sglang_gateway.registration import Registration
from prefill_client.sglang_gateway.videos import video_settings

GIB = 1 << 30
DRAIN_S = 30  # how long running parts may take after SIGTERM


async def serve(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let running parts finish.

    Raises `EncoderError` if the service cannot be reached, `ModelMismatchError` if its model is not SGLang's or is not
    supported, `OSError` or `ValueError` if SGLang's checkpoint cannot be read, and `ConfigError` if the port is taken.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)-7s %(message)s")
    with bound(config.listen) as listener:
        client = await EncoderClient.connect(
            config.endpoints,
            client_id="sglang-gateway",
            tenant_salt=config.tenant_salt.encode(),
            credentials=config.access.credentials,
            timeout_s=config.start_s,
        )
        async with client:
            check_family(client.description)
            if config.language_model:
                await asyncio.to_thread(check_model, Path(config.language_model), client.description)
            await _serve(config, client, listener)


async def _serve(config: GatewayConfig, client: EncoderClient, listener: socket.socket) -> None:
    delivery, metrics = Delivery(), GatewayMetrics()
    certificates = config.access.credentials.certificates()
    if certificates is not None and certificates.pem.cert:
        metrics.watch_certificate(certificates)
    load = partial(ImageLoader, config.image_destinations, timeout_s=config.image_s)
    door = Door(
        client,
        load(max_bytes=config.max_image_bytes),
        load(max_bytes=client.description.max_video_bytes, what="video"),
    )
    videos = await asyncio.to_thread(video_settings, config.language_model, client.description)
    gateway = Gateway(
        door,
        delivery,
        metrics,
        videos=videos,
        allowed=config.allowed_receivers,
        max_images=config.max_images,
        part_row_bytes=int(config.part_rows_gib * GIB),
        row_bytes=int(config.rows_gib * GIB),
        part_s=config.part_s,
    )
    service = GatewayHttp(gateway, metrics, max_parts=config.max_parts, max_body_bytes=config.max_body_bytes)
    listening = f"{config.listen.rpartition(':')[0]}:{listener.getsockname()[1]}"
    registration = Registration(config.bootstrap_servers, _urls(config, listening))
    server = HttpServer(
        uvicorn.Config(
            service.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S
        ),
        banner=f"prefill-client {__version__}, gateway for SGLang {SUPPORTED[0]} to {SUPPORTED[-1]}\n"
        f"  encoder    {config.encoder}: {client.description.model_name}, {client.description.dtype}\n"
        f"  receivers  {config.receivers}, ports {config.receiver_ports}\n"
        f"  images     sent with the request{', ' + config.image_hosts if config.image_hosts else ''}\n"
        f"  videos     {'not served: ' + videos.message if isinstance(videos, EncoderError) else 'as images'}\n"
        f"  listening  {listening}",
        before_stop=registration.end,
    )
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(registration.keep(), name="register"),
                group.create_task(gateway.watch_service(), name="watch the service"),
            ]
            await server.serve(sockets=[listener])
            for task in tasks:
                task.cancel()
    finally:
        delivery.close()


def _urls(config: GatewayConfig, listening: str) -> list[str]:
    base = config.register_as.removesuffix("/") or f"http://{listening}"
    return [f"{base}/v{number}" for number in range(config.virtual_encoders)] or [base]
