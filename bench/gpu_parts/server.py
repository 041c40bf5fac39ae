"""Measures a real server on the device: misses, hits in both tiers, and rows of rotated PNGs against the CPU's."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.gpu_parts.probe import Probe
from bench.harness.towers import full_checkpoint
from prefill_client import EncoderClient, FetchedRows, RowRequest
from testing.checkpoints import write_checkpoint
from testing.photos import photo, with_comment
from testing.server_process import running

# Name → (width, height, images per request).
CASES = {
    "720p": (1280, 720, 1),
    "1080p": (1920, 1080, 1),
    "4x1440p": (2560, 1440, 4),
    "20x960x1280": (960, 1280, 20),
}
DRY_CASES = {"2x128": (128, 128, 2)}
# The case of the device tier. The target is 3 ms from the Fetch to rows on this process's GPU.
HIT = "4x1440p"
DRY_HIT = "2x128"
ROTATED = 32  # PNGs, with all eight orientations
MIN_COSINE = 0.99  # between a bfloat16 row of the device and the same row of the CPU
START_S, CONNECT_S = 600.0, 100.0  # enough for a slow machine


def run(probe: Probe) -> None:
    """Note the figures of a server without a device tier, then of one with it."""
    model = write_checkpoint(probe.scratch) if probe.dry else full_checkpoint("qwen3_vl")
    for device_gib in (0.02,) if probe.dry else (0.0, 8.0):
        label = {"device_tier_gib": device_gib}
        probe.attempt({**label, "what": "server"}, partial(_server, probe, model, device_gib, label))


def _settings(probe: Probe) -> dict[str, Any]:
    """Return settings with which images are decoded in the server's process on the CPU too, as on a GPU."""
    sized = {"store_host_gib": 0.1, "threads": 1} if probe.dry else {"store_host_gib": 4.0}
    return {**sized, "devices": probe.device.type, "decoder_process": "no"}


def _server(probe: Probe, model: Path, device_gib: float, label: dict[str, Any]) -> dict[str, Any]:
    log = probe.out / "server.log"
    cases = DRY_CASES if probe.dry else CASES
    began = time.perf_counter()
    settings = {**_settings(probe), "store_device_gib": device_gib}
    with running(model, log=log, within_s=START_S, **settings) as server:
        start_s, endpoint = time.perf_counter() - began, server.endpoint
        if device_gib:  # first: later cases fill the device tier
            name = DRY_HIT if probe.dry else HIT
            probe.attempt(
                {"case": name, "from": "device tier"}, partial(_device_hit, probe, endpoint, *cases[name])
            )
        for name, case in cases.items():
            probe.attempt({**label, "case": name}, partial(_case, probe, endpoint, *case))
        if device_gib:
            probe.attempt({"what": "turned PNGs"}, partial(_rotated, probe, model, endpoint))
    return {"start_s": start_s}


def _case(probe: Probe, endpoint: str, width: int, height: int, count: int) -> dict[str, Any]:
    return asyncio.run(_requests(probe, endpoint, width, height, count))


async def _requests(probe: Probe, endpoint: str, width: int, height: int, count: int) -> dict[str, Any]:
    """Return the median milliseconds from Submit to the last row, for new and for stored images."""
    base = [photo(width, height, seed) for seed in range(min(count, 4))]
    misses, hits, tokens = [], [], 0
    async with await EncoderClient.connect(endpoint, timeout_s=CONNECT_S) as client:
        for repeat in range(2 if probe.dry else 8):
            files = [with_comment(base[n % len(base)], 1000 * repeat + n) for n in range(count)]
            misses.append(await _request_ms(client, files))
            hits.append(await _request_ms(client, files))
            tokens = sum(each.shape[0] for each in await _rows(client, files))
    return {"images": count, "tokens": tokens, "miss_ms": median(misses[1:]), "hit_ms": median(hits[1:])}


async def _request_ms(client: EncoderClient, files: Sequence[bytes]) -> float:
    began = time.perf_counter()
    await _rows(client, files)
    return (time.perf_counter() - began) * 1e3


async def _rows(client: EncoderClient, files: Sequence[bytes]) -> list[FetchedRows]:
    submitted = await client.submit(files)
    found: dict[int, FetchedRows] = {}
    async with client.fetch([RowRequest(image.digest) for image in submitted]) as stream:
        async for outcome in stream:
            if outcome.error is not None:
                raise outcome.error
            found[outcome.index] = outcome.copy()
    return [found[index] for index in range(len(files))]


def _device_hit(probe: Probe, endpoint: str, width: int, height: int, count: int) -> dict[str, Any]:
    return asyncio.run(_device_hits(probe, endpoint, width, height, count))


async def _device_hits(probe: Probe, endpoint: str, width: int, height: int, count: int) -> dict[str, Any]:
    """Return the median milliseconds from the Fetch of stored images until their rows are on this process's device.

    The rows must equal those that come inline.
    """
    files = [photo(width, height, seed) for seed in range(count)]
    async with await EncoderClient.connect(endpoint, timeout_s=CONNECT_S) as client:
        requests = [RowRequest(image.digest) for image in await client.submit(files)]
        inline = await _on_device(client, requests, "inline")
        spent, rows = [], inline
        for _ in range(2 if probe.dry else 31):  # the first call opens the server's memory
            began = time.perf_counter()
            rows = await _on_device(client, requests, "device")
            spent.append((time.perf_counter() - began) * 1e3)
    same = all(torch.equal(one.cpu(), other) for one, other in zip(rows, inline, strict=True))
    size_bytes = sum(each.nbytes for each in rows)
    where = {str(each.device.type) for each in rows}
    hit_ms = median(spent[1:])
    return {
        "images": count,
        "mb": size_bytes / 1e6,
        "first_ms": spent[0],
        "device_hit_ms": hit_ms,
        "gb_s": size_bytes / hit_ms / 1e6,
        "passed": same and where == {probe.device.type},
    }


async def _on_device(client: EncoderClient, requests: Sequence[RowRequest], transport: str) -> list[Tensor]:
    """Return the rows of each image as a tensor, which is on the GPU with the transport "device"."""
    found: dict[int, Tensor] = {}
    async with client.fetch(requests, transports=[transport]) as stream:
        async for outcome in stream:
            found[outcome.index] = outcome.tensor()
            if outcome.transport != transport:
                raise ValueError(f"rows came by {outcome.transport}, not {transport}")
    return [found[index] for index in range(len(requests))]


def _rotated(probe: Probe, model: Path, endpoint: str) -> dict[str, Any]:
    """Return the least and mean cosine between the rows of rotated PNGs here and on the CPU."""
    count = 8 if probe.dry else ROTATED
    files = [photo(256 + 32 * (n % 3), 256, n, "PNG", orientation=1 + n % 8) for n in range(count)]

    async def rows(endpoint: str) -> Tensor:
        async with await EncoderClient.connect(endpoint, timeout_s=CONNECT_S) as client:
            return torch.cat([each.tensor().float() for each in await _rows(client, files)])

    ours = asyncio.run(rows(endpoint))
    with _on_the_cpu(probe, model, endpoint) as other:
        cosines = torch.cosine_similarity(ours, asyncio.run(rows(other)), dim=1)
    least = float(cosines.min())
    return {
        "rows": len(cosines),
        "least": least,
        "mean": float(cosines.mean()),
        "passed": least >= MIN_COSINE,
    }


@contextmanager
def _on_the_cpu(probe: Probe, model: Path, endpoint: str) -> Iterator[str]:
    """Yield the address of a server on the CPU. In a dry run that is the server under test."""
    if probe.device.type == "cpu":
        yield endpoint
        return
    with running(model, within_s=START_S, **{**_settings(probe), "devices": "cpu"}) as server:
        yield server.endpoint
