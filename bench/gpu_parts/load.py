"""Measures a real server on the device under load, beside its tower alone: images per second, latency, memory."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from statistics import quantiles
from typing import Any

import torch

from bench.gpu_parts.probe import Probe
from bench.gpu_parts.server import connected, running_with_log, settings
from bench.gpu_parts.tower import MIB, load, one_checkpoint
from bench.harness.calls import ms_of, submit_and_fetch
from encoder_service.metrics import STAGES, ScrapeDelta
from encoder_service.vision import Tower
from testing.photos import photo, with_comment
from testing.reference_tower import random_patches
from testing.server_process import ServerProcess

# Name → (sizes of the photos, number of clients). Each client requests images one by one.
CASES = {
    "256": ([(256, 256)], 48),
    "640x480": ([(640, 480)], 32),
    "720p": ([(1280, 720)], 16),
    "photos": ([(640 + 96 * n, 1500 - 70 * n) for n in range(12)], 24),
}
DRY_CASES = {"256": ([(128, 128), (160, 96)], 2)}
SECONDS, DRY_SECONDS = 8.0, 1.0
STATES = ("free", "reserved", "allocated")  # of the device's memory


def run(probe: Probe) -> None:
    """Note every case; all cases use one server. The tower alone is measured before."""
    model, cases = one_checkpoint(probe), DRY_CASES if probe.dry else CASES
    tower = load(probe, model)
    alone = {name: _alone(probe, tower, sizes) for name, (sizes, _) in cases.items()}
    del tower
    if probe.device.type == "cuda":
        torch.cuda.empty_cache()
    numbers = count(time.time_ns())  # no image is requested twice
    with running_with_log(probe, model, **settings(probe, 8.0)) as server:
        for name, (sizes, clients) in cases.items():
            files = [photo(*size, seed) for seed, size in enumerate(sizes)]
            measure = partial(_case, probe, server, files, numbers, clients, alone[name])
            probe.attempt(name, measure)


def _alone(probe: Probe, tower: Tower, sizes: list[tuple[int, int]]) -> float:
    """Return the images per second of the tower alone, in full batches, with patches on the device."""
    grids = [tower.geometry.grid(*size) for size in sizes]
    grids *= max(1, tower.batch_patches // sum(grid.patches for grid in grids))
    patches = [image.to(probe.device) for image in random_patches(grids, tower.spec.patch_values)]
    return len(grids) / probe.ms_until_done(lambda: tower.encode(patches, grids)) * 1e3


def _case(
    probe: Probe,
    server: ServerProcess,
    files: list[bytes],
    numbers: Iterator[int],
    clients: int,
    alone: float,
) -> dict[str, Any]:
    seconds = DRY_SECONDS if probe.dry else SECONDS
    asyncio.run(_load(server.endpoint, files, numbers, clients, seconds / 2))  # decoders, tables, pages
    before, began = server.metrics(), time.monotonic()
    spent_ms = asyncio.run(_load(server.endpoint, files, numbers, clients, seconds))
    window = ScrapeDelta(before, server.metrics(), time.monotonic() - began)
    cuts, images_s = quantiles(spent_ms, n=100, method="inclusive"), len(spent_ms) / window.seconds
    return {
        "clients": clients,
        "images_s": images_s,
        "tower_images_s": alone,
        "service_over_bare_tower": images_s / alone,
        "p50_ms": cuts[49],
        "p99_ms": cuts[98],
        "device_busy": window.rate("device_busy_seconds_total"),
        "images_a_batch": _mean(window, "batch_images"),
        "graph_batches": window.increase("batches_total", how="graph"),
        "eager_batches": window.increase("batches_total", how="eager"),
        "queue_ms": 1e3 * _mean(window, "queue_wait_seconds"),
        **{f"{stage}_ms": 1e3 * _mean(window, "stage_seconds", stage=stage) for stage in STAGES},
        # What grows from case to case is missing from the server's memory plan.
        **{f"{state}_mib": window.now.total("device_memory_bytes", state=state) / MIB for state in STATES},
    }


def _mean(window: ScrapeDelta, name: str, **labels: str) -> float:
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
        async with await connected(endpoint) as client:
            while time.monotonic() < ends:
                number = next(numbers)
                file = with_comment(files[number % len(files)], number)
                spent_ms.append(await ms_of(submit_and_fetch(client, [file])))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client_loop())
    return spent_ms
