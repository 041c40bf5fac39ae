"""The rows port over TLS: certificates of both sides, their replacement, and tickets of other clients."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from encoder_contract.rows_connection import SIZE
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from prefill_client import Credentials, EncoderClient
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from tests.calls import bytes_of, collect, submitted
from tests.encoder_service.api.test_rows_port import first_ready, port_of, raw_fetch, received
from tests.servers import server_of
from tests.tenants import guarded_by, table
from tests.waiting import PATIENCE_S

PHOTOS = [photo(256, 256, seed) for seed in range(3)]


class Certified:
    """An authority, its files, and a server's certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = Authority()
        self.ca = self._authority.write(folder / "ca.pem")
        self.server = self._authority.issue(folder, "server", HOSTS)

    def client(self, name: str) -> Credentials:
        issued = self._authority.issue(self._folder, name)
        return Credentials(self.ca, issued.cert, issued.key)

    def replace_server(self) -> None:
        self._authority.issue(self._folder, "server", HOSTS)

    def settings(self, *, clients: bool = False) -> dict[str, str]:
        settings = {"tls_cert": self.server.cert, "tls_key": self.server.key, "rows_listen": "127.0.0.1:0"}
        return settings | ({"tls_client_ca": self.ca} if clients else {})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that a busy machine delays is no fault of the port, after which rows would come inline."""
    monkeypatch.setattr("encoder_contract.rows_connection.CONNECT_S", PATIENCE_S)


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    return Certified(tmp_path)


def context_of(credentials: Credentials) -> ssl.SSLContext:
    certificates = credentials.certificates()
    assert certificates is not None
    return certificates.client_context()


def present(server: Server, ticket: bytes, context: ssl.SSLContext) -> bytes:
    """Present a ticket; return the answer: the size of the rows. Empty if the connection is refused."""
    address = ("127.0.0.1", port_of(server).port)
    try:
        with (
            socket.create_connection(address, PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(ticket)
            return received(connection, SIZE.size)
    except (ssl.SSLError, ConnectionError):  # the latter if it sends after it was refused
        return b""


def serial_of(server: Server, context: ssl.SSLContext) -> str:
    """Return the serial number of the certificate that new connections see."""
    address = ("127.0.0.1", port_of(server).port)
    with (
        socket.create_connection(address, PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        found = connection.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


async def test_rows_travel_over_tls(config: Config, model: Model, certified: Certified) -> None:
    async with (
        server_of(config, model, **certified.settings(clients=True)) as server,
        await EncoderClient.connect(server.endpoint, credentials=certified.client("engine")) as client,
    ):
        requests = await submitted(client, PHOTOS)
        by_tcp = await collect(client, requests, transports=["tcp"])
        inline = await collect(client, requests, transports=["inline"])
        assert {rows.transport for rows in by_tcp.values()} == {"tcp"}
        assert bytes_of(by_tcp) == bytes_of(inline)


async def test_a_replaced_certificate_is_used_by_new_connections(
    config: Config, model: Model, certified: Certified
) -> None:
    async with server_of(config, model, **certified.settings()) as server:
        context = context_of(Credentials(certified.ca))
        before = await asyncio.to_thread(serial_of, server, context)
        assert await asyncio.to_thread(serial_of, server, context) == before
        certified.replace_server()
        assert await asyncio.to_thread(serial_of, server, context) != before


async def test_rows_need_a_clients_certificate(config: Config, model: Model, certified: Certified) -> None:
    async with (
        server_of(config, model, **certified.settings(clients=True)) as server,
        await EncoderClient.connect(server.endpoint, credentials=certified.client("engine")) as client,
    ):
        requests = await submitted(client, PHOTOS[:1])
        async with raw_fetch(client, requests) as call:
            ticket = (await first_ready(call)).ticket.secret
            anonymous = context_of(Credentials(certified.ca))
            assert await asyncio.to_thread(present, server, ticket, anonymous) == b""
            with socket.create_connection(("127.0.0.1", port_of(server).port), PATIENCE_S) as plain:
                plain.sendall(ticket)
                assert SIZE.pack(0) != (await asyncio.to_thread(received, plain, SIZE.size))[: SIZE.size]


@pytest.mark.attack("a stolen ticket of another tenant")
async def test_the_ticket_of_another_tenant_is_refused_and_stays_valid_for_its_own(
    config: Config, model: Model, certified: Certified, tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants.toml"
    rights = ["submit", "fetch"]
    tenants.write_text(
        "".join(table(name, rights=rights, certificates=[name]) for name in ("chat", "search"))
    )
    guarded = guarded_by(tenants, config)
    chat, search = certified.client("chat"), certified.client("search")
    async with (
        server_of(guarded, model, **certified.settings(clients=True)) as server,
        await EncoderClient.connect(server.endpoint, credentials=chat) as client,
    ):
        requests = await submitted(client, PHOTOS[:1])
        async with raw_fetch(client, requests) as call:
            ready: pb.ImageReady = await first_ready(call)
            stolen = await asyncio.to_thread(present, server, ready.ticket.secret, context_of(search))
            assert stolen == SIZE.pack(0)
            own = await asyncio.to_thread(present, server, ready.ticket.secret, context_of(chat))
            assert own == SIZE.pack(ready.row_bytes)
