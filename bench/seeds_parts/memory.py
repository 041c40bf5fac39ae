"""How many images of 2560×1440 fit under a limit of memory, and the server's peak with 64 of them and with one."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from bench.harness.benchmark import table
from bench.harness.memory import peak_bytes, private_bytes
from encoder_contract.geometry import Grid
from prefill_client import EncoderClient, RowRequest
from testing.checkpoints import write_checkpoint
from testing.photos import photo, with_comment
from testing.server_process import ServerProcess, running

SIZE, GRID = (2560, 1440), Grid(1, 90, 160)
IMAGES = 64
LIMIT_GIB = 2.0
WAIT_S = 300.0
# One narrow block: a photo of 14,400 patches takes a second on one core.
VISION = {
    "depth": 1,
    "hidden_size": 72,
    "intermediate_size": 288,
    "num_heads": 1,
    "deepstack_visual_indexes": [0],
}


async def memory(folder: Path, images: int, limit_gib: float) -> dict[str, Any]:
    """Measure our server, whose every process may grow by the limit, and `transformers` in one process."""
    model = write_checkpoint(folder / "memory", vision=VISION, text_layers=1)
    first = photo(*SIZE, 0)
    files = [with_comment(first, number) for number in range(1, images + 1)]
    settings: dict[str, Any] = {
        "devices": "cpu",
        "dtype": "float32",
        "store_host_gib": 1.0,
        "max_queue_s": 3600,
    }
    with running(model, **settings) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            await count_encoded(client, [first])  # warm up
            limit(server, limit_gib)
            peaks = []
            for some in (files[:1], files):
                with peak_bytes(server.process.pid, private_bytes) as peak:
                    encoded = await count_encoded(client, some)
                peaks.append(peak())
    theirs = fits_in_one_forward(model, images, limit_gib)
    rows = [("the service", str(encoded)), ("`transformers`, all in one forward", str(theirs))]
    title = f"Images of 2560×1440, of {images}, with {limit_gib:g} GiB more than at start"
    return {
        "most_images": encoded,
        "most_images_transformers": theirs,
        "memory_64_over_1": peaks[1] / peaks[0],
        "memory_1_mib": round(peaks[0] / 2**20),
        "memory_tables": [table(title, ("", "images"), rows)],
    }


def limit(server: ServerProcess, limit_gib: float) -> None:
    """Let the address space of each process of a server grow by so much, and no further."""
    process = psutil.Process(server.process.pid)
    for each in (process, *process.children(recursive=True)):
        most = each.memory_info().vms + int(limit_gib * 2**30)
        resource.prlimit(each.pid, resource.RLIMIT_AS, (most, most))


async def count_encoded(client: EncoderClient, files: list[bytes]) -> int:
    """Return how many images of one call are encoded."""
    submitted = await client.submit(files, timeout_s=WAIT_S)
    requests = [RowRequest(each.digest) for each in submitted if each.error is None]
    async with client.fetch(requests, timeout_s=WAIT_S) as stream:
        return sum([outcome.error is None async for outcome in stream])


def fits_in_one_forward(model: Path, images: int, limit_gib: float) -> int:
    """Return the most images, doubled from one, that `transformers` encodes in one forward under the limit."""
    command = [sys.executable, "-m", "bench.seeds_parts.memory", str(model), str(images), str(limit_gib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    counts = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    if not counts:
        raise RuntimeError(f"transformers encoded no image:\n{done.stderr[-2000:]}")
    return counts[-1]


def main() -> None:
    """Encode 1, 2, 4 … images in one forward, printing each number, until memory ends."""
    import torch

    from testing.reference_tower import ReferenceTower, random_patches

    model, images, limit_gib = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tower = ReferenceTower(model, torch.float32)
    values = 3 * tower.geometry.patch_size**2
    tower.rows(tower.pixels(random_patches([Grid(1, 4, 4)], values)), [Grid(1, 4, 4)])  # warm up
    most = psutil.Process().memory_info().vms + int(limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    count = 1
    while count <= images:
        grids = [GRID] * count
        try:
            tower.rows(tower.pixels(random_patches(grids, values)), grids)
        except (MemoryError, RuntimeError) as error:
            print(json.dumps({"ended": str(error)[:200]}), file=sys.stderr)
            os._exit(0)  # what is left of the memory may not suffice to end in order
        print(count, flush=True)
        count *= 2


if __name__ == "__main__":
    main()
