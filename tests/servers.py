"""A server of this process, with settings of its own, for as long as a test or a fixture needs it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.engine.model import Model


@asynccontextmanager
async def server_of(config: Config, model: Model, **settings: Any) -> AsyncIterator[Server]:
    """Give a server of `config`, some settings of which are others; it is drained, however the body ends."""
    server = Server(replace(config, **settings), model)
    await server.start()
    try:
        yield server
    finally:
        await server.drain()
