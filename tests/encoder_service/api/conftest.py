"""Fixtures: servers with tenants."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import EncoderClient
from prefill_client.transport import channels
from tests.servers import server_of
from tests.tenants import RIGHTS, TOKENS, As, guarded_by, table, with_token
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def patient_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client take a server that gets no processor time for a silent one: nobody would repeat raw calls."""
    timeout_ms = int(1000 * PATIENCE_S)
    patient = {"grpc.keepalive_timeout_ms": timeout_ms, "grpc.http2.ping_timeout_ms": timeout_ms}
    monkeypatch.setattr(
        channels, "CHANNEL_OPTIONS", tuple({**dict(channels.CHANNEL_OPTIONS), **patient}.items())
    )


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    """The tenants of this test's server."""
    path = tmp_path / "tenants.toml"
    path.write_text("".join(table(name, token, rights=RIGHTS[name]) for name, token in TOKENS.items()))
    return path


@pytest.fixture
def guarded(config: Config, tenants_file: Path) -> Config:
    """Settings of a server with tenants."""
    return guarded_by(tenants_file, config)


@pytest.fixture
async def guard(guarded: Config, model: Model) -> AsyncIterator[Server]:
    """That server."""
    async with server_of(guarded, model) as server:
        yield server


@pytest.fixture
def as_tenant(guard: Server, tmp_path: Path) -> As:
    """Return a function that connects with a token."""

    @asynccontextmanager
    async def as_tenant(token: str, **options: Any) -> AsyncIterator[EncoderClient]:
        credentials = with_token(tmp_path, token)
        async with await EncoderClient.connect(
            guard.endpoint, credentials=credentials, timeout_s=PATIENCE_S, wait=False, **options
        ) as client:
            yield client

    return as_tenant
