"""Measures a real server: latency of Submit and hits, overhead over the bare engine, device use, overload."""

import asyncio
import math
import os
import random
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
import torch

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.budget import TimeBudget
from bench.harness.calls import fetch_all, ms_of, submit_and_fetch
from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, OverloadedError
from encoder_service.config import Config
from encoder_service.devices.model import Model, load_model
from encoder_service.metrics import ScrapeDelta
from prefill_client import EncoderClient, RowRequest
from testing.checkpoints import write_checkpoint
from testing.decoding import decode_files
from testing.photos import photo
from testing.server_process import ServerProcess, running

BENCHMARK = Benchmark(
    "serving",
    "What does the service add to the bare engine?",
    (
        Figure("overhead_ratio", "eight 256×256 served / the bare tower, 27 blocks", target="<= 1.05"),
        Figure("busy_fraction", "device busy while images wait", target=">= 0.95"),
        Figure("submit_new_720p_ms", "Submit answer for a new 1280×720 photo, p50", "ms", "<= 5"),
        Figure("loop_lag_p99_ms", "event loop late under full load, p99 (bucket's edge)", "ms", "<= 10"),
        Figure(
            "overload_p99_over_calm",
            "ten times overload: p99 of admitted images / at 80 % load",
            target="<= 2",
        ),
        Figure("overload_other", "ten times overload: failures other than a refusal", "images", "<= 0"),
        Figure(
            "two_devices_over_one",
            "images per second: `--devices cpu,cpu` / `cpu`, one thread each",
            target=">= 1.9",
        ),
        Figure(
            "shared_1440p_over_one",
            "time of a 2560×1440 image: `cpu` / `cpu,cpu`, one thread each",
            target=">= 1.6",
        ),
        Figure("killed_failed", "device process killed under load: failed images", "images", "<= 0"),
        Figure("killed_rows_lost", "device process killed under load: lost rows", "images", "<= 0"),
        Figure("killed_back_s", "device process killed: back after, beyond a server's start", "s", "<= 2"),
    ),
    limit_s=540,  # two checkpoints and four servers take minutes on a slow machine
    arguments=("--overload-s", "30", "--images", "64", "--rounds", "5"),
    dry_run=("--overload-s", "0", "--images", "16", "--rounds", "2"),
)

Figures = dict[str, float]

BUDGET_S = 240.0
SIDE = 256
BATCH = 8  # images of SIDE × SIDE, for the ratio to the bare engine
THREADS = torch.get_num_threads()
# Shares of the time budget.
SHARE_OF_OVERHEAD, SHARE_OF_LOAD, SHARE_OF_LATENCY = 0.4, 0.3, 0.5
LEAST_ROUNDS, LEAST_PHOTOS = 2, 5
PHOTOS = 15
DEPTH = 27  # full depth: with a shallow tower the ratio would say little about the service
SHALLOW = 4  # blocks, where only the service is measured
# The least number of batches of the deep tower: warm-up and `LEAST_ROUNDS`, both ways, and the full load.
LEAST_BATCHES = 2 * (1 + LEAST_ROUNDS) + 2
LONG_S = 120.0  # enough for a device to restart
SHARED = (2560, 1440)  # of an image that two devices encode as a group
SHARED_ROUNDS = 2
# The client retries, unless the refusal's retry hint is longer than this.
REFUSED_S = 2.0


def checkpoint(folder: Path, depth: int) -> Path:
    """Write a bfloat16 tower of the published width with `depth` blocks and random weights."""
    return write_checkpoint(folder / "model", vision_only=True, depth=depth)


def affordable_depth(shallow: Path, budget: TimeBudget) -> int:
    """Return the number of blocks that there is time for: all, if the processor has bfloat16 products."""
    model = load_model(Config(model=shallow, devices="cpu"))
    files = [photo(SIDE, SIDE, seed) for seed in range(BATCH)]
    block_s = min(tower_seconds(model, files) for _ in range(2)) / SHALLOW
    blocks_s = LEAST_BATCHES * block_s
    return budget.count("blocks of the tower", DEPTH, blocks_s, share=SHARE_OF_OVERHEAD, least=SHALLOW)


async def latency_section(endpoint: str, budget: TimeBudget) -> Figures:
    """Time the answers to a Submit of a new 720p photo on an idle server."""
    new_ms: list[float] = []
    photos = PHOTOS
    async with await EncoderClient.connect(endpoint) as client:
        while len(new_ms) < photos:
            began = time.perf_counter()
            file = photo(1280, 720, seed=len(new_ms))
            new_ms.append(await ms_of(client.submit([file])))
            await fetch_all(client, [content_digest(file)])
            if len(new_ms) == 1:
                photo_s = time.perf_counter() - began
                photos = budget.count("photos", PHOTOS, photo_s, share=SHARE_OF_LATENCY, least=LEAST_PHOTOS)
    return {"submit_new_720p_ms": median(new_ms)}


def tower_seconds(model: Model, files: Sequence[bytes]) -> float:
    """Return the time of the tower for all files in one batch, in this process, without the service."""
    pixels = [p for p in decode_files(model.decoder, files) if isinstance(p, torch.Tensor)]
    geometry = model.tower.geometry
    grids = [geometry.grid(p.shape[1], p.shape[0]) for p in pixels]
    patches = model.tower.inputs(pixels, grids)
    began = time.perf_counter()
    model.tower.encode(patches, grids)
    return time.perf_counter() - began


async def overhead_section(endpoint: str, model: Model, rounds: int, budget: TimeBudget) -> Figures:
    """Alternate a batch of misses on the server with the same batch on the bare tower; return the ratio."""
    served_s: list[float] = []
    bare_s: list[float] = []
    async with await EncoderClient.connect(endpoint) as client:
        while len(bare_s) <= rounds:
            number = len(bare_s)
            if number == 1:  # the first round only warms up
                round_s = served_s[0] + bare_s[0]
                rounds = budget.count("rounds", rounds, round_s, share=SHARE_OF_OVERHEAD, least=LEAST_ROUNDS)
            files = [photo(SIDE, SIDE, 1000 + number * BATCH + n) for n in range(BATCH)]
            served_s.append(await ms_of(submit_and_fetch(client, files)) / 1e3)
            bare_s.append(await asyncio.to_thread(tower_seconds, model, files))
    ratios = [served / bare for served, bare in zip(served_s[1:], bare_s[1:], strict=True)]
    return {
        "served_batch_ms": median(served_s[1:]) * 1e3,
        "bare_batch_ms": median(bare_s[1:]) * 1e3,
        "overhead_ratio": median(ratios),
    }


def images_of_load(wanted: int, batch_s: float, budget: TimeBudget) -> int:
    """Return the number of images, in whole batches, that the full load has time for."""
    batches = budget.count("batches of the full load", wanted // BATCH, batch_s, share=SHARE_OF_LOAD, least=2)
    return batches * BATCH


async def load_section(server: ServerProcess, images: int) -> Figures:
    """Fill the queue with `images`; return how busy the device was, and the lag of the event loop."""
    before = server.metrics()
    async with await EncoderClient.connect(server.endpoint) as client:
        files = [photo(SIDE, SIDE, 5000 + n) for n in range(images)]
        began = time.perf_counter()
        await asyncio.gather(*(submit_and_fetch(client, files[n : n + 4]) for n in range(0, images, 4)))
        seconds = time.perf_counter() - began
    window = ScrapeDelta(before, server.metrics(), seconds)
    busy, starved = (window.increase(f"device_{what}_seconds_total") for what in ("busy", "starved"))
    return {
        "busy_fraction": busy / (busy + starved),
        "loop_lag_p99_ms": lag_p99_s(window) * 1e3,
        "images_per_s": images / seconds,
    }


async def rate_section(endpoint: str, images: int, seed: int) -> float:
    """Return the images per second with a full queue, after a warm-up batch."""
    files = [photo(SIDE, SIDE, seed + n) for n in range(images + BATCH)]
    async with await EncoderClient.connect(endpoint) as client:
        await submit_and_fetch(client, files[images:])
        calls = [submit_and_fetch(client, files[n : n + 4], timeout_s=LONG_S) for n in range(0, images, 4)]
        return images * 1e3 / await ms_of(asyncio.gather(*calls))


async def killed_section(server: ServerProcess, images: int, start_s: float) -> Figures:
    """Kill the device's process while it encodes; return failed images, lost rows and the recovery time."""
    held = server.metrics().total("store_entries", tier="host")
    files = [photo(SIDE, SIDE, 50_000 + n) for n in range(images)]
    async with await EncoderClient.connect(server.endpoint) as client:
        calls = [
            asyncio.create_task(submit_and_fetch(client, files[n : n + 4], timeout_s=LONG_S))
            for n in range(0, images, 4)
        ]
        await _until(lambda: server.metrics().total("store_entries", tier="host") > held)
        engine = next(
            each for each in psutil.Process(server.process.pid).children() if each.name() == "device"
        )
        engine.kill()
        began = time.perf_counter()
        await _until(lambda: not server.metrics().total("device_up"))
        await _until(lambda: bool(server.metrics().total("device_up")))
        back_s = time.perf_counter() - began
        ended = await asyncio.gather(*calls, return_exceptions=True)
    kept = server.metrics().total("store_entries", tier="host") - held
    return {
        "killed_failed": sum(error is not None for error in ended),
        "killed_rows_lost": images - kept,
        "killed_back_s": max(0.0, back_s - start_s),
    }


async def _until(holds: Callable[[], bool]) -> None:
    def look() -> None:
        while not holds():
            time.sleep(0.02)

    await asyncio.to_thread(look)


async def devices_section(model: Path, images: int) -> Figures:
    """Compare two devices with one, and kill a device's process. Each device has one thread."""
    one: dict[str, Any] = {"threads": 1, "store_host_gib": 1}
    began = time.perf_counter()
    with running(model, devices="cpu", **one) as server:
        start_s = time.perf_counter() - began
        rate = await rate_section(server.endpoint, images, 60_000)
        figures = await killed_section(server, images, start_s)
    if len(os.sched_getaffinity(0)) > 1:
        with running(model, devices="cpu,cpu", **one) as server:
            both = await rate_section(server.endpoint, 2 * images, 70_000)
        figures |= {"two_devices_over_one": both / rate}
    return figures


async def shared_section(folder: Path) -> Figures:
    """Alternate images between a server with one device and a server whose two devices encode each image as a group."""
    model = checkpoint(folder, 1)  # a block takes one thread 12 s
    one: dict[str, Any] = {"threads": 1, "store_host_gib": 1}
    ratios = []
    with running(model, devices="cpu", **one) as alone, running(model, devices="cpu,cpu", **one) as both:
        for server in (alone, both):  # warm up
            await _single_ms(server.endpoint, photo(960, 960, 79_999))
        warmed_up = both.metrics().total("shared_images_total")
        for number in range(SHARED_ROUNDS):
            file = photo(*SHARED, 80_000 + number)
            one_ms, both_ms = [await _single_ms(server.endpoint, file) for server in (alone, both)]
            ratios.append(one_ms / both_ms)
        shared = both.metrics().total("shared_images_total") - warmed_up
    if shared < SHARED_ROUNDS:
        raise RuntimeError(f"only {shared:g} images were encoded by both devices; is the machine busy?")
    return {"shared_1440p_over_one": median(ratios)}


async def _single_ms(endpoint: str, file: bytes) -> float:
    async with await EncoderClient.connect(endpoint) as client:
        return await ms_of(submit_and_fetch(client, [file], timeout_s=LONG_S))


async def calm_section(endpoint: str, seconds: float) -> tuple[float, float]:
    """Return the capacity in images per second, and the p99 of a Fetch at 80 % of the capacity, in seconds."""
    rate = await _capacity(endpoint)
    calm = await offer(endpoint, 0.8 * rate, seconds, photo(SIDE, SIDE, 20_000))
    return rate, _p99(calm.seconds)


async def storm_section(server: ServerProcess, rate: float, calm_p99_s: float, seconds: float) -> Figures:
    """Offer ten times the server's capacity; count outcomes, and compare the p99 of admitted images with `calm_p99_s`.

    The server's queue is bounded to half of `calm_p99_s`, as by an operator who wants to keep that p99: the other half
    is for the image's own encode.
    """
    # A new server has no measurements from which to estimate the time of its queue.
    await _capacity(server.endpoint)
    print(
        f"offering {10 * rate:.0f} images a second, ten times what it can do, for {seconds:g} s ...",
        flush=True,
    )
    before = server.metrics().total("process_resident_memory_bytes")
    storm = await offer(server.endpoint, 10 * rate, seconds, photo(SIDE, SIDE, 40_000))
    after = server.metrics().total("process_resident_memory_bytes")
    if storm.others:
        print(f"errors other than a full queue: {dict(storm.others)}")
    return {
        "capacity_images_per_s": rate,
        "calm_p99_ms": calm_p99_s * 1e3,
        "overload_rows": len(storm.seconds),
        "overload_refused": storm.refused,
        "overload_other": storm.others.total(),
        "overload_p99_over_calm": _p99(storm.seconds) / calm_p99_s,
        "overload_memory_growth_mib": (after - before) / 2**20,
    }


async def _capacity(endpoint: str) -> float:
    files = [photo(SIDE, SIDE, 9000 + n) for n in range(16)]
    async with await EncoderClient.connect(endpoint) as client:
        return len(files) * 1e3 / await ms_of(submit_and_fetch(client, files))


@dataclass
class Offered:
    """The outcomes of the images of an open load: the seconds of those served, and the errors of the others."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    others: Counter[str] = field(default_factory=Counter)

    def fail(self, error: EncoderError) -> None:
        """Count an image that failed."""
        if isinstance(error, OverloadedError):
            self.refused += 1
        else:
            self.others[str(error)[-60:]] += 1


async def offer(endpoint: str, images_per_s: float, seconds: float, base: bytes) -> Offered:
    """Offer variants of a JPEG at random moments, whether or not the server keeps up.

    Each is offered once. The client's timeout is so short that it hardly retries.
    """
    outcome = Offered()
    spread = random.Random(0)
    count = int(images_per_s * seconds)
    # The files differ only in their last bytes, because making a photo takes longer than refusing it.
    files = [base[:-2] + n.to_bytes(4, "big") + base[-2:] for n in range(count)]
    async with await EncoderClient.connect(endpoint) as client:

        async def one(file: bytes) -> None:
            (submitted,) = await client.submit([file], timeout_s=REFUSED_S)
            began = time.perf_counter()
            if submitted.error is not None:
                outcome.fail(submitted.error)
                return
            async with client.fetch([RowRequest(submitted.digest)], timeout_s=60) as stream:
                async for rows in stream:
                    if rows.error is not None:
                        outcome.fail(rows.error)
                    else:
                        outcome.seconds.append(time.perf_counter() - began)

        tasks = []
        for file in files:
            tasks.append(asyncio.create_task(one(file)))
            await asyncio.sleep(spread.expovariate(images_per_s))
        await asyncio.gather(*tasks)
    return outcome


def lag_p99_s(window: ScrapeDelta) -> float:
    """Return the upper bound of the bucket that has the p99 of the event loop's lag."""
    buckets = window.buckets("event_loop_lag_seconds")
    return min(edge for edge, count in buckets.items() if count >= 0.99 * buckets[math.inf])


def _p99(seconds: Sequence[float]) -> float:
    if len(seconds) < 2:
        raise RuntimeError(
            f"{len(seconds)} images were served in time: too few for a p99; is the machine busy?"
        )
    return quantiles(seconds, n=100)[98]


async def measure(folder: Path, args: Namespace, budget: TimeBudget) -> Figures:
    """Run all sections: overhead and load with the deep tower, latency and overload with a shallow one."""
    overload_s: float = args.overload_s
    small = checkpoint(folder / "small", SHALLOW)
    path = checkpoint(folder / "deep", affordable_depth(small, budget))
    model = load_model(Config(model=path, devices="cpu"))
    figures: Figures = {}
    settings: dict[str, Any] = {
        "store_host_gib": 1,
        "threads": THREADS,
        "batch_patches": BATCH * (SIDE // 16) ** 2,
    }
    with running(path, **settings) as server:
        figures |= await overhead_section(server.endpoint, model, args.rounds, budget)
        images = images_of_load(args.images, figures["served_batch_ms"] / 1e3, budget)
        figures |= await load_section(server, images)
    with running(small, **settings) as server:
        figures |= await latency_section(server.endpoint, budget)
    figures |= await devices_section(path, images)
    if len(os.sched_getaffinity(0)) > 1:
        figures |= await shared_section(folder / "block")
    if overload_s:
        with running(small, **settings) as server:
            rate, calm_p99_s = await calm_section(server.endpoint, overload_s / 2)
        settings |= {"max_queue_s": round(calm_p99_s / 2, 3), "source_gib": 0.02}
        with running(small, **settings) as server:
            figures |= await storm_section(server, rate, calm_p99_s, overload_s)
    return figures


def main() -> None:
    parser = command_line(__doc__, budget_s=BUDGET_S)
    parser.add_argument(
        "--rounds", type=int, default=7, help="batches for the server and for the bare engine each"
    )
    parser.add_argument("--images", type=int, default=96, help="images of the full load")
    parser.add_argument(
        "--overload-s", type=float, default=60.0, help="seconds of ten times overload; 0: none"
    )
    args = parser.parse_args()
    budget = TimeBudget(args.budget_s)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), args, budget))
    print_figures({**figures, "left_out": budget.left_out}, args)


if __name__ == "__main__":
    main()
