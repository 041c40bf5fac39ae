"""The metrics of a real server."""

import asyncio
import re
import shutil
import subprocess
import time

import pytest

from encoder_contract.digest import content_digest
from encoder_contract.errors import ImageLimitError, OverloadedError, StaleHandleError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.metrics import PREFIX, STAGES, reason
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from tests.calls import stub
from tests.closed_port import closed_port
from tests.operator_view import get, numbers, settled, use
from tests.servers import server_of
from tests.waiting import PATIENCE_S, soon


async def test_images_calls_bytes_and_stages_are_counted(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        images = await use(client)
    await settled(server, "calls_total", 3, status="OK")
    # A scrape is not a snapshot: this value may be read before those above.
    now = await settled(server, "store_pins", 0)
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
    grids = [server.model.geometry.grid(*size) for size in ((320, 200), (200, 331))]
    assert now.total("batch_patches_sum") == sum(grid.patches for grid in grids)
    assert now.total("device_busy_seconds_total") == pytest.approx(
        now.total("stage_seconds_sum", stage="vit") / now.total("batch_images_sum") * 2, rel=0.6
    )
    assert now.total("store_entries", tier="host") == 2
    assert now.total("sources_images") == 2, "what cannot be decoded is not kept"
    assert (now.total("store_pins"), now.total("calls_in_progress"), now.total("upload_bytes")) == (0, 0, 0)


async def test_a_call_counts_one_miss_for_an_image_however_often_it_looks(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        before = server.store.stats().misses
        (image,) = await client.submit([photo(64, 64, 77)])
        assert image.error is None
        assert server.store.stats().misses == before + 1, "it looks again once it has the lease"
        unknown = pb.FetchRequest(images=[pb.FetchImage(digest=content_digest(b"unknown"))])
        [message] = [message async for message in (await stub(client)).Fetch(unknown)]
        assert message.errors
        assert server.store.stats().misses == before + 2, "it looks again before it waits"


async def device_has_reported(server: Server) -> bool:
    return "device_memory_bytes" in (await numbers(server)).samples


@pytest.mark.cuda
async def test_every_metric_that_is_read_at_a_scrape_has_a_value(server: Server) -> None:
    await soon(lambda: device_has_reported(server))
    now = await numbers(server)
    for reading in server.readings():
        name = reading.name.removeprefix(f"{PREFIX}_")
        assert (f"{name}_total" if reading.type == "counter" else name) in now.samples, name
    assert now.text("model_info", "model_type") == "qwen3_vl"
    assert now.text("model_info", "fingerprint") == server.model.facts.recipe.model.hex()[:12]
    assert now.total("device_peak_flops") == 1.5e12


async def test_pins_show_while_a_handle_is_held(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        (image,) = await client.submit([photo(64, 64, 4)])
        async with client.fetch([RowRequest(image.digest)], timeout_s=PATIENCE_S) as stream:
            async for _ in stream:
                now = await numbers(server)
                assert (now.total("store_pins"), now.total("calls_in_progress", call="fetch")) == (1, 1)
                assert now.total("store_pinned_bytes") > 0
    await settled(server, "store_pins", 0)


async def test_the_number_of_series_does_not_depend_on_callers(server: Server) -> None:
    async with await EncoderClient.connect(server.endpoint) as client:
        await use(client)
        await settled(server, "calls_total", 3)
        await soon(lambda: device_has_reported(server))
        before = sum(map(len, (await numbers(server)).samples.values()))
        for each in range(4):
            image = photo(64 + 32 * each, 64, 90 + each)
            await client.submit([image], request_id=f"request {each}")
            async with client.fetch([RowRequest(content_digest(image))], timeout_s=PATIENCE_S) as stream:
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


async def test_a_blocked_event_loop_shows_in_the_lag_metric(server: Server) -> None:
    async def late() -> float:
        """Return the number of measurements above 0.2 s."""
        now = await numbers(server)
        count = now.total("event_loop_lag_seconds_count")
        return count - now.total("event_loop_lag_seconds_bucket", le="0.2")

    before = await late()
    time.sleep(0.5)  # blocks the event loop, as no code of ours may

    async def one_more() -> bool:
        return await late() > before

    await soon(one_more)  # a measurement from just before the block may be the first that a scrape shows


async def test_a_server_without_its_index_at_start_encodes_alone(
    config: Config, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as port:
        async with server_of(config, model, index=f"redis://{port}") as server:
            said = rf"redis://{port}: unavailable \(.+\); this server encodes alone"
            assert re.search(said, server.banner())
            async with await EncoderClient.connect(server.endpoint) as client:
                await use(client)
            now = await settled(server, "encoded_images_total", 2, outcome="kept")
            assert now.text("index_state", "state") == "alone"


def test_an_error_is_labelled_by_its_kind() -> None:
    kinds = (ImageLimitError, OverloadedError, StaleHandleError)
    assert [reason(kind("x")) for kind in kinds] == ["image_limit", "overloaded", "stale_handle"]
