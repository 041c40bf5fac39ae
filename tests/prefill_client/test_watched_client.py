"""An engine's client of a service that is down for a while: it works again without a restart of the engine."""

import logging
from functools import partial
from pathlib import Path

import pytest

from encoder_contract.errors import ModelMismatchError, UnauthenticatedError
from encoder_service.app import Server
from prefill_client import Description, EncoderClient
from prefill_client.plugin import service
from prefill_client.plugin.service import WatchedClient, connect
from prefill_client.plugin.service_settings import ServiceSettings
from tests.waiting import soon


async def test_a_checkpoint_that_cannot_be_read_is_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FIRST_PROBE_S", 0.01)
    monkeypatch.setattr(service, "LAST_PROBE_S", 0.01)
    settings, reads = ServiceSettings((server.endpoint,)), 0

    def check(_: Description) -> None:
        nonlocal reads
        reads += 1
        (tmp_path / "config.json").read_bytes()

    watched = WatchedClient(partial(connect, settings, wait=False, check=check), logging.getLogger(__name__))
    with pytest.raises(ModelMismatchError, match=r"config\.json") as unread:
        await watched.get()
    watched.note(unread.value)
    await soon(lambda: reads >= 3)
    (tmp_path / "config.json").touch()
    await soon(lambda: watched.down is None)
    assert (await watched.get()).description.model_name
    await watched.close()


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
