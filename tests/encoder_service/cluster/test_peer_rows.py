"""Rows between replicas over their rows ports: signed, over TLS, and inline if a port cannot be reached."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encoder_contract import rows_connection
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import Credentials
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from tests.cluster_replica import Replica, Start, starting, through_peer
from tests.waiting import PATIENCE_S

ROWS: dict[str, Any] = {"rows_listen": "0.0.0.0:0", "listen_unprotected": "yes"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a handshake on a busy machine its time. A port that refuses does so at once."""
    monkeypatch.setattr(rows_connection, "CONNECT_S", PATIENCE_S)


async def sent(replica: Replica, transport: str) -> int:
    """Return the bytes of rows that a replica has sent by a transport."""
    exposed = (await asyncio.to_thread(replica.server.metrics.exposition)).decode()
    (sample,) = re.findall(rf'encsvc_transfer_bytes_total{{transport="{transport}"}} (\S+)', exposed)
    return int(float(sample))


async def brought(a: Replica, b: Replica, seed: int) -> int:
    """Encode an image at `a`, and fetch it through `b`; return the bytes of its rows."""
    return (await through_peer(a, b, photo(64, 64, seed))).array.nbytes


async def test_replicas_take_rows_of_each_other_over_the_rows_port(start: Start) -> None:
    a, b = await start(**ROWS), await start(**ROWS)
    size = await brought(a, b, 1)
    assert await sent(a, "tcp") == size
    assert await sent(a, "inline") == size  # to the test


async def test_replicas_do_so_with_certificates_and_signatures(
    config: Config, model: Model, redis_url: str, tmp_path: Path
) -> None:
    authority = Authority()
    ca, issued = authority.write(tmp_path / "ca.pem"), authority.issue(tmp_path, "server", HOSTS)
    fleet = tmp_path / "fleet.key"
    fleet.write_text("the secret of the fleet, 32 bytes")
    secured = replace(config, tls_cert=issued.cert, tls_key=issued.key, tls_client_ca=ca)
    secured = replace(secured, fleet_key_file=str(fleet), rows_listen="0.0.0.0:0")
    client = Credentials(ca, *authority.issue(tmp_path, "client"))
    async with starting(secured, model, redis_url, client) as start:
        a, b = await start(), await start()
        assert await brought(a, b, 2) == await sent(a, "tcp")


async def test_a_port_that_refuses_costs_one_attempt(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The rows port of one replica is open on another address than the one by which others reach it."""
    a, b = await start(rows_listen="127.0.0.1:0"), await start()
    for seed in (3, 4):
        await brought(a, b, seed)
    assert await sent(a, "tcp") == 0
    assert caplog.text.count("arrive inline for 60 s") == 1
