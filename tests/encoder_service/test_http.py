"""The HTTP port: status page, health, and slow or idle connections."""

import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from encoder_service.app import Server
from encoder_service.config import Config, ConfigError
from encoder_service.devices.model import Model
from encoder_service.http import MAX_CONNECTIONS, STUCK_S, HttpPort
from tests.operator_view import answer_of, get, http_port, numbers
from tests.scripted_device import ScriptedDevice
from tests.waiting import PATIENCE_S


async def test_the_status_page_shows_the_settings_and_links(server: Server) -> None:
    status, page = await get(server, "/")
    assert status == 200
    words = ("encoder-service", "qwen3_vl", server.replica_id, 'href="/metrics"', "megapixels", "serving")
    assert [word for word in words if word not in page] == []
    assert (await get(server, "/healthz"))[0] == (await get(server, "/readyz"))[0] == 200
    assert (await get(server, "/nothing"))[0] == 404
    server.service.draining = True
    assert (await get(server, "/readyz")) == (503, "draining\n")
    assert (await get(server, "/healthz"))[0] == 200
    assert (await numbers(server)).total("draining") == 1


def test_a_stuck_event_loop_is_not_healthy() -> None:
    with http_port(facts=lambda: {"<b>": "&"}, last_tick=lambda: time.monotonic() - STUCK_S - 1) as http:
        assert answer_of(f"http://{http.endpoint}/healthz")[0] == 503
        _, page = answer_of(f"http://{http.endpoint}/")
        assert "&lt;b&gt;" in page
        assert "has been stuck for" in page


class Drips:
    """Connections that send a request a byte at a time and never its end, each opened again when it is cut off."""

    def __init__(self, endpoint: str, number: int) -> None:
        host, _, port = endpoint.rpartition(":")
        self._address = host, int(port)
        self._connections = [
            socket.create_connection(self._address, timeout=PATIENCE_S) for _ in range(number)
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drip)
        self.reopened = 0

    def __enter__(self) -> "Drips":
        self._thread.start()
        return self

    def _drip(self) -> None:
        while not self._stop.wait(0.05):
            for index, connection in enumerate(self._connections):
                try:
                    connection.sendall(b"G")
                except OSError:
                    connection.close()
                    self._connections[index] = socket.create_connection(self._address, timeout=PATIENCE_S)
                    self.reopened += 1

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self._connections:
            connection.close()


def connected(http: HttpPort) -> socket.socket:
    """Return a connection to the port."""
    host, _, port = http.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def answered(http: HttpPort, path: str) -> bytes:
    """Return the answer to a probe. Retry, as probes do: a busy machine may send the request too late."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{http.endpoint}{path}", timeout=30) as answer:
                return bytes(answer.read())
        except OSError:
            if time.monotonic() > until:
                raise


@pytest.mark.attack("connections that fill the HTTP port")
def test_health_is_answered_beside_slow_connections() -> None:
    with http_port() as http, Drips(http.endpoint, 2 * MAX_CONNECTIONS) as drips:
        threads = threading.active_count()
        for _ in range(20):
            assert answered(http, "/healthz") == b"ok\n"
            assert b"encsvc_" in answered(http, "/metrics")
            # Some read metrics; connections have none, or there would be one for each.
            assert threading.active_count() < threads + MAX_CONNECTIONS
        until = time.monotonic() + PATIENCE_S  # connections notice at their next byte that they were closed
        while not drips.reopened and time.monotonic() < until:
            time.sleep(0.02)
        assert drips.reopened > 0


def test_a_connection_has_time_for_its_request_despite_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.http.REQUEST_S", PATIENCE_S)
    with http_port() as http, ExitStack() as held:
        probe, *_ = [held.enter_context(connected(http)) for _ in range(1 + MAX_CONNECTIONS)]
        time.sleep(0.2)  # until all are accepted
        probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert b" 200 " in probe.recv(100)


def test_health_is_answered_while_a_scrape_hangs_and_after_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def hang() -> bytes:
        release.wait()
        raise ValueError("the device is lost")

    with http_port(metrics=hang) as http:
        with connected(http) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            urllib.request.urlopen(f"http://{http.endpoint}/healthz", timeout=PATIENCE_S).close()
            release.set()
            assert b" 500 " in scraper.recv(100)
        urllib.request.urlopen(f"http://{http.endpoint}/healthz", timeout=PATIENCE_S).close()
    assert "the device is lost" in caplog.text


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET /\xff HTTP/1.1\r\n:\r\n\r\n"])
def test_a_malformed_request_is_answered(request_: bytes) -> None:
    with http_port() as http, connected(http) as connection:
        connection.sendall(request_)
        assert connection.makefile("rb").readline() == b"HTTP/1.1 404 Not Found\r\n"


def test_an_endless_request_is_cut_off() -> None:
    with http_port() as http, connected(http) as connection, suppress(ConnectionError):
        for _ in range(1000):
            connection.sendall(b"G" * 10_000)
        pytest.fail("ten megabytes of request were read")


def test_a_slow_connection_is_closed_even_if_it_keeps_sending_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.http.CONNECTION_S", 0.5)
    with http_port() as http, connected(http) as connection, suppress(ConnectionError):
        connection.settimeout(0.05)
        for _ in range(600):
            connection.sendall(b"G")
            with suppress(TimeoutError):
                assert connection.recv(1) == b""
                return
        pytest.fail("still open after half a minute")


def test_idle_connections_end_with_the_port() -> None:
    with http_port() as http:
        idle = connected(http)
        urllib.request.urlopen(f"http://{http.endpoint}/healthz", timeout=PATIENCE_S).close()
    with idle:
        assert idle.recv(1) == b""


async def test_a_taken_metrics_port_is_a_clear_refusal(config: Config, model: Model) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config = replace(config, metrics_listen=listen)
        server = Server(config, [ScriptedDevice(config, model)], model.decoder.files)
        with pytest.raises(ConfigError, match=f"--metrics-listen {listen}: the address is taken"):
            await server.start()


@pytest.mark.parametrize("listen", ["9464", "localhost:", "localhost:http"])
def test_an_invalid_metrics_address_is_refused(config: Config, listen: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-listen"):
        replace(config, metrics_listen=listen)
