"""A gateway for SGLang in this process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray

from prefill_client import EncoderClient
from prefill_client.media.destinations import Destinations
from prefill_client.media.image_loader import ImageLoader
from prefill_client.plugin.door import Door
from prefill_client.sglang_gateway.delivery import Delivery
from prefill_client.sglang_gateway.gateway import Gateway
from prefill_client.sglang_gateway.http_service import GatewayHttp
from prefill_client.sglang_gateway.metrics import GatewayMetrics
from prefill_client.sglang_gateway.parts import Address, AllowedReceivers
from prefill_client.sglang_gateway.videos import video_settings

LOOPBACK = AllowedReceivers(["127.0.0.1"], "1024-65535")


class RecordingDelivery(Delivery):
    """A delivery that records its receivers and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered: list[tuple[list[Address], NDArray[np.generic]]] = []

    async def deliver(self, receivers: Sequence[Address], frame: bytes, rows: NDArray[np.generic]) -> None:
        self.delivered.append((list(receivers), rows))
        await super().deliver(receivers, frame, rows)


@dataclass
class RunningGateway:
    """A gateway that answers at `url`."""

    url: str
    gateway: Gateway
    metrics: GatewayMetrics
    delivery: RecordingDelivery = field(default_factory=RecordingDelivery)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"sglang_gateway_{name}", labels) or 0.0


@asynccontextmanager
async def gateway_for(
    client: EncoderClient,
    *,
    image_hosts: Sequence[str] = (),
    max_parts: int = 64,
    max_body_bytes: int = 64 << 20,
    language_model: str = "",
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """Run a gateway over a client."""
    delivery, metrics = RecordingDelivery(), GatewayMetrics()
    loaders = (
        ImageLoader(Destinations(image_hosts), max_bytes=8 << 20, timeout_s=30, what=what)
        for what in ("image", "video")
    )
    videos = video_settings(language_model, client.description)
    limits = {"max_images": 70, "part_s": 100.0, "part_row_bytes": 1 << 28, "row_bytes": 1 << 28}
    given = {"allowed": LOOPBACK, "videos": videos, **limits, **settings}
    gateway = Gateway(Door(client, *loaders), delivery, metrics, **given)
    watching = asyncio.create_task(gateway.watch_service())
    service = GatewayHttp(gateway, metrics, max_parts=max_parts, max_body_bytes=max_body_bytes)
    server = uvicorn.Server(uvicorn.Config(service.app(), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield RunningGateway(url, gateway, metrics, delivery)
        finally:
            server.should_exit = True
            await running
            watching.cancel()
            delivery.close()
