"""What travels to the ranks of a tensor-parallel engine: handles against rows, two processes on gloo, one real server.

The rows of every image are fetched before: what is timed is the broadcast, until both ranks can read all rows. The
two ways take turns. Rows are as wide as Qwen3-VL-8B's (bfloat16), made by a tower that is small otherwise.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.benchmark import Benchmark, Figure
from prefill_client import BlockingClient, FetchedRows, RowRequest
from prefill_client.reference.tensor_parallel import pack, rows_on_every_rank
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import HALF_THE_CORES, running

BENCHMARK = Benchmark(
    "tensor_parallel",
    "What do handles save a tensor-parallel engine?",
    (
        Figure("handle_bytes", "broadcast to each rank as handles", "bytes"),
        Figure("row_bytes", "broadcast to each rank as rows", "bytes"),
        Figure("handle_ms", "until every rank has its rows, by handles", "ms"),
        Figure("row_ms", "until every rank has its rows, by broadcast rows", "ms"),
        Figure(
            "rows_over_handles",
            "rows / handles",
            compare="3716 → 8 ms for 32 images of 720p once only metadata travelled (SGLang PR 21462)",
        ),
    ),
    limit_s=120,
    quick=("--rounds", "1"),
)

RANKS = 2
IMAGES, SIZE = 32, (1280, 720)
ROUNDS = 5
STORE_GIB = 1.5  # 32 embeddings of 29 MB


def timed(outcomes: Sequence[FetchedRows] | None) -> float:
    """Return the milliseconds until the rows can be read on this rank; all ranks begin together."""
    dist.barrier()
    began = time.monotonic()
    with rows_on_every_rank(outcomes) as rows:
        entered_ms = (time.monotonic() - began) * 1000
        assert len(rows) == IMAGES
    return entered_ms


def follow(rounds: int) -> None:
    """Be rank 1."""
    for _ in range(2 * (rounds + 1)):
        timed(None)


def lead(endpoint: str, rounds: int) -> dict[str, Any]:
    """Be rank 0: fetch once each way, then measure."""
    files = [photo(*SIZE, seed) for seed in range(IMAGES)]
    with BlockingClient.connect(endpoint) as client:
        requests = [RowRequest(image.digest) for image in client.submit(files)]
        with client.fetch(requests) as by_handle, client.fetch(requests, transports=["inline"]) as inline:
            handles, copies = (sorted(each, key=lambda o: o.index) for each in (by_handle, inline))
            row_bytes = sum(outcome.array.nbytes for outcome in copies)
            times = [(timed(handles), timed(copies)) for _ in range(rounds + 1)][1:]  # the first one maps
    handle_ms, row_ms = (median(each) for each in zip(*times, strict=True))
    return {
        "images": IMAGES,
        "handle_bytes": len(pack(handles)),
        "row_bytes": row_bytes + len(pack(copies)),
        "handle_ms": handle_ms,
        "row_ms": row_ms,
        "rows_over_handles": median(rows / handles for handles, rows in times),
        "rounds": rounds,
        "ranks": RANKS,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def rank_main(rank: int, endpoint: str, folder: str, rounds: int) -> None:
    """Run one rank; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=RANKS, rank=rank)
    if rank:
        follow(rounds)
    else:
        Path(folder, "measured.json").write_text(json.dumps(lead(endpoint, rounds)))
    dist.destroy_process_group()


def main() -> None:
    """Measure, print the table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wide = {"out_hidden_size": 4096}
        model = write_checkpoint(
            Path(folder, "model"), dtype=torch.bfloat16, text_layers=1, depth=3, vision=wide
        )
        with running(model, store_host_gib=STORE_GIB, torch_threads=HALF_THE_CORES) as server:
            spawn = get_context("spawn")
            ranks = [
                spawn.Process(target=rank_main, args=(rank, server.endpoint, folder, args.rounds))
                for rank in range(RANKS)
            ]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
        measured = json.loads(Path(folder, "measured.json").read_text())
    print(f"{IMAGES} images of {SIZE[0]}x{SIZE[1]}, {RANKS} ranks")
    print(f"{'':10}{'bytes':>14}{'ms':>10}")
    for what in ("handle", "row"):
        print(f"{what + 's':10}{measured[what + '_bytes']:14,}{measured[what + '_ms']:10.2f}")
    if args.json:
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
