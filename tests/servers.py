"""A server in this process with other settings than the fixture's."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.device_process import DeviceProcess
from encoder_service.devices.model import Model
from encoder_service.limits import Budgets
from prefill_client import EncoderClient
from testing.device_thread import DeviceThread
from testing.tcp_proxy import ANOTHER_HOST, from_another_host

NONE: Mapping[str, Any] = {}


async def kill(server: Server) -> None:
    """End all calls and refuse connections, as kill -9 does."""
    await server._listener._server.stop(0)


@asynccontextmanager
async def server_of(
    config: Config,
    model: Model,
    devices: Sequence[DeviceProcess] = (),
    *,
    limits: Mapping[str, Any] = NONE,
    patience: float = 1.0,
    **settings: Any,
) -> AsyncIterator[Server]:
    """Yield a server with `config`, changed by `settings`, and drain it at the end.

    Without devices, it has one on a thread of this process, with `model`. `limits` are fields of `Budgets` that no
    setting changes; `patience` is that of `Server`.
    """
    config = replace(config, **settings)
    devices = devices or [DeviceThread(config, model)]
    budgets = replace(Budgets.of(config), **limits)
    server = Server(config, devices, model.decoder.files, budgets=budgets, patience=patience)
    await server.start()
    try:
        yield server
    finally:
        await server.drain()


@asynccontextmanager
async def server_and_client(
    config: Config, model: Model, *devices: Sequence[DeviceProcess], **settings: Any
) -> AsyncIterator[tuple[Server, EncoderClient]]:
    """Yield a server as `server_of` does, and a client of it."""
    async with (
        server_of(config, model, *devices, **settings) as server,
        await EncoderClient.connect(server.endpoint) as client,
    ):
        yield server, client


@asynccontextmanager
async def client_elsewhere(server: Server, host: str = ANOTHER_HOST) -> AsyncIterator[EncoderClient]:
    """Yield a client that the server finds on another host."""
    async with (
        from_another_host(server.endpoint, host) as elsewhere,
        await EncoderClient.connect(elsewhere) as client,
    ):
        yield client
