"""Tenant credentials: tokens and certificates, reloaded without a restart, and errors in the tenants file."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import ForbiddenError, UnauthenticatedError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service.api import tenants as tenants_module
from encoder_service.api.tenants import MAX_TOKENS, Tenants
from encoder_service.app import Server
from encoder_service.config import Config, ConfigError
from encoder_service.devices.model import Model
from prefill_client import Credentials, EncoderClient
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from tests.calls import fetched, naming, next_state, refused
from tests.servers import server_of
from tests.tenants import TOKENS, As, table, with_token
from tests.waiting import PATIENCE_S

TICK_S = 0.05  # more than the resolution of a file system's clock


async def test_tokens_change_without_a_restart(guard: Server, as_tenant: As, tenants_file: Path) -> None:
    async with as_tenant(TOKENS["chat"]) as chat:
        assert (await chat.submit([photo(64, 64, 20)]))[0].error is None
        before = tenants_file.read_text()
        tenants_file.write_text(table("chat", TOKENS["chat"], "next-token", rights=["submit", "fetch"]))
        assert (await chat.submit([photo(64, 64, 21)]))[0].error is None
        async with as_tenant("next-token") as next_one:  # of the same tenant: it finds the earlier images
            assert (await fetched(next_one, content_digest(photo(64, 64, 20)))).error is None
        tenants_file.write_text(table("chat", "next-token", rights=["submit", "fetch"]))
        (submitted,) = await chat.submit([photo(64, 64, 22)])
        assert isinstance(submitted.error, UnauthenticatedError)
        tenants_file.write_text("this is no TOML [")  # the previous tenants stay
        async with as_tenant("next-token") as next_one:
            assert (await next_one.submit([photo(64, 64, 23)]))[0].error is None
        tenants_file.write_text(before)
        assert (await chat.submit([photo(64, 64, 24)]))[0].error is None


async def test_removing_a_token_ends_open_submits(guarded: Config, model: Model, tenants_file: Path) -> None:
    both = ["submit", "fetch"]
    name = pb.ImageName(digest=b"no digest")
    new, search = table("chat", "new", rights=both), table("search", "other", rights=both)
    for after, expected in (
        (new + search, UnauthenticatedError),
        (new + table("search", "other", "old", rights=both), UnauthenticatedError),
        (table("chat", "new", "old", rights=["fetch"]) + search, ForbiddenError),
    ):
        tenants_file.write_text(table("chat", "old", "new", rights=both) + search)
        async with server_of(guarded, model) as server, grpc.aio.insecure_channel(server.endpoint) as channel:
            calls: Any = EncoderServiceStub(channel)
            metadata = (("authorization", "Bearer old"),)
            submit = calls.Submit(metadata=metadata, timeout=PATIENCE_S)
            await submit.write(pb.SubmitRequest(open=pb.Caller()))
            await submit.write(naming(name))
            assert (await next_state(submit)).state == pb.STATE_FAILED  # but the call was admitted
            tenants_file.write_text(after)
            await submit.write(naming(pb.ImageName(index=1, digest=bytes(32))))
            code, _ = await refused(submit)
            assert code.value[0] == expected.status.value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nobody\n",
        "[chat]\n",
        '[chat]\nrights = ["submit"]\n',
        "[chat]\ntokens = []\ncertificates = []\n",
    ],
    ids=["empty", "a comment", "a name alone", "without a credential", "empty lists"],
)
def test_a_file_without_tenants_is_an_error_and_the_previous_tenants_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}: .*(no tenant|needs a token or a certificate)"):
        Tenants(str(path))
    path.write_text(table("chat", TOKENS["chat"], rights=["fetch"]))
    tenants = Tenants(str(path))
    path.write_text(table("search", TOKENS["search"], rights=["fetch"]) + text)
    if text.startswith("[chat]"):  # a tenant without a credential is an error beside others as well
        assert tenants.by_token(TOKENS["chat"]) is not None
    path.write_text(text)
    assert tenants.by_token(TOKENS["chat"]) is not None
    assert "stay in force" in caplog.text


def test_an_unreadable_file_is_read_once_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another user replaces the file and then makes it readable: only its permissions change."""
    path = tmp_path / "tenants.toml"
    path.write_text(table("chat", TOKENS["chat"], rights=["fetch"]))
    tenants = Tenants(str(path))

    def refused(_path: str) -> bytes:
        raise PermissionError(13, "Permission denied")

    time.sleep(TICK_S)
    path.write_text(table("chat", "another-token", rights=["fetch"]))
    path.chmod(0o000)
    with monkeypatch.context() as patched:
        patched.setattr(tenants_module, "read_trusted", refused)
        assert tenants.by_token(TOKENS["chat"]) is not None, "the previous tenants stay in force"
    time.sleep(TICK_S)
    path.chmod(0o600)
    assert tenants.by_token(TOKENS["chat"]) is None
    assert tenants.by_token("another-token") is not None


async def test_a_client_uses_a_new_token_for_its_next_call(as_tenant: As, tmp_path: Path) -> None:
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
    token_file = with_token(tmp_path, TOKENS["reader"]).token_file
    async with server_of(guarded, model, tls_cert=cert, tls_key=key, tls_client_ca=ca) as server:
        for token, error in (("", None), (token_file, ForbiddenError)):
            credentials = Credentials(ca, *authority.issue(tmp_path, "engine.example"), token_file=token)
            async with await EncoderClient.connect(server.endpoint, credentials=credentials) as client:
                (submitted,) = await client.submit([photo(64, 64, 40)])
                assert type(submitted.error) is (error or type(None))
        stranger = Credentials(ca, *authority.issue(tmp_path, "stranger.example"))
        with pytest.raises(UnauthenticatedError):
            await EncoderClient.connect(server.endpoint, credentials=stranger, wait=False)


async def test_a_token_is_not_sent_unencrypted_to_another_host(tmp_path: Path) -> None:
    secret = with_token(tmp_path, "secret")
    with pytest.raises(UnauthenticatedError, match="over TLS") as refusal:
        await EncoderClient.connect("192.0.2.1:50051", credentials=secret, timeout_s=5, wait=False)
    assert "secret" not in str(refusal.value)


CHAT = table("chat", TOKENS["chat"], rights=["submit"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[chat", "tenants.toml"),
        ("chat = 1", "must be a table"),
        ('["a b"]', "must be a table whose name"),
        ("[peer]", "must be a table whose name"),
        ("[chat]\ntoken = []", "chat.* unknown keys: token"),
        ('[chat]\ntokens = "x"', "must be a list of strings"),
        ('[chat]\ntokens = ["my-token"]', "SHA-256"),
        ('[chat]\nrights = ["admin"]', "unknown rights: admin"),
        (table("a", "same", rights=[]) + table("b", "same", rights=[]), "the same token or certificate"),
        (
            table("a", rights=[], certificates=("x",)) + table("b", rights=[], certificates=("x",)),
            "the same token or certificate",
        ),
        (table("a", *map(str, range(MAX_TOKENS + 1)), rights=[]), "more than 1024"),
        *(
            (f"{CHAT}max_priority = {value}", r"\[chat\] max_priority must be an integer from -8 to 8")
            for value in ("9", "-9", "1.0", "true", '"8"')
        ),
        *(
            (f"{CHAT}shares_by_salt = {value}", r"\[chat\] shares_by_salt must be true or false")
            for value in ("1", '"true"', "[]")
        ),
    ],
)
def test_an_invalid_tenants_file_is_refused_at_start(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as refusal:
        Tenants(str(path))
    assert "my-token" not in str(refusal.value)


def test_tenants_need_the_fleet_key_for_their_salts(config: Config, tenants_file: Path) -> None:
    with pytest.raises(ConfigError, match="--tenants-file needs --fleet-key-file"):
        replace(config, tenants_file=str(tenants_file))
