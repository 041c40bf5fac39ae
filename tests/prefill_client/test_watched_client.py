"""An engine's client of a service that is down for a while: it works again without a restart of the engine."""

import logging
from pathlib import Path

import pytest

from encoder_contract.errors import ModelMismatchError, UnauthenticatedError
from encoder_service.app import Server
from prefill_client import Description, EncoderClient
from prefill_client.plugin import service
from prefill_client.plugin.service import WatchedClient, connect
from prefill_client.plugin.service_settings import ServiceSettings
from tests.waiting import soon


@pytest.mark.parametrize(
    ("unread", "error"), [("config.json", ModelMismatchError), ("token", UnauthenticatedError)]
)
async def test_a_file_of_the_engine_that_cannot_be_read_is_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: str, error: type[Exception]
) -> None:
    """A checkpoint that is not there yet, and a token that is being replaced."""
    monkeypatch.setattr(service, "FIRST_PROBE_S", 0.01)
    monkeypatch.setattr(service, "LAST_PROBE_S", 0.01)
    files = {"config.json": tmp_path / "config.json", "token": tmp_path / "token"}
    for path in files.values():
        path.write_text("secret")
    settings = ServiceSettings.read({"endpoints": server.endpoint, "token_file": str(files["token"])})
    opened = 0

    def check(_: Description) -> None:
        files["config.json"].read_bytes()

    async def open_client() -> EncoderClient:
        nonlocal opened
        opened += 1
        return await connect(settings, wait=False, check=check)

    if unread == "token":
        files["token"].write_text("")
    else:
        files["config.json"].unlink()
    watched = WatchedClient(open_client, logging.getLogger(__name__))
    with pytest.raises(error, match=unread) as raised:
        await watched.get()
    watched.note(raised.value)
    await soon(lambda: opened >= 3)
    files[unread].write_text("secret")
    await soon(lambda: watched.down is None)
    assert (await watched.get()).description.model_name
    await watched.close()
