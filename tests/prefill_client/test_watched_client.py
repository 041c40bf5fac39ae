"""An engine's client of a service that is down for a while: it works again without a restart of the engine."""

import logging
from pathlib import Path

import pytest

from encoder_contract.errors import UnauthenticatedError
from encoder_service.app import Server
from prefill_client import EncoderClient
from prefill_client.plugin import service
from prefill_client.plugin.service import WatchedClient, connect
from prefill_client.plugin.service_settings import ServiceSettings
from tests.waiting import soon


async def test_an_unreadable_token_file_is_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_PROBE_S", 0.01)
    monkeypatch.setattr(service, "LAST_PROBE_S", 0.01)
    token, opened = tmp_path / "token", 0
    token.write_text("secret")
    settings = ServiceSettings.read({"endpoints": server.endpoint, "token_file": str(token)})

    async def open_client() -> EncoderClient:
        nonlocal opened
        opened += 1
        return await connect(settings, wait=False)

    token.write_text("")  # it is being replaced
    watched = WatchedClient(open_client, logging.getLogger(__name__))
    with pytest.raises(UnauthenticatedError, match="token") as unread:
        await watched.get()
    watched.note(unread.value)
    await soon(lambda: opened >= 3)
    token.write_text("secret")
    await soon(lambda: watched.down is None)
    assert (await watched.get()).description.model_name
    await watched.close()
