"""Measures a real server on the device under load: images per second, latency, and the time of each stage."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from statistics import quantiles
from typing import Any

from bench.gpu_parts.probe import Probe
from bench.harness.towers import full_checkpoint
from encoder_service.metrics import STAGES, Window
from prefill_client import EncoderClient, RowRequest
from testing.checkpoints import write_checkpoint
from testing.photos import photo, with_comment
from testing.server_process import ServerProcess, running

# Name → (sizes of the photos, number of clients). Each client requests images one by one.
CASES = {
    "256": ([(256, 256)], 48),
    "720p": ([(1280, 720)], 16),
    "960x1280": ([(960, 1280)], 16),
    "photos": ([(640 + 96 * n, 1500 - 70 * n) for n in range(12)], 24),
}
DRY_CASES = {"128": ([(128, 128), (160, 96)], 2)}
SECONDS, DRY_SECONDS = 8.0, 1.0
START_S, CONNECT_S = 600.0, 100.0  # enough for a slow machine


def run(probe: Probe) -> None:
    """Note every case; all cases use one server."""
    model = write_checkpoint(probe.scratch) if probe.dry else full_checkpoint("qwen3_vl")
    sized = {"store_host_gib": 0.1, "threads": 1} if probe.dry else {"store_host_gib": 8.0}
    settings: dict[str, Any] = {**sized, "devices": probe.device.type, "decoder_process": "no"}
    numbers = count(time.time_ns())  # no image is requested twice
    with running(model, log=probe.out / "load.log", within_s=START_S, **settings) as server:
        for name, (sizes, clients) in (DRY_CASES if probe.dry else CASES).items():
            files = [photo(*size, seed) for seed, size in enumerate(sizes)]
            probe.attempt(
                {"case": name, "clients": clients}, partial(_case, probe, server, files, numbers, clients)
            )


def _case(
    probe: Probe, server: ServerProcess, files: list[bytes], numbers: Iterator[int], clients: int
) -> dict[str, Any]:
    seconds = DRY_SECONDS if probe.dry else SECONDS
    asyncio.run(
        _load(server.endpoint, files, numbers, clients, seconds / 2)
    )  # warm up: decoders, tables, the store's pages
    before, began = server.metrics(), time.monotonic()
    spent_ms = asyncio.run(_load(server.endpoint, files, numbers, clients, seconds))
    window = Window(before, server.metrics(), time.monotonic() - began)
    cuts = quantiles(spent_ms, n=100, method="inclusive")
    return {
        "images_s": len(spent_ms) / window.seconds,
        "p50_ms": cuts[49],
        "p99_ms": cuts[98],
        "device_busy": window.rate("device_busy_seconds_total"),
        "device_starved": window.rate("device_starved_seconds_total"),
        "images_a_batch": _mean(window, "batch_images"),
        "graph_batches": window.increase("batches_total", how="graph"),
        "eager_batches": window.increase("batches_total", how="eager"),
        "padding": window.increase("padding_patches_total") / max(window.increase("batch_patches_sum"), 1),
        "queue_ms": 1e3 * _mean(window, "queue_wait_seconds"),
        **{f"{stage}_ms": 1e3 * _mean(window, "stage_seconds", stage=stage) for stage in STAGES},
    }


def _mean(window: Window, name: str, **labels: str) -> float:
    """Return the mean of a histogram's observations."""
    observed = window.increase(f"{name}_count", **labels)
    return window.increase(f"{name}_sum", **labels) / observed if observed else 0.0


async def _load(
    endpoint: str, files: list[bytes], numbers: Iterator[int], clients: int, seconds: float
) -> list[float]:
    """Request images for `seconds`; return the milliseconds from Submit to the last row of each image."""
    spent_ms: list[float] = []
    ends = time.monotonic() + seconds

    async def client_loop() -> None:
        async with await EncoderClient.connect(endpoint, timeout_s=CONNECT_S) as client:
            while time.monotonic() < ends:
                number = next(numbers)
                began = time.perf_counter()
                [image] = await client.submit([with_comment(files[number % len(files)], number)])
                async with client.fetch([RowRequest(image.digest)]) as stream:
                    async for outcome in stream:
                        if outcome.error is not None:
                            raise outcome.error
                spent_ms.append((time.perf_counter() - began) * 1e3)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client_loop())
    return spent_ms
