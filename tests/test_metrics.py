"""What an operator sees of a real server: numbers that count what happened, the page, the log line, `top`."""

import asyncio
import io
import json
import logging
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from math import inf

import grpc
import pytest
from rich.console import Console

from bench.images import photo
from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, ImageLimitError, OverloadedError, StaleHandleError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_contract.v1.encoder_pb2_grpc import EncoderServiceStub
from encoder_service import top
from encoder_service.config import Config, ConfigError
from encoder_service.landing import MAX_CONNECTIONS, STUCK_S, Landing
from encoder_service.logs import ConsoleFormatter, JsonFormatter, toggle_debug
from encoder_service.metrics import PREFIX, READINGS, STAGES, Metrics, reason
from encoder_service.model import Model
from encoder_service.scrape import Scrape, ScrapeError, quantile, scrape
from encoder_service.server import Server
from prefill_client.client import EncoderClient
from prefill_client.images import RowRequest


@pytest.fixture
async def server(config: Config, model: Model) -> AsyncIterator[Server]:
    """A server with its metrics on a free port."""
    server = Server(replace(config, metrics_listen="127.0.0.1:0", device_peak_tflops=1.5), model)
    await server.start()
    yield server
    await server.drain()


async def get(server: Server, path: str) -> tuple[int, str]:
    """GET a path of the operator's port, without holding the server's loop."""

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{server.watch.endpoint}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


async def numbers(server: Server) -> Scrape:
    return await asyncio.to_thread(scrape, server.watch.endpoint)


async def use(client: EncoderClient) -> list[bytes]:
    """Two images and a broken one, submitted and fetched inline, then again by handle."""
    torn = photo(300, 200, 3)
    images = [photo(320, 200, 1), photo(200, 331, 2), torn[: len(torn) // 2]]
    await client.submit(images, request_id="chat-1")
    for shm in (False, True):
        requests = [RowRequest(content_digest(image)) for image in images]
        async with client.fetch(requests, shm=shm, timeout_s=30, request_id="chat-1") as stream:
            async for _ in stream:
                pass
    return images


async def settled(server: Server, name: str, value: float, **labels: str) -> Scrape:
    """Wait until a series has a value: what ends a call is counted behind the client's back."""
    async with asyncio.timeout(10):
        while (now := await numbers(server)).total(name, **labels) != value:
            await asyncio.sleep(0.05)
    return now


async def test_images_calls_bytes_and_stages_are_counted_where_they_happen(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        images = await use(client)
    now = await settled(server, "calls_total", 3, status="OK")
    assert now.total("submitted_images_total", outcome="queued") == 3
    assert now.total("encoded_images_total", outcome="kept") == 2
    assert now.total("encoded_images_total", outcome="failed", reason="invalid_image") == 1
    assert now.total("fetched_images_total", outcome="failed", reason="invalid_image") == 2
    served = {o: now.total("fetched_images_total", outcome=o) for o in ("encoded", "host")}
    assert sum(served.values()) == 4
    assert served["host"] >= 2
    assert now.total("uploaded_bytes_total") == sum(map(len, images))
    rows = sum(now.total("transfer_bytes_total", transport=by) for by in ("inline", "shm"))
    assert rows == 2 * now.total("transfer_bytes_total", transport="shm") > 0
    for stage in STAGES:
        count = now.total("stage_seconds_count", stage=stage)
        assert count == {"hash": 3, "upload": 3, "decode": 3}.get(stage, 2), stage
    assert now.total("queue_wait_seconds_count") == 3
    assert now.total("batch_images_sum") == 2
    grids = [server._model.processor.geometry.grid(*size) for size in ((320, 200), (200, 331))]
    assert now.total("batch_patches_sum") == sum(grid.patches for grid in grids)
    assert now.total("device_busy_seconds_total") == pytest.approx(
        now.total("stage_seconds_sum", stage="vit") / now.total("batch_images_sum") * 2, rel=0.6
    )
    assert now.total("store_entries", tier="host") == 2
    assert now.total("sources_images") == 3
    assert (now.total("store_pins"), now.total("calls_in_progress"), now.total("upload_bytes")) == (0, 0, 0)


async def test_every_metric_that_is_named_is_exported(server: Server) -> None:
    now = await numbers(server)
    for name, (kind, _, _) in READINGS.items():
        exported = f"{name}_total" if kind == "counter" else name
        assert exported in now.samples, exported
    assert now.text("model_info", "model_type") == "qwen3_vl"
    assert now.text("model_info", "fingerprint") == server._model.recipe.model.hex()[:12]
    assert now.total("device_peak_flops") == 1.5e12


async def test_pins_show_while_a_handle_is_held(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        (image,) = await client.submit([photo(64, 64, 4)])
        async with client.fetch([RowRequest(image.digest)], shm=True, timeout_s=30) as stream:
            async for _ in stream:
                now = await numbers(server)
                assert (now.total("store_pins"), now.total("calls_in_progress", call="fetch")) == (1, 1)
                assert now.total("store_pinned_bytes") > 0
    await settled(server, "store_pins", 0)


async def test_the_number_of_series_does_not_depend_on_what_callers_say(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        await use(client)
        await settled(server, "calls_total", 3)
        before = sum(map(len, (await numbers(server)).samples.values()))
        for each in range(4):
            image = photo(64 + 32 * each, 64, 90 + each)
            await client.submit([image], request_id=f"request {each}")
            async with client.fetch([RowRequest(content_digest(image))], timeout_s=30) as stream:
                async for _ in stream:
                    pass
        after = await settled(server, "calls_total", 11)
    assert sum(map(len, after.samples.values())) == before < 1000


async def test_the_export_is_what_prometheus_asks_for(server: Server) -> None:
    promtool = shutil.which("promtool")
    text = (await get(server, "/metrics"))[1]
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert {name for name in names if not name.startswith((f"{PREFIX}_", "process_"))} == set()
    milli = {name for name in names if name.endswith(("_ms", "_kb", "_gib", "_mib", "_percent"))}
    assert milli == set()
    if promtool:
        check = await asyncio.to_thread(
            subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert check.returncode == 0, check.stderr + check.stdout


async def test_a_loop_that_is_held_up_shows(server: Server) -> None:
    lags = Scrape.total(await numbers(server), "event_loop_lag_seconds_bucket", le="0.2")
    time.sleep(0.5)  # what no code of ours may do
    await asyncio.sleep(0.2)
    now = await numbers(server)
    late = now.total("event_loop_lag_seconds_count") - now.total("event_loop_lag_seconds_bucket", le="0.2")
    assert late >= 1
    assert lags >= 0


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


async def test_an_index_that_is_absent_at_start_is_a_refusal_or_shown_as_being_alone(
    config: Config, model: Model
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"redis://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"--index {nobody} cannot be reached"):
        await Server(replace(config, index=nobody), model).start()
    alone = replace(config, index=nobody, index_at_start="alone", metrics_listen="127.0.0.1:0")
    server = Server(alone, model)
    await server.start()
    try:
        async with await EncoderClient.connect(server.endpoint) as client:
            await use(client)
        now = await settled(server, "encoded_images_total", 2, outcome="kept")
        assert now.text("index_state", "state") == "alone"
    finally:
        await server.drain()


@pytest.mark.parametrize("listen", ["9464", "localhost:", "localhost:http"])
def test_a_metrics_address_that_is_none_is_refused(config: Config, listen: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-listen"):
        replace(config, metrics_listen=listen)


async def test_each_call_leaves_one_line_with_its_stages_and_no_image(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with await EncoderClient.connect(server.endpoint) as client:
        await use(client)
    await settled(server, "calls_total", 3)
    lines = [record for record in caplog.records if record.name == "encoder_service.calls"]
    assert [line.message for line in lines] == ["submit", "fetch", "fetch"]
    submit, inline, shm = (json.loads(JsonFormatter().format(line)) for line in lines)
    assert (submit["images"], submit["queued"], submit["status"]) == (3, 3, "OK")
    assert (inline["images"], inline["failed"], inline["invalid_image"]) == (3, 1, 1)
    assert {"wait_ms", "ms", "bytes"} <= inline.keys()
    assert {f"{stage}_ms" for stage in ("queue", "decode", "preprocess", "vit", "copy_out")} <= (
        inline.keys() | shm.keys()
    )
    assert {line["request"] for line in (submit, inline, shm)} == {"chat-1"}
    assert " status=OK" in ConsoleFormatter("%(message)s").format(lines[0])
    assert all(len(line.getMessage()) + len(str(line.__dict__.get("fields"))) < 1000 for line in lines)


async def test_a_refused_call_is_counted_and_logged_with_its_status(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with await EncoderClient.connect(server.endpoint) as client:
        server.service.draining = True
        (answer,) = await client.submit([photo(64, 64, 5)], timeout_s=1)
        assert isinstance(answer.error, EncoderError)
    now = await numbers(server)
    assert now.total("calls_total", call="submit", status="UNAVAILABLE") >= 1
    assert now.total("calls_in_progress") == 0
    assert "draining" in str(caplog.records[-1].__dict__["fields"])


async def test_what_a_caller_calls_itself_cannot_forge_a_line_or_flood_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        caller = pb.Caller(request_id="a\nERROR b=c", client_id="x" * 100_000)
        call = EncoderServiceStub(channel).Fetch(pb.FetchRequest(caller=caller))
        with pytest.raises(grpc.aio.AioRpcError, match="at most 128 bytes"):
            await call.read()
    async with grpc.aio.insecure_channel(server.endpoint) as channel:
        call = EncoderServiceStub(channel).Fetch(
            pb.FetchRequest(), metadata=(("x-request-id", "from-a-proxy"),)
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await settled(server, "calls_total", 2, call="fetch")
    forged, proxied = (record for record in caplog.records if record.name == "encoder_service.calls")
    line = ConsoleFormatter("%(message)s").format(forged)
    assert "\n" not in line
    assert "request='a\\nERROR b=c'" in line
    assert len(line) < 600
    assert "request=from-a-proxy" in ConsoleFormatter("%(message)s").format(proxied)


def test_the_log_level_of_a_running_server_is_toggled() -> None:
    root = logging.getLogger()
    before = root.level
    try:
        root.setLevel("WARNING")
        toggle_debug("warning")
        assert root.level == logging.DEBUG
        toggle_debug("warning")
        assert root.level == logging.WARNING
    finally:
        root.setLevel(before)


def test_an_error_is_labelled_by_its_kind() -> None:
    assert reason(None) == ""
    kinds = (ImageLimitError, OverloadedError, StaleHandleError)
    assert [reason(kind("x")) for kind in kinds] == ["image_limit", "overloaded", "stale_handle"]


def test_a_quantile_is_interpolated_as_prometheus_does() -> None:
    buckets = {0.1: 10.0, 0.5: 30.0, 1.0: 40.0, inf: 40.0}
    assert quantile(0.5, buckets) == pytest.approx(0.3)
    assert quantile(1.0, buckets) == 1.0
    assert quantile(0.99, {0.1: 0.0, inf: 5.0}) == 0.1
    assert quantile(0.5, {0.1: 0.0, inf: 0.0}) is None


async def test_top_shows_the_living_and_the_gone(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        await use(client)
    await settled(server, "calls_total", 3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    console = Console(file=io.StringIO(), width=220, record=True)
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
    assert await top.run([nobody], interval_s=1, once=True, console=console) == 1


async def test_top_shows_rates_between_frames(server: Server) -> None:
    view = top.Top([server.watch.endpoint])
    await view.look()
    async with await EncoderClient.connect(server.endpoint) as client:
        await use(client)
    await settled(server, "encoded_images_total", 3)
    (replica,) = await view.look()
    assert replica.window is not None
    assert replica.window.increase("encoded_images_total", outcome="kept") == 2
    (replica,) = await view.look()
    assert replica.window is not None
    assert replica.window.increase("encoded_images_total") == 0


def test_a_scrape_of_what_is_no_server_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ScrapeError, match=nobody):
        scrape(nobody)
