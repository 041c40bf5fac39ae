"""Measures the disk tier: reads against `dd`, Fetches of rows in memory beside a busy disk, and a restart.

`--folder` names the disk to measure. The tier and `dd` read the same files with direct I/O, in turn.
The caller beside the busy disk reads one image by shared memory, while another process fetches images that only the
disk has. The same caller is also measured beside a process that fetches as many images from memory: the difference is
the disk's.
"""

import asyncio
import mmap
import multiprocessing
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.calls import ms_of
from bench.harness.timing import seconds
from bench.transport.hits import fetch, submitted, wide_checkpoint
from encoder_contract.framing import checksum
from encoder_contract.geometry import Grid
from encoder_service.store import Store
from encoder_service.store.disk import HEADER_BYTES, Disk
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from testing.server_process import ServerProcess, running

BENCHMARK = Benchmark(
    "disk",
    "What does the disk tier give?",
    (
        Figure("read_over_dd", "28.8 MB read, GB/s: the tier / dd with direct I/O", target=">= 0.8"),
        Figure("read_gbps", "the tier, with its checksum", "GB/s"),
        Figure("beside_disk", "hit by shared memory beside a busy disk / alone, p50", target="<= 1.2"),
        Figure("beside_memory", "the same beside as many hits in memory / alone, p50"),
        Figure("found_in_5_s", "hit rate 5 s after a restart / before, 10 000 entries", target=">= 0.9"),
    ),
    limit_s=300,
    dry_run=("--files", "2", "--images", "14", "--entries", "50", "--seconds", "1"),
)

WIDTH = 16384
ROW_BYTES = 2 * WIDTH  # of bfloat16
TOKENS, GRID = 880, Grid(1, 44, 80)  # 1280×720 for Qwen3-VL-8B
RESTART_S = 5.0

Figures = dict[str, float]


def read_figures(folder: Path, files: int, rounds: int) -> Figures:
    """Write files, then read each by the tier and by `dd`, in turn."""
    size = TOKENS * ROW_BYTES
    into, page = aligned(size), [aligned(size)]
    page[0][:] = random.Random(0).randbytes(size)
    xxh3 = checksum(page)
    disk = Disk(folder, 1 << 40, ROW_BYTES)
    names = [number.to_bytes(32, "big") for number in range(files)]
    write_s = [seconds(partial(disk.write, name, TOKENS, GRID, page, xxh3)) for name in names]
    tier_s, dd_s = [], []
    for _ in range(rounds):
        for each in disk.files():
            tier_s.append(seconds(partial(disk.read, each, [into])))
            dd_s.append(dd_seconds(folder / each.name))
    disk.clear()
    disk.close()
    return {
        "read_gbps": size / median(tier_s) / 1e9,
        "dd_gbps": (size + HEADER_BYTES) / median(dd_s) / 1e9,
        "read_over_dd": sum(dd_s) / sum(tier_s),
        "write_gbps": size / median(write_s) / 1e9,
    }


def aligned(size: int) -> memoryview:
    """Return memory that direct I/O accepts, whose pages exist."""
    memory = mmap.mmap(-1, size)
    memory.write(bytes(size))
    return memoryview(memory)


def dd_seconds(path: Path) -> float:
    """Return how long `dd` says that it took to read a file."""
    command = ["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stderr
    found = re.search(r"copied, ([0-9.e-]+) s", printed)
    assert found is not None, printed
    return float(found[1])


def restart_figures(folder: Path, entries: int) -> Figures:
    """Fill a folder with small embeddings, and look them up in a store that has just opened it."""
    tokens, width = 4, WIDTH // 4
    row = 2 * width
    page = [aligned(tokens * row)]
    page[0][:] = random.Random(1).randbytes(tokens * row)
    xxh3 = checksum(page)
    disk = Disk(folder, 1 << 40, row)
    names = [number.to_bytes(32, "big") for number in range(entries)]
    for name in names:
        disk.write(name, tokens, Grid(1, 4, 4), page, xxh3)
    disk.close()
    began = time.monotonic()
    store = Store(row_bytes=row, host_bytes=64 << 20, disk_folder=folder, disk_bytes=1 << 40)
    opened_s = time.monotonic() - began
    draw, hits, asked = random.Random(2), 0, 0
    while time.monotonic() - began < RESTART_S and asked < entries:
        loading = store.moves.load_later(draw.choice(names))
        pin = loading.result() if loading is not None else None
        hits, asked = hits + (pin is not None), asked + 1
        if pin is not None:
            pin.release()
    store.close()
    return {"open_s": opened_s, "found_in_5_s": hits / max(asked, 1), "restart_reads": asked}


def _fetch_on_and_on(endpoint: str, digests: Sequence[bytes], stop: Any, counted: Any) -> None:
    """Fetch images one after the other until `stop`, in a process of its own, and count them."""

    async def run() -> None:
        async with await EncoderClient.connect(endpoint) as client:
            while not stop.is_set():
                for digest in digests:
                    await fetch(client, [RowRequest(digest)], "shm")
                    counted.value += 1

    asyncio.run(run())


@contextmanager
def fetching(endpoint: str, images: Sequence[RowRequest]) -> Iterator[Callable[[], int]]:
    """Run a process that fetches images; yield a function that returns how many it has fetched."""
    spawning = multiprocessing.get_context("spawn")
    stop, counted = spawning.Event(), spawning.Value("q", 0)
    digests = [image.digest for image in images]
    process = spawning.Process(target=_fetch_on_and_on, args=(endpoint, digests, stop, counted), daemon=True)
    process.start()
    while counted.value < len(images) and process.is_alive():
        time.sleep(0.05)
    assert process.is_alive(), "the process that fetches images has failed"
    try:
        yield lambda: counted.value
    finally:
        stop.set()
        process.join()


async def hits_ms(client: EncoderClient, image: RowRequest, seconds: float) -> list[float]:
    """Fetch an image fifty times a second, and return how long each call takes, milliseconds."""
    found, until = list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        found.append(await ms_of(fetch(client, [image], "shm")))
        await asyncio.sleep(0.02)
    return found


async def beside_figures(server: ServerProcess, images: int, seconds: float, rounds: int) -> Figures:
    """Measure a caller of one image alone, beside hits in memory, and beside reads from the disk, in turn."""
    async with await EncoderClient.connect(server.endpoint) as client:
        # One by one: the first ones move to the disk, the last ones stay in memory.
        requests = [(await submitted(client, [photo(1280, 720, seed=number)]))[0] for number in range(images)]
        own, in_memory, on_disk = requests[-1], requests[-3:-1], requests[: images // 2]
        alone, memory, disk = list[float](), list[float](), list[float]()
        read, began = 0, 0.0
        for _ in range(rounds):
            alone += await hits_ms(client, own, seconds)
            with fetching(server.endpoint, in_memory):
                memory += await hits_ms(client, own, seconds)
            with fetching(server.endpoint, on_disk) as count:
                before, began = count(), time.monotonic()
                disk += await hits_ms(client, own, seconds)
                read += int((count() - before) / (time.monotonic() - began))
    return {
        "alone_ms": median(alone),
        "beside_disk": median(disk) / median(alone),
        "beside_memory": median(memory) / median(alone),
        "disk_images_per_s": read / rounds,
        "disk_hits": server.metrics().total("store_hits_total", tier="disk"),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--files", type=int, default=20, help="of 28.8 MB")
    parser.add_argument("--images", type=int, default=40, help="of 28.8 MB; memory has room for ten")
    parser.add_argument("--entries", type=int, default=10_000, help="small files at the restart")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement beside a load")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind, in turn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        figures = read_figures(folder / "files", args.files, args.rounds)
        figures |= restart_figures(folder / "entries", args.entries)
        model = wide_checkpoint(folder / "model")
        settings: dict[str, Any] = {"store_host_gib": 0.3, "store_disk": folder / "tier", "store_disk_gib": 4}
        with running(model, devices="cpu", **settings) as server:
            figures |= asyncio.run(beside_figures(server, args.images, args.seconds, args.rounds))
    print_figures(figures, args)


if __name__ == "__main__":
    main()
