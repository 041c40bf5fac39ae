"""`top`: what it scrapes and how it shows it."""

import io
from functools import partial
from math import inf

import pytest
from rich.console import Console

from encoder_service import top
from encoder_service.app import Server
from encoder_service.metrics import ScrapeError, quantile, scrape
from prefill_client import EncoderClient
from tests.closed_port import closed_port
from tests.operator_view import settled, use
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine is not gone."""
    monkeypatch.setattr(top, "scrape", partial(scrape, timeout_s=PATIENCE_S))


def test_a_quantile_is_interpolated_as_prometheus_does() -> None:
    buckets = {0.1: 10.0, 0.5: 30.0, 1.0: 40.0, inf: 40.0}
    assert quantile(0.5, buckets) == pytest.approx(0.3)
    assert quantile(1.0, buckets) == 1.0
    assert quantile(0.99, {0.1: 0.0, inf: 5.0}) == 0.1
    assert quantile(0.5, {0.1: 0.0, inf: 0.0}) is None


async def test_top_shows_live_and_unreachable_servers(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        await use(client)
    await settled(server, "calls_total", 3)
    console = Console(file=io.StringIO(), width=220, record=True)
    with closed_port() as nobody:
        code = await top.run([server.watch.endpoint, nobody], interval_s=1, once=True, console=console)
    text = console.export_text()
    assert code == 0
    living, gone = (
        next(line for line in text.splitlines() if e in line) for e in (server.watch.endpoint, nobody)
    )
    assert "serving" in living
    assert "gone" in gone
    for label in ("host", "image files", "vit", "copy_out", "send shm"):
        assert label in text
    with closed_port() as nobody:
        assert await top.run([nobody], interval_s=1, once=True, console=console) == 1


async def test_top_shows_rates_between_frames(server: Server) -> None:
    view = top.Top([server.watch.endpoint])
    await view.scrape()
    async with await EncoderClient.connect(server.endpoint) as client:
        await use(client)
    await settled(server, "encoded_images_total", 3)
    (replica,) = await view.scrape()
    assert replica.window is not None
    assert replica.window.increase("encoded_images_total", outcome="kept") == 2
    (replica,) = await view.scrape()
    assert replica.window is not None
    assert replica.window.increase("encoded_images_total") == 0


def test_a_scrape_of_another_server_is_a_clear_error() -> None:
    with closed_port() as nobody, pytest.raises(ScrapeError, match=nobody):
        scrape(nobody)
