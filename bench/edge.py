"""Measures what an image costs the server's process, beside a tower and a decoder that cost nothing.

Times are processor time, so a busy machine changes them little. `spin_ms` is a fixed piece of Python in the same run: a
quiet core of this kind needs about 20 ms for it. With `paced` devices, the
tower sleeps as long as an H200 is expected to take. To compare images a second with that pace, devices are slowed, so
that two cores suffice for everything else.
"""

import asyncio
import itertools
import math
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.edge_parts.null_tower import installed
from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.calls import fetch_all, submit_and_fetch
from bench.harness.timing import cpu_ms, spin_ms
from encoder_contract.digest import content_digest
from encoder_service.metrics import ScrapeDelta, quantile
from prefill_client import EncoderClient
from testing.checkpoints import write_checkpoint
from testing.photos import photo, with_comment
from testing.server_process import ServerProcess, running
from testing.tcp_proxy import TcpProxy

BENCHMARK = Benchmark(
    "edge",
    "What does an image cost the server's process?",
    (
        Figure(
            "new_ms",
            "new 256×256, 16 a call, 1 device",
            "ms",
            "<= 0.8",
            summary="processor time of the server's process for a new 256×256 image, beside a tower that costs nothing",
        ),
        Figure("new_devices_ms", "the same, 8 devices", "ms", "<= 0.8"),
        Figure("new_paced_ms", "the same, 1 device at an H200's pace", "ms", "<= 0.9"),
        Figure("new_one_ms", "new 256×256, 1 a call", "ms", "<= 3.2"),
        Figure("new_720p_ms", "new 1280×720, 16 a call", "ms", "<= 1.7"),
        Figure("new_720p_devices_ms", "the same, 8 devices", "ms"),
        Figure("chat_ms", "30 names, 29 known, and the Fetch of the new one", "ms", "<= 5"),
        Figure("hit_ms", "hit by handle, 16 a call, each", "ms", "<= 0.15"),
        Figure("client_new_ms", "the client, the same images", "ms", "<= 0.9"),
        Figure("lag_p99_ms", "event loop late with 720p, p99", "ms", "<= 10"),
        Figure("over_pace_256", "images/s / the pace, slowed 8 times, 256×256", target=">= 0.9"),
        Figure("over_pace_256_devices", "256×256, 4 devices", target=">= 0.9"),
        Figure("over_pace_720p", "1280×720, 1 device", target=">= 0.9"),
        Figure("over_pace_720p_devices", "1280×720, 4 devices", target=">= 0.9"),
        Figure("upload_far_s", "upload of 10 MB, 100 ms away", "s", "<= 0.6"),
    ),
    limit_s=420,
    dry_run=("--ops", "4"),
)

H200_PATCHES_PER_S = 256 / 0.0006
SLOWED = 8
DEVICES, SLOWED_DEVICES = 8, 4
SMALL, LARGE = (256, 256), (1280, 720)
FAR_S = 0.05  # each way
FAR_BYTES = 10_000_000
CALLERS = 8
TOGETHER = 16
SETTINGS = {"max_queued_images": 20_000, "max_queue_s": 3600, "store_host_gib": 0.25, "decode_threads": 8}

Operation = Callable[[], Awaitable[None]]


class EdgeCaller:
    """New files of one size, and what a caller does with them."""

    _numbers = itertools.count(int(time.time() * 1000) << 20)

    def __init__(self, client: EncoderClient, width: int, height: int) -> None:
        self._client = client
        self._base = photo(width, height, 7)

    def new(self, count: int) -> list[bytes]:
        """Return files that no server has seen."""
        return [with_comment(self._base, next(self._numbers)) for _ in range(count)]

    async def encode(self, count: int) -> None:
        """Submit new files and fetch their rows."""
        await submit_and_fetch(self._client, self.new(count))

    async def fetch(self, files: Sequence[bytes]) -> None:
        """Fetch all rows of files by handle."""
        await fetch_all(self._client, [content_digest(file) for file in files])

    async def chat(self, known: Sequence[bytes]) -> None:
        """Submit known files and a new one, and fetch the new one."""
        new = self.new(1)
        for answer in await self._client.submit([*known, *new]):
            if answer.error is not None:
                raise answer.error
        await self.fetch(new)


async def repeat(operation: Operation, ops: int) -> None:
    """Let `CALLERS` callers perform an operation so many times each."""

    async def caller() -> None:
        for _ in range(ops):
            await operation()

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def measure(process: int, operation: Operation, ops: int, images: int) -> tuple[float, float]:
    """Return the processor time of `process` and of this one for an image, milliseconds."""
    await repeat(operation, 2)  # warm up
    before, ours = cpu_ms(process), time.process_time_ns()
    await repeat(operation, ops)
    after, ours = cpu_ms(process), time.process_time_ns() - ours
    total = ops * CALLERS * images
    return (after - before) / total, ours / 1e6 / total


def _wait_until_prefaulted(server: ServerProcess) -> None:
    """Wait until the server has touched the memory of its store, which would count as time of images."""
    while not any("prefault" in line for line in server.lines):
        time.sleep(0.1)


async def costs(server: ServerProcess, ops: int) -> dict[str, float]:
    """Measure a server with one device that takes no time."""
    process = server.process.pid
    figures: dict[str, float] = {}
    async with await EncoderClient.connect(server.endpoint) as client:
        small = EdgeCaller(client, *SMALL)
        together = partial(small.encode, TOGETHER)
        figures["new_ms"], figures["client_new_ms"] = await measure(process, together, ops, TOGETHER)
        figures["new_one_ms"], _ = await measure(process, partial(small.encode, 1), 4 * ops, 1)
        known = small.new(29)
        await submit_and_fetch(client, known)
        figures["chat_ms"], _ = await measure(process, partial(small.chat, known), ops, 1)
        hit = partial(small.fetch, known[:TOGETHER])
        figures["hit_ms"], _ = await measure(process, hit, 2 * ops, TOGETHER)
        large, before = partial(EdgeCaller(client, *LARGE).encode, TOGETHER), server.metrics()
        figures["new_720p_ms"], _ = await measure(process, large, max(1, ops // 3), TOGETHER)
        late = ScrapeDelta(before, server.metrics(), 1.0).buckets("event_loop_lag_seconds")
        figures["lag_p99_ms"] = (quantile(0.99, late) or math.nan) * 1e3
    figures["upload_far_s"] = await upload_far_s(server)
    return figures


async def upload_far_s(server: ServerProcess) -> float:
    """Return how long the Submit of a file takes from afar, the best of three."""
    base, spent = photo(*SMALL, 7), []
    proxy = await TcpProxy(int(server.endpoint.rpartition(":")[2])).start()
    async with await EncoderClient.connect(f"127.0.0.1:{proxy.port}") as client:
        proxy.delay(FAR_S)
        for number in range(3):
            file = with_comment(base, number) + os.urandom(FAR_BYTES - len(base))
            began = time.monotonic()
            [answer] = await client.submit([file])
            spent.append(time.monotonic() - began)
            if answer.error is not None:
                raise answer.error
    await proxy.stop()
    return min(spent)


async def cost(server: ServerProcess, size: tuple[int, int], ops: int) -> float:
    """Return the processor time of the server for a new image of this size."""
    async with await EncoderClient.connect(server.endpoint) as client:
        encode = partial(EdgeCaller(client, *size).encode, TOGETHER)
        spent_ms, _ = await measure(server.process.pid, encode, ops, TOGETHER)
    return spent_ms


async def over_pace(server: ServerProcess, size: tuple[int, int], devices: int, seconds: float) -> float:
    """Return the images a second that the server encodes, over what its slowed devices could."""
    is_over = asyncio.Event()
    async with await EncoderClient.connect(server.endpoint) as client:
        images = EdgeCaller(client, *size)
        geometry = client.description.geometry
        assert geometry is not None, "the tower of Qwen3-VL has a rule for its rows"
        patches = geometry.grid(*size).patches
        pace = devices * H200_PATCHES_PER_S / SLOWED / patches
        # The callers wait for as many images as the devices encode in half a second, each for two to sixteen.
        together = min(TOGETHER, max(2, round(pace / 2 / CALLERS)))
        number_of_callers = max(CALLERS, round(pace / 2 / TOGETHER))

        async def caller() -> None:
            while not is_over.is_set():
                await images.encode(together)

        async with asyncio.TaskGroup() as callers:
            for _ in range(number_of_callers):
                callers.create_task(caller())
            await asyncio.sleep(seconds / 4)
            before, began = await asyncio.to_thread(server.encodes), time.monotonic()
            await asyncio.sleep(seconds)
            after, ended = await asyncio.to_thread(server.encodes), time.monotonic()
            is_over.set()
    return (after - before) / (ended - began) / pace


@contextmanager
def server_of(model: Path, devices: int, patches_per_s: float) -> Iterator[ServerProcess]:
    """Run a server of devices whose towers take no time (0), or sleep at a pace."""
    with (
        installed("qwen3_vl", patches_per_s),
        running(model, devices=",".join(["cpu"] * devices), threads=1, **SETTINGS) as server,
    ):
        _wait_until_prefaulted(server)
        yield server


async def figures_of(model: Path, ops: int) -> dict[str, float]:
    """Measure all kinds of servers."""
    figures: dict[str, float] = {}
    spins, seconds = [spin_ms()], float(ops)
    with server_of(model, 1, 0.0) as server:
        figures |= await costs(server, ops)
    spins.append(spin_ms())
    with server_of(model, DEVICES, 0.0) as server:
        figures["new_devices_ms"] = await cost(server, SMALL, ops)
        figures["new_720p_devices_ms"] = await cost(server, LARGE, max(1, ops // 3))
    with server_of(model, 1, H200_PATCHES_PER_S) as server:
        figures["new_paced_ms"] = await cost(server, SMALL, ops)
    spins.append(spin_ms())
    for devices, suffix in ((1, ""), (SLOWED_DEVICES, "_devices")):
        with server_of(model, devices, H200_PATCHES_PER_S / SLOWED) as server:
            for name, size in {"256": SMALL, "720p": LARGE}.items():
                figures[f"over_pace_{name}{suffix}"] = await over_pace(server, size, devices, seconds)
    return {**figures, "spin_ms": sum(spins) / len(spins)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ops", type=int, default=8, help="operations of each caller")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(folder)
        print_figures(asyncio.run(figures_of(model, args.ops)), args)


if __name__ == "__main__":
    main()
