"""How callers show which tenant they are: tokens and certificates, replaced without a restart; the file of tenants."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import (
    ForbiddenError,
    UnauthenticatedError,
)
from encoder_service.api.tenants import MAX_TOKENS, Tenants
from encoder_service.app import Server
from encoder_service.config import Config, ConfigError
from encoder_service.engine.model import Model
from prefill_client import Credentials, EncoderClient
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from tests.calls import fetched
from tests.servers import server_of
from tests.tenants import TOKENS, As, table

TICK_S = 0.05  # of a file system's clock, and more


async def test_tokens_are_replaced_without_a_restart(
    guard: Server, as_tenant: As, tenants_file: Path
) -> None:
    async with as_tenant(TOKENS["chat"]) as chat:
        assert (await chat.submit([photo(64, 64, 20)]))[0].error is None
        before = tenants_file.read_text()
        tenants_file.write_text(table("chat", TOKENS["chat"], "next-token", rights=["submit", "fetch"]))
        assert (await chat.submit([photo(64, 64, 21)]))[0].error is None
        async with as_tenant("next-token") as next_one:  # the same tenant: it has what the old token sent
            assert (await fetched(next_one, content_digest(photo(64, 64, 20)))).error is None
        tenants_file.write_text(table("chat", "next-token", rights=["submit", "fetch"]))
        (submitted,) = await chat.submit([photo(64, 64, 22)])
        assert isinstance(submitted.error, UnauthenticatedError)
        tenants_file.write_text("this is no TOML [")  # nothing changes
        async with as_tenant("next-token") as next_one:
            assert (await next_one.submit([photo(64, 64, 23)]))[0].error is None
        tenants_file.write_text(before)
        assert (await chat.submit([photo(64, 64, 24)]))[0].error is None


def test_a_file_that_could_not_be_read_is_read_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is replaced by another user first, and made readable then: nothing but its rights changes."""
    path = tmp_path / "tenants.toml"
    path.write_text(table("chat", TOKENS["chat"], rights=["fetch"]))
    tenants, read_text = Tenants(str(path)), Path.read_text

    def refused(self: Path) -> str:
        raise PermissionError(13, "Permission denied")

    time.sleep(TICK_S)
    path.write_text(table("chat", "another-token", rights=["fetch"]))
    path.chmod(0o000)
    monkeypatch.setattr(Path, "read_text", refused)
    assert tenants.by_token(TOKENS["chat"]) is not None, "what was read before stays in force"
    monkeypatch.setattr(Path, "read_text", read_text)
    time.sleep(TICK_S)
    path.chmod(0o600)
    assert tenants.by_token(TOKENS["chat"]) is None
    assert tenants.by_token("another-token") is not None


async def test_a_client_takes_up_a_new_token_for_its_next_call(as_tenant: As, tmp_path: Path) -> None:
    async with as_tenant(TOKENS["reader"]) as client:
        assert isinstance((await client.submit([photo(64, 64, 30)]))[0].error, ForbiddenError)
        (tmp_path / f"{TOKENS['reader']}.token").write_text(TOKENS["chat"] + " \n")
        assert (await client.submit([photo(64, 64, 30)]))[0].error is None


async def test_a_certificate_names_a_tenant_and_a_token_wins_over_it(
    guarded: Config, model: Model, tenants_file: Path, tmp_path: Path
) -> None:
    authority = Authority()
    ca = authority.write(tmp_path / "ca.pem")
    cert, key = authority.issue(tmp_path, "server", HOSTS)
    tenants_file.write_text(
        table("engine", rights=["submit", "fetch"], certificates=("engine.example",))
        + table("reader", TOKENS["reader"], rights=["fetch"])
    )
    token = tmp_path / "token"
    token.write_text(TOKENS["reader"])
    async with server_of(guarded, model, tls_cert=cert, tls_key=key, tls_client_ca=ca) as server:
        for name, told, error in (
            ("engine.example", "", None),
            ("engine.example", str(token), ForbiddenError),
        ):
            shown = Credentials(ca, *authority.issue(tmp_path, name), token_file=told)
            async with await EncoderClient.connect(server.endpoint, credentials=shown) as client:
                (submitted,) = await client.submit([photo(64, 64, 40)])
                assert type(submitted.error) is (error or type(None))
        stranger = Credentials(ca, *authority.issue(tmp_path, "stranger.example"))
        with pytest.raises(UnauthenticatedError):
            await EncoderClient.connect(server.endpoint, credentials=stranger, wait=False)


async def test_a_token_is_not_sent_where_others_could_read_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with pytest.raises(UnauthenticatedError, match="over TLS") as refusal:
        await EncoderClient.connect(
            "192.0.2.1:50051", credentials=Credentials(token_file=str(token)), timeout_s=5, wait=False
        )
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[chat", "tenants.toml"),
        ("chat = 1", "must be a table"),
        ('["a b"]', "must be a table whose name"),
        ("[peer]", "must be a table whose name"),
        ("[chat]\ntoken = []", "chat.* has token"),
        ('[chat]\ntokens = "x"', "must be a list of strings"),
        ('[chat]\ntokens = ["my-token"]', "SHA-256"),
        ('[chat]\nrights = ["admin"]', "submit, fetch, put, operate, metrics, not admin"),
        (table("a", "same", rights=[]) + table("b", "same", rights=[]), "in common"),
        (
            table("a", rights=[], certificates=("x",)) + table("b", rights=[], certificates=("x",)),
            "in common",
        ),
        (table("a", *map(str, range(MAX_TOKENS + 1)), rights=[]), "more than 1024"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_at_start(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as refusal:
        Tenants(str(path))
    assert "my-token" not in str(refusal.value)


def test_tenants_need_the_key_of_which_their_salts_are_made(config: Config, tenants_file: Path) -> None:
    with pytest.raises(ConfigError, match="--tenants-file needs --fleet-key-file"):
        replace(config, tenants_file=str(tenants_file))
