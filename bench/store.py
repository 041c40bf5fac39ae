"""Measures the cost of hits: the store itself, shared memory, framing, fragmentation, a real server."""

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.transport.hits import hit_figures
from encoder_contract.framing import checksum, frame_rows, parse_fetch_response
from encoder_contract.geometry import Grid
from encoder_service.store import Store
from encoder_service.store.tier import PageLayout, Tier
from prefill_client import SharedRows
from testing.stored import write

BENCHMARK = Benchmark(
    "store",
    "What does a hit cost, by transport?",
    (
        Figure("pin_us", "lookup, pin and release at 100 000 entries, p50", "µs", "<= 20"),
        Figure("hit_shm_ms", "28.8 MB hit over shared memory, p50", "ms", "<= 2"),
        Figure(
            "hit_shm_four_1440p_ms",
            "four 2560×1440 hits over shared memory, p50",
            "ms",
            "<= 6",
            compare="SGLang's encoder server, elsewhere: 382 by RDMA",
        ),
        Figure("inline_gbps", "28.8 MB hit inline", "GB/s", ">= 0.9"),
        Figure("inline_over_bare", "inline / a bare gRPC stream of as many bytes", target=">= 0.8"),
        Figure("tls_over_plain_inline", "28.8 MB hit inline: with TLS / without", target="<= 1.3"),
        Figure("tls_over_plain_shm", "28.8 MB hit over shared memory: with TLS / without", target="<= 1.1"),
        Figure("usable_percent", "arena in use after a day of random sizes, least", "%", ">= 90"),
    ),
    limit_s=180,
    dry_run=("--no-server", "--entries", "5000", "--rounds", "5", "--images", "3000"),
)

WIDTH = 16384  # of Qwen3-VL-8B: hidden size 4096, three DeepStack levels
TOKENS = 880  # of a 1280×720 image
ROW_BYTES = 2 * WIDTH
EMBEDDING_BYTES = TOKENS * ROW_BYTES
GRID = Grid(1, 44, 80)

Figures = dict[str, float]


def lookup_figures(entries: int, rounds: int = 20_000) -> Figures:
    """Time pin and release of random addresses in a store of `entries` entries; measure the memory of an entry."""
    rows = torch.zeros(1, 16, dtype=torch.bfloat16)
    addresses = [random.Random(number).randbytes(32) for number in range(entries)]
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # a file is enough: each entry has a page, of which one row is written
        store = Store(host_bytes=(entries + 1) << 16, width=16, dtype=rows.dtype, segment_dir=folder)
        before = anonymous_bytes()
        for address in addresses:
            write(store, address, rows, GRID).release()
        entry_bytes = (anonymous_bytes() - before) / entries
        chosen = random.Random(1).choices(addresses, k=rounds)
        times = [_pin_and_release(store, address) for address in chosen]
        store.close()
    return {"pin_us": median(times) * 1e6, "entry_bytes": entry_bytes}


def _pin_and_release(store: Store, address: bytes) -> float:
    begin = time.perf_counter()
    pin = store.pin(address)
    assert pin is not None
    pin.release()
    return time.perf_counter() - begin


def memory_figures(rounds: int) -> Figures:
    """Time putting, mapping, viewing, reading and copying a 720p embedding, and a plain copy of as many bytes."""
    rows = torch.randn(TOKENS, WIDTH).bfloat16()
    store = Store(host_bytes=10 * EMBEDDING_BYTES, width=WIDTH, dtype=rows.dtype)
    store.segment.prefault()
    puts = [
        timed(lambda n=n: write(store, bytes([n]), rows, GRID).release())  # type: ignore[misc]
        for n in range(min(rounds, 100))
    ]
    pin = store.pin(bytes([min(rounds, 100) - 1]))
    assert pin is not None
    handle = pin.handle()
    source = rows.view(torch.uint16).numpy()
    target = np.ones_like(source)  # already touched, so that its page faults are not measured

    def view() -> None:
        with SharedRows(handle, WIDTH, "bfloat16").reading():
            pass

    figures = {
        "handle_bytes": len(handle.to_message().SerializeToString()),
        "map_ms": timed(view) * 1e3,
        "view_us": median_s(view, 200) * 1e6,
    }
    with SharedRows(handle, WIDTH, "bfloat16").reading() as shared:
        figures |= {
            "memcpy_gbps": EMBEDDING_BYTES / median_s(lambda: np.copyto(target, source), rounds) / 1e9,
            "read_gbps": EMBEDDING_BYTES / median_s(lambda: np.copyto(target, shared), rounds) / 1e9,
            "put_gbps": EMBEDDING_BYTES / median(puts) / 1e9,
        }
    pin.release()
    store.close()
    return figures


def framing_figures(rounds: int) -> Figures:
    """Time framing and parsing an embedding in messages of 1 MiB, and its checksum."""
    data = np.random.default_rng(0).integers(0, 256, EMBEDDING_BYTES, np.uint8)
    view = memoryview(data)  # type: ignore[arg-type] # an array is a buffer
    target = np.empty_like(data)
    messages = list(frame_rows(3, [view]))

    def parse() -> None:
        filled = 0
        for message in messages:
            parsed = parse_fetch_response(message)
            assert isinstance(parsed, tuple)
            target[filled : filled + len(parsed[1])] = np.frombuffer(parsed[1], np.uint8)
            filled += len(parsed[1])

    def frame() -> None:
        for _ in frame_rows(3, [view]):
            pass

    calls: dict[str, Callable[[], object]] = {
        "frame_gbps": frame,
        "parse_gbps": parse,
        "checksum_gbps": lambda: checksum([view]),
    }
    return {name: EMBEDDING_BYTES / median_s(call, rounds) / 1e9 for name, call in calls.items()}


def fragmentation_figures(store_gib: int, images: int) -> Figures:
    """Simulate a day of images of random size, log-uniform from 64 to 3600 tokens, with random hits between them.

    `usable_percent` is the least share of the arena that held embeddings once it was full. `one_run_percent` is the
    share of embeddings that lie in one run.
    """
    layout = PageLayout(
        row_bytes=1, page_rows=2
    )  # stands for pages of two rows of 32 KiB, without their bytes
    tier = Tier("host", torch.empty(store_gib << 15, dtype=torch.uint8), layout)
    draw = random.Random(0)
    used, pieces = [], []
    recent: list[bytes] = []
    for number in range(images):
        address = number.to_bytes(4, "little")
        tokens = int(math.exp(draw.uniform(math.log(64), math.log(3600))))
        while (slot := tier.reserve(address, tokens, GRID)) is None:
            next(tier.make_room(address, tokens))
        tier.commit(slot)
        tier.unpin(slot)
        recent = [*recent[-2000:], address]
        if (hit := tier.entries.get(draw.choice(recent))) is not None:
            tier.touch(hit)
        if tier.evictions:
            used.append(1 - tier.arena.free_pages / tier.arena.pages)
            pieces.append(len(slot.runs))
    settled = len(used) // 10  # at first the store is not fragmented yet
    return {
        "usable_percent": 100 * min(used[settled:]),
        "one_run_percent": 100 * pieces[settled:].count(1) / len(pieces[settled:]),
    }


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def median_s(call: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of a call, after a warm-up call."""
    call()
    return median(timed(call) for _ in range(rounds))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--entries", type=int, default=100_000, help="entries for the lookup")
    parser.add_argument("--rounds", type=int, default=40, help="repetitions of what copies an embedding")
    parser.add_argument("--images", type=int, default=50_000, help="images of the simulated day")
    parser.add_argument("--no-server", action="store_true", help="leave out what needs a server")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {
        **lookup_figures(args.entries),
        **memory_figures(args.rounds),
        **framing_figures(args.rounds),
        **fragmentation_figures(8, args.images),
    }
    if not args.no_server:
        figures |= asyncio.run(hit_figures(args.rounds))
    print_figures(figures, args)


if __name__ == "__main__":
    main()
