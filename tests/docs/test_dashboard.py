"""The pictures of the dashboard: every panel can be queried and drawn."""

import asyncio
import io
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from docs.dashboard import Prometheus, Series, amount, drawn, filled, rows, write
from docs.pictures import process, prometheus_config
from encoder_service.config import Config
from encoder_service.engine.model import Model
from testing.processes import free_port
from tests.pages import ROOT
from tests.servers import server_of

LINES = [Series("a", [0.0, 2.0, 4.0], [0.1, float("nan"), 0.7]), Series("b", [0.0, 2.0], [0.0, 1e9])]


def colours(png: bytes) -> set[tuple[int, int, int]]:
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    return {picture.getpixel((x, y)) for x in range(picture.width) for y in range(picture.height)}  # type: ignore[misc]


def test_every_variable_of_the_dashboard_is_filled_in() -> None:
    expressions = [target["expr"] for _, panels in rows() for panel in panels for target in panel["targets"]]
    assert len(expressions) > 60
    assert not [each for each in expressions if "$" in filled(each, "encoder", ".*")]
    assert 'instance="encoder-0"' in filled('x{instance="$instance"}', "encoder", "encoder-0")


@pytest.mark.parametrize("number", range(2))  # stats, and charts
def test_a_row_is_drawn_with_its_lines(number: int) -> None:
    title, panels = list(rows())[number]
    picture, empty = drawn(panels, [LINES] * len(panels)), drawn(panels, [[]] * len(panels))
    assert Image.open(io.BytesIO(picture)).size == Image.open(io.BytesIO(empty)).size
    lively = [each for each in colours(picture) - colours(empty) if max(each) - min(each) > 100]
    assert lively, title


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "percentunit", "50 %"),
        (0.0, "percentunit", "0 %"),
        (0.012, "s", "12 ms"),
        (3.0, "s", "3 s"),
        (3 << 20, "Bps", "3 MiB/s"),
        (12.0, "bytes", "12 B"),
        (4.25, "ops", "4.25/s"),
        (2.0, "short", "2"),
        (1200.0, "short", "1,200"),
    ],
)
def test_amounts_have_the_units_of_the_dashboard(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
async def test_panels_are_drawn_from_a_real_prometheus(config: Config, model: Model, tmp_path: Path) -> None:
    async with server_of(replace(config, metrics_listen="127.0.0.1:0"), model) as server:
        at = server.watch.url.removeprefix("http://").rstrip("/")
        (tmp_path / "prometheus.yml").write_text(prometheus_config({"encoder-0": at}, at))
        url = f"http://127.0.0.1:{free_port()}"
        command = [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
        ]
        command += [f"--web.listen-address={url.removeprefix('http://')}"]

        def run() -> list[Path]:
            with process(command, tmp_path / "log", f"{url}/-/ready"):
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    try:
                        return write(Prometheus(url, time.time() - 60, time.time()), tmp_path)
                    except LookupError:  # nothing is scraped yet
                        time.sleep(0.5)
                raise AssertionError((tmp_path / "log").read_text())

        written = await asyncio.to_thread(run)
    assert {path.name for path in written} >= {
        "dashboard-health.png",
        "dashboard-caches.png",
        "dashboard-replica.png",
    }


def test_pictures_are_small() -> None:
    assert {
        path.name: size for path in (ROOT / "docs/img").iterdir() if (size := path.stat().st_size) > 200_000
    } == {}
