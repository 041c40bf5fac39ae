"""Measures the cost of hits: the store itself, its fragmentation, and the transports of a real server."""

import asyncio
import math
import random
import tempfile
import time
from statistics import median

import torch

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.transport.hits import hit_figures
from encoder_contract.geometry import Grid
from encoder_service.store import Store
from encoder_service.store.tier import PageLayout, Tier
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

GRID = Grid(1, 44, 80)

Figures = dict[str, float]


def lookup_figures(entries: int, rounds: int = 20_000) -> Figures:
    """Time pin and release of random addresses in a store of `entries` entries."""
    rows = torch.zeros(1, 16, dtype=torch.bfloat16)
    addresses = [random.Random(number).randbytes(32) for number in range(entries)]
    # A file is enough: each entry has a page, of which one row is written.
    with tempfile.TemporaryDirectory() as folder:
        store = Store(host_bytes=(entries + 1) << 16, row_bytes=2 * 16, segment_dir=folder)
        for address in addresses:
            write(store, address, rows, GRID).release()
        chosen = random.Random(1).choices(addresses, k=rounds)
        times = [_pin_and_release(store, address) for address in chosen]
        store.close()
    return {"pin_us": median(times) * 1e6}


def _pin_and_release(store: Store, address: bytes) -> float:
    began = time.perf_counter()
    pin = store.pin(address)
    assert pin is not None
    pin.release()
    return time.perf_counter() - began


def fragmentation_figures(store_gib: int, images: int) -> Figures:
    """Simulate a day of images of random size, log-uniform from 64 to 3600 tokens, with random hits between them.

    `usable_percent` is the least share of the arena that held embeddings once it was full.
    """
    # Stands for pages of two rows of 32 KiB, without their bytes.
    layout = PageLayout(row_bytes=1, page_rows=2)
    tier = Tier("host", torch.empty(store_gib << 15, dtype=torch.uint8), layout)
    draw = random.Random(0)
    used = []
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
    settled = len(used) // 10  # at first the store is not fragmented yet
    return {"usable_percent": 100 * min(used[settled:])}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--entries", type=int, default=100_000, help="entries for the lookup")
    parser.add_argument("--rounds", type=int, default=40, help="hits by each transport")
    parser.add_argument("--images", type=int, default=50_000, help="images of the simulated day")
    parser.add_argument("--no-server", action="store_true", help="leave out what needs a server")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = lookup_figures(args.entries) | fragmentation_figures(8, args.images)
    if not args.no_server:
        figures |= asyncio.run(hit_figures(args.rounds))
    print_figures(figures, args)


if __name__ == "__main__":
    main()
