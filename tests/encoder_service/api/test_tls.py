"""TLS: accepted clients, certificate reload, and no unencrypted port beyond this host without a flag."""

import asyncio
import os
import re
import shlex
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from encoder_contract.errors import UnavailableError
from encoder_service.app import Server
from encoder_service.config import Config, ConfigError
from encoder_service.devices.model import Model
from encoder_service.http import MAX_CONNECTIONS
from prefill_client import Credentials, EncoderClient, RowRequest
from testing.certificates import HOSTS, Authority, Issued
from testing.photos import photo
from tests.calls import connection, encoded
from tests.processes import run
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon

GRACE_MS = int(PATIENCE_S * 1000)
Serving = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def authority() -> Authority:
    """The authority that signs all certificates."""
    return Authority()


@pytest.fixture
def ca(authority: Authority, tmp_path: Path) -> str:
    """The file with the authority's certificate."""
    return authority.write(tmp_path / "ca.pem")


@pytest.fixture
def issued(authority: Authority, tmp_path: Path) -> Issued:
    """The server's certificate."""
    return authority.issue(tmp_path, "server", HOSTS)


@pytest.fixture
def serving(config: Config, model: Model, issued: Issued) -> Serving:
    """Return a function that runs a server with TLS."""
    return partial(server_of, config, model, tls_cert=issued.cert, tls_key=issued.key)


async def transport_of(client: EncoderClient, seed: int, transport: str = "inline") -> str:
    """Encode an image, and return the transport of its rows."""
    return (await encoded(client, photo(64, 64, seed), transports=[transport])).transport


async def refused(server: Server, credentials: Credentials) -> str:
    """Return the error of a client that cannot connect."""
    with pytest.raises(UnavailableError) as refusal:
        await EncoderClient.connect(
            server.endpoint, credentials=credentials, timeout_s=PATIENCE_S, wait=False
        )
    return str(refusal.value)


@pytest.mark.parametrize("transport", ["inline", "shm"])
async def test_rows_are_served_over_tls_and_shared_memory(serving: Serving, ca: str, transport: str) -> None:
    async with (
        serving() as server,
        await EncoderClient.connect(server.endpoint, credentials=Credentials(ca)) as client,
    ):
        assert await transport_of(client, 1, transport) == transport


async def test_tls_refuses_other_authorities_and_plain_clients(serving: Serving, tmp_path: Path) -> None:
    other = Authority("other").write(tmp_path / "other.pem")
    async with serving() as server:
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(server, Credentials(other))
        assert "if it uses TLS, set the authority" in await refused(server, Credentials())


@pytest.mark.attack("a server or peer under another's name")
async def test_a_server_with_another_certificate_name_is_refused(serving: Serving, ca: str) -> None:
    async with serving() as server:
        assert "TLS handshake failed" in await refused(server, Credentials(ca, server_name="somebody.else"))
        named = Credentials(ca, server_name="encoder")
        async with await EncoderClient.connect(server.endpoint, credentials=named) as client:
            assert await transport_of(client, 2) == "inline"


async def test_with_a_client_authority_only_its_certificates_are_accepted(
    serving: Serving, authority: Authority, ca: str, tmp_path: Path
) -> None:
    ours = authority.issue(tmp_path, "client")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    foreign = Authority("other").issue(elsewhere, "client")
    async with serving(tls_client_ca=ca) as server:
        assert "set one and its key (cert, key)" in await refused(server, Credentials(ca))
        assert "may refuse the client certificate" in await refused(server, Credentials(ca, *foreign))
        async with await EncoderClient.connect(server.endpoint, credentials=Credentials(ca, *ours)) as client:
            assert await transport_of(client, 3) == "inline"


async def test_certificates_of_both_sides_are_replaced_without_a_restart(
    serving: Serving, authority: Authority, ca: str, issued: Issued, tmp_path: Path
) -> None:
    ours = authority.issue(tmp_path, "client")
    async with serving(tls_client_ca=ca, limits={"max_grace_ms": GRACE_MS}) as server:
        async with await EncoderClient.connect(server.endpoint, credentials=Credentials(ca, *ours)) as client:
            before = await connection(client)
            async with client.fetch([RowRequest(b"\1" * 32)], grace_ms=GRACE_MS) as stream:
                waiting = asyncio.ensure_future(anext(aiter(stream)))
                await soon(lambda: server.budgets.fetched_messages.held == 1)
                new = Authority("new")
                for name, hosts in (("server", HOSTS), ("client", ())):
                    new.issue(tmp_path, name, hosts)
                os.replace(new.write(tmp_path / "new-ca.pem"), ca)
                # New connections use the new authority; calls on the old one continue.
                assert await transport_of(client, 4) == "inline"
                assert await connection(client) is not before
                assert not waiting.done()
                waiting.cancel()
        retired = Authority("retired")
        old_ca = authority.write(tmp_path / "old-ca.pem")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(server, Credentials(old_ca, *ours))
        await refused(server, Credentials(ca, *retired.issue(elsewhere, "client")))


async def test_an_invalid_key_file_is_not_loaded(serving: Serving, ca: str, issued: Issued) -> None:
    async with serving() as server:
        Path(issued.key).write_text("no key")
        async with await EncoderClient.connect(server.endpoint, credentials=Credentials(ca)) as client:
            assert await transport_of(client, 5) == "inline"


async def test_the_http_port_speaks_tls_and_follows_the_files(
    serving: Serving, ca: str, issued: Issued, tmp_path: Path
) -> None:
    def ask(by: str) -> int:
        context = ssl.create_default_context(cafile=by)
        with urllib.request.urlopen(
            f"{server.watch.url}healthz", timeout=PATIENCE_S, context=context
        ) as answer:
            return int(answer.status)

    async with serving() as server:
        assert server.watch.url.startswith("https://")
        assert f"metrics {server.watch.url}" in " ".join(server.banner().split())
        assert await asyncio.to_thread(ask, ca) == 200
        new = Authority("new")
        new.issue(tmp_path, "server", HOSTS)
        assert await asyncio.to_thread(ask, new.write(tmp_path / "new-ca.pem")) == 200
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            await asyncio.to_thread(ask, ca)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            await asyncio.to_thread(
                urllib.request.urlopen, f"http://{server.watch.endpoint}/healthz", timeout=PATIENCE_S
            )


@pytest.mark.attack("a connection that never shakes hands")
async def test_a_stalled_tls_handshake_does_not_delay_probes(serving: Serving, ca: str) -> None:
    context = ssl.create_default_context(cafile=ca)
    async with serving() as server:
        host, _, port = server.watch.endpoint.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        url = f"{server.watch.url}readyz"
        with await asyncio.to_thread(
            urllib.request.urlopen, url, timeout=PATIENCE_S, context=context
        ) as answer:
            assert answer.status == 200
        for _, writer in silent:
            writer.close()


async def test_connections_that_begin_no_tls_handshake_are_bounded(serving: Serving) -> None:
    async with serving() as server:
        host, _, port = server.watch.endpoint.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2 * MAX_CONNECTIONS)]

        async def closed(reader: asyncio.StreamReader) -> None:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""

        async with asyncio.timeout(PATIENCE_S):  # the newer ones replace them
            await asyncio.gather(*(closed(reader) for reader, _ in silent[:MAX_CONNECTIONS]))
        for _, writer in silent:
            writer.close()


async def test_the_expirations_of_all_certificates_are_metrics_that_follow_the_files(
    serving: Serving, authority: Authority, ca: str, issued: Issued, tmp_path: Path
) -> None:
    peers = Authority("peers").write(tmp_path / "peers.pem")

    def expirations() -> dict[str, datetime]:
        samples = server.metrics.exposition().decode()
        found = re.findall(r'certificate_expiration_timestamp_seconds{certificate="(\w+)"} (\S+)', samples)
        return {name: datetime.fromtimestamp(float(at), UTC) for name, at in found}

    def expires(path: str) -> datetime:
        return x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc

    async with serving(tls_client_ca=ca, tls_peer_ca=peers) as server:
        before = await asyncio.to_thread(expirations)
        assert before == {"server": expires(issued.cert), "client_ca": expires(ca), "peer_ca": expires(peers)}
        authority.issue(tmp_path, "server", HOSTS, days=60)
        after = await asyncio.to_thread(expirations)
        assert after == before | {"server": expires(issued.cert)}
        assert after["server"] - before["server"] > timedelta(days=29)


async def test_top_and_admin_calls_work_over_tls(serving: Serving, ca: str, capsys: Any) -> None:
    from encoder_service.cli import main

    async with serving() as server:
        flush = ["flush", "--server", server.endpoint]
        assert await asyncio.to_thread(main, [*flush, "--tls-ca", ca]) == 0
        assert "entries dropped" in capsys.readouterr().out
        assert await asyncio.to_thread(main, flush) == 1
        top = partial(run, "encoder-service", "top", "--once", "--tls-ca", ca)
        shown = await asyncio.to_thread(top, server.watch.url)
        assert (shown.returncode, "serving" in shown.stdout) == (0, True)
        shown = await asyncio.to_thread(top, server.watch.endpoint)
        assert (shown.returncode, "it uses TLS (write https://)" in shown.stderr) == (1, True)


@pytest.mark.parametrize("has_tenants", [False, True])
async def test_the_commands_that_make_certs_prints_work(
    config: Config, model: Model, has_tenants: bool, tmp_path: Path
) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "testing.certificates", tmp_path], capture_output=True, text=True, check=True
    ).stdout
    block = printed.split("\n\n")[1 + has_tenants]
    serve, encode, *top = (shlex.split(line)[2:] for line in block.splitlines()[1:])
    given = dict(zip(serve[1::2], serve[2::2], strict=True))
    settings = {flag.removeprefix("--").replace("-", "_"): value for flag, value in given.items()}
    assert settings.setdefault("metrics_listen", "0.0.0.0:9464") == "0.0.0.0:9464"
    (tmp_path / "photo.jpg").write_bytes(photo(64, 64, 1))
    async with server_of(config, model, **{**settings, "metrics_listen": "0.0.0.0:0"}) as server:
        at = [tmp_path / "photo.jpg", "--server", server.endpoint]
        shown = await asyncio.to_thread(run, "prefill-client", "encode", *at, *encode[1:])
        assert (shown.returncode, "tokens" in shown.stdout) == (0, True), shown.stderr
        port = server.watch.endpoint.rpartition(":")[2]
        for url, *flags in top:
            address = url.replace("9464", port)
            shown = await asyncio.to_thread(run, "encoder-service", "top", "--once", address, *flags)
            assert (shown.returncode, "serving" in shown.stdout) == (0, True), shown.stderr
    assert len(top) == has_tenants


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:50051", "encoder.example:50051"])
def test_listening_beyond_this_host_needs_tls_or_a_flag(config: Config, issued: Issued, address: str) -> None:
    for setting, flag in (("listen", "--listen"), ("metrics_listen", "--metrics-listen")):
        with pytest.raises(ConfigError, match=f"{flag} beyond this host needs .*--listen-unprotected yes"):
            replace(config, **{setting: address})
        replace(config, **{setting: address}, tls_cert=issued.cert, tls_key=issued.key)
        replace(config, **{setting: address}, listen_unprotected="yes")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "127.8.8.8:1", "[::1]:0", "localhost:0", "unix:/tmp/socket"]
)
def test_listening_on_loopback_needs_no_tls(config: Config, address: str) -> None:
    assert replace(config, listen=address).listen == address


async def test_a_client_without_an_answer_gets_a_reason_by_its_deadline(serving: Serving, ca: str) -> None:
    async with serving() as server:
        errors: list[str] = []

        async def connect() -> None:
            errors.append(await refused(server, Credentials()))

        connecting = asyncio.create_task(connect())
        await soon(connecting.done)
        assert server.endpoint in errors[0]
