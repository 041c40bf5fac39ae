"""Metrics readers: with tenants, another host needs the right `metrics`; probes never do."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from encoder_contract.credentials import Token
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.metrics import ScrapeError, scrape
from tests.processes import run
from tests.servers import server_of
from tests.tenants import guarded_by, table
from tests.waiting import PATIENCE_S

RIGHTS = {"prometheus": "metrics", "chat": "submit", "ops": "operate"}


@pytest.fixture
async def server(config: Config, model: Model, tmp_path: Path) -> AsyncIterator[Server]:
    """A server with tenants, whose HTTP port listens beyond this host."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("".join(table(name, name, rights=[right]) for name, right in RIGHTS.items()))
    for name in RIGHTS:
        (tmp_path / f"{name}.token").write_text(f"{name}\n")
    guarded = guarded_by(tenants, config, metrics_listen="0.0.0.0:0", listen_unprotected="yes")
    async with server_of(guarded, model) as server:
        yield server


def port(server: Server) -> str:
    return server.watch.endpoint.replace("0.0.0.0", "127.0.0.1")


async def status(server: Server, path: str, authorization: str | None) -> tuple[int, str]:
    """Return status and challenge of a GET."""

    def ask() -> tuple[int, str]:
        headers = {"Authorization": authorization} if authorization is not None else {}
        request = urllib.request.Request(f"http://{port(server)}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get("WWW-Authenticate", "")

    return await asyncio.to_thread(ask)


@pytest.mark.attack("reading metrics without the right")
@pytest.mark.parametrize(
    ("authorization", "answer"),
    [
        *(
            (wrong, (401, "Bearer"))
            for wrong in (None, "", "Bearer somebody", "Basic prometheus", "prometheus")
        ),
        *((reader, (403, "")) for reader in ("Bearer chat", "Bearer ops")),
        ("Bearer prometheus", (200, "")),
    ],
)
async def test_metrics_and_page_need_the_right_and_probes_do_not(
    server: Server, authorization: str | None, answer: tuple[int, str]
) -> None:
    for path in ("/metrics", "/"):
        assert await status(server, path, authorization) == answer
    if authorization != "Bearer prometheus":
        assert (await status(server, "/nothing", authorization))[0] in (401, 403)
    for path in ("/healthz", "/readyz"):
        assert await status(server, path, authorization) == (200, "")


async def test_top_reads_a_token_file_and_sends_the_token_only_within_this_host(
    server: Server, tmp_path: Path
) -> None:
    async def top(name: str) -> tuple[int, str]:
        flags = ["--once", "--token-file", tmp_path / f"{name}.token"]
        done = await asyncio.to_thread(run, "encoder-service", "top", port(server), *flags)
        return done.returncode, done.stdout + done.stderr

    code, shown = await top("prometheus")
    assert (code, "serving" in shown) == (0, True)
    code, shown = await top("chat")
    assert (code, "403 tenant chat lacks the right `metrics`" in shown) == (1, True)
    done = await asyncio.to_thread(run, "encoder-service", "top", port(server), "--once")
    assert (done.returncode, "401 no token was sent" in done.stdout + done.stderr) == (1, True)
    code, shown = await top("nobody")
    assert (code, "No such file" in shown) == (2, True)
    (tmp_path / "unknown.token").write_text("nobody's\n")
    code, shown = await top("unknown")
    assert (code, "401 unknown token: it belongs to no tenant" in shown) == (1, True)
    with pytest.raises(ScrapeError, match="or within this host"):
        scrape("192.0.2.1:9464", token=Token(str(tmp_path / "prometheus.token")))


async def test_a_loopback_port_needs_no_token(config: Config, server: Server, model: Model) -> None:
    async with server_of(server._config, model, metrics_listen="127.0.0.1:0") as local:
        assert await status(local, "/metrics", None) == (200, "")
