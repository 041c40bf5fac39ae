"""Measures a real server on the device: misses, and hits in both tiers."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from bench.gpu_parts.probe import Probe
from bench.gpu_parts.tower import one_checkpoint
from bench.harness.calls import ms_of, submit_and_fetch
from encoder_contract.digest import content_digest
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo, with_comment
from testing.server_process import ServerProcess, running

# Name → (width, height, images per request).
CASES = {
    "640x480": (640, 480, 1),
    "720p": (1280, 720, 1),
    "1080p": (1920, 1080, 1),
    "20x960x1280": (960, 1280, 20),
}
HIT = "720p"  # the case of the device tier
DRY_CASES = {HIT: (128, 128, 2)}
START_S, CONNECT_S = 600.0, 100.0  # enough for a slow machine


def settings(probe: Probe, host_gib: float) -> dict[str, Any]:
    """Return settings with which images are decoded in the device's process on the CPU too, as on a GPU."""
    sized = {"store_host_gib": 0.1, "threads": 1} if probe.dry else {"store_host_gib": host_gib}
    return {**sized, "devices": probe.device.type, "decoder_process": "no"}


@contextmanager
def running_with_log(probe: Probe, model: Path, **options: Any) -> Iterator[ServerProcess]:
    """Run a server for the length of a `with` block, and then print its log."""
    log = probe.scratch / "server.log"
    try:
        with running(model, log=log, within_s=START_S, **options) as server:
            yield server
    finally:
        print(indent(log.read_text(errors="replace"), "    "), flush=True)


async def connected(endpoint: str) -> EncoderClient:
    """Return a client of a server, which may be slow."""
    return await EncoderClient.connect(endpoint, timeout_s=CONNECT_S)


def run(probe: Probe) -> None:
    """Note the figures of a server without a device tier, then of one with it."""
    model = one_checkpoint(probe)
    for device_gib in (0.02,) if probe.dry else (0.0, 8.0):
        name = "server, device tier" if device_gib else "server"
        probe.attempt(name, partial(_server, probe, model, device_gib))


def _server(probe: Probe, model: Path, device_gib: float) -> dict[str, Any]:
    began, cases = time.perf_counter(), DRY_CASES if probe.dry else CASES
    options = {**settings(probe, 4.0), "store_device_gib": device_gib}
    with running_with_log(probe, model, **options) as server:
        start_s, endpoint = time.perf_counter() - began, server.endpoint
        if device_gib:  # first: later cases fill the device tier
            hits = partial(_device_hits, probe, endpoint, *cases[HIT])
            probe.attempt(f"{HIT}, from the device tier", lambda: asyncio.run(hits()))
        for name, case in cases.items():
            requests = partial(_requests, probe, endpoint, *case)
            what = f"{name}, with a device tier" if device_gib else name
            probe.attempt(what, lambda requests=requests: asyncio.run(requests()))  # type: ignore[misc]
    return {"start_s": start_s}


async def _requests(probe: Probe, endpoint: str, width: int, height: int, count: int) -> dict[str, Any]:
    """Return the median milliseconds from Submit to the last row, for new and for stored images."""
    base = [photo(width, height, seed) for seed in range(min(count, 4))]
    misses, hits = [], []
    async with await connected(endpoint) as client:
        for repeat in range(2 if probe.dry else 8):
            files = [with_comment(base[n % len(base)], 1000 * repeat + n) for n in range(count)]
            misses.append(await ms_of(submit_and_fetch(client, files)))
            hits.append(await ms_of(submit_and_fetch(client, files)))
    return {"images": count, "miss_ms": median(misses[1:]), "hit_ms": median(hits[1:])}


async def _device_hits(probe: Probe, endpoint: str, width: int, height: int, count: int) -> dict[str, Any]:
    """Return the median milliseconds from the Fetch of stored images until their rows are on this process's device.

    The rows must equal those that come inline.
    """
    files = [photo(width, height, seed) for seed in range(count)]
    async with await connected(endpoint) as client:
        await submit_and_fetch(client, files)
        inline, spent = await _fetched(client, files, "inline"), []
        for _ in range(2 if probe.dry else 31):  # the first call opens the server's memory
            began = time.perf_counter()
            rows = await _fetched(client, files, "device")
            spent.append((time.perf_counter() - began) * 1e3)
    same = all(torch.equal(one.cpu(), other) for one, other in zip(rows, inline, strict=True))
    hit_ms, size_bytes = median(spent[1:]), sum(each.nbytes for each in rows)
    is_there = {each.device.type for each in rows} == {probe.device.type}
    figures = {"first_ms": spent[0], "device_hit_ms": hit_ms, "gb_s": size_bytes / hit_ms / 1e6}
    return {"images": count, "mb": size_bytes / 1e6, **figures, "passed": same and is_there}


async def _fetched(client: EncoderClient, files: Sequence[bytes], transport: str) -> list[Tensor]:
    """Return the rows of each image as a tensor, which is on the GPU with the transport "device"."""
    requests, found = [RowRequest(content_digest(file)) for file in files], dict[int, Tensor]()
    async with client.fetch(requests, transports=[transport]) as stream:
        async for outcome in stream:
            found[outcome.index] = outcome.tensor()
            if outcome.transport != transport:
                raise ValueError(f"rows came by {outcome.transport}, not {transport}")
    return [found[index] for index in range(len(requests))]
