"""The operator's port: the page, health, and connections that say nothing."""

import asyncio
import socket
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from encoder_service.config import Config, ConfigError
from encoder_service.landing import MAX_CONNECTIONS, STUCK_S, Landing
from encoder_service.metrics import Metrics
from encoder_service.model import Model
from encoder_service.server import Server
from tests.operator_view import get, numbers


async def test_the_page_says_what_runs_and_links_to_the_rest(server: Server) -> None:
    status, page = await get(server, "/")
    assert status == 200
    for text in (
        "encoder-service",
        "qwen3_vl",
        server.replica_id,
        'href="/metrics"',
        "megapixels",
        "serving",
    ):
        assert text in page
    assert (await get(server, "/healthz"))[0] == (await get(server, "/readyz"))[0] == 200
    assert (await get(server, "/nothing"))[0] == 404
    server.service.draining = True
    assert (await get(server, "/readyz")) == (503, "draining\n")
    assert (await get(server, "/healthz"))[0] == 200
    assert (await numbers(server)).total("draining") == 1


def test_a_loop_that_is_stuck_is_not_healthy() -> None:
    landing = Landing(
        "127.0.0.1:0",
        title="t",
        facts={"<b>": "&"},
        metrics=Metrics().wsgi(),
        last_tick=lambda: time.monotonic() - STUCK_S - 1,
        draining=lambda: False,
    )
    landing.start()
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{landing.endpoint}/healthz", timeout=5)
        page = urllib.request.urlopen(f"http://{landing.endpoint}/", timeout=5).read().decode()
        assert "&lt;b&gt;" in page
        assert "has not turned" in page
    finally:
        landing.stop()


async def test_connections_that_say_nothing_take_a_bounded_number_of_threads(server: Server) -> None:
    host, _, port = server.watch.endpoint.rpartition(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS)]
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await asyncio.wait_for(reader.read(), 5) == b"", "one too many is turned away"
    for _, each in [*idle, (reader, writer)]:
        each.close()
    async with asyncio.timeout(5):
        while True:
            try:
                assert (await get(server, "/healthz"))[0] == 200
                return
            except (ConnectionError, urllib.error.URLError):
                await asyncio.sleep(0.05)


async def test_a_taken_metrics_port_is_a_clear_refusal(config: Config, model: Model) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server(replace(config, metrics_listen=listen), model)
        with pytest.raises(ConfigError, match=f"--metrics-listen {listen}: the address is taken"):
            await server.start()


@pytest.mark.parametrize("listen", ["9464", "localhost:", "localhost:http"])
def test_a_metrics_address_that_is_none_is_refused(config: Config, listen: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-listen"):
        replace(config, metrics_listen=listen)
