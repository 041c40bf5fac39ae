"""How many large images one prompt may have: server memory over a prompt whose embeddings exceed the store many times.

A real server with a tower of the published width and three blocks (activations do not grow with depth), and a client
that prefetches chunk by chunk and does nothing with the rows. Beside it, what `transformers`' tower of the same weights
needs for one image and for three in one forward, as a whole-set-first design runs it.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic

import psutil
import torch

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.budget import Budget
from bench.harness.peak_memory import peak_bytes
from encoder_contract.geometry import Grid
from prefill_client import EncoderClient, PrefetchSession, RowRequest, expand_prompt, plan
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.reference_tower import ReferenceTower, random_patches
from testing.server_process import ServerProcess, running

BENCHMARK = Benchmark(
    "memory",
    "How many images until memory runs out?",
    (
        Figure("images", "2560×1440 images in one prompt, all with their rows"),
        Figure("delivered", "of which delivered"),
        Figure("memory_mib", "server memory at its highest", "MiB"),
        Figure("growth_mib_per_image", "server memory per image more, second half of the prompt", "MiB"),
        Figure(
            "transformers_mib_per_image",
            "`transformers`, whole set in one forward, per image more",
            "MiB",
            compare="out of memory at 20 → 51 images of 2560×1440 on one H200 (PR 22038)",
        ),
        Figure("embeddings_over_store", "bytes of all embeddings / bytes of the store"),
        Figure("encodes_per_image", "encodes per image"),
    ),
    limit_s=480,
    quick=("--images", "6", "--width", "640", "--height", "360"),
)

DEPTH, STORE_GIB = 3, 0.5
BUDGET_S = 300.0
# Half of the prompt has to fill the store before growth can be seen.
SHARE_OF_PROMPT, LEAST_IMAGES = 0.6, 4
FORWARDS = (1, 1, 3)  # images in each forward of `transformers`
THEIRS_OVER_OURS = 2.0  # of an image; an estimate on the safe side
PLACEHOLDER = 0
MIB = 1 << 20


async def prefill(
    client: EncoderClient, files: Sequence[bytes], server: ServerProcess
) -> list[tuple[int, int]]:
    """Take the prompt's rows, a chunk an image; return, after each, the images done and the server's MiB."""
    submitted = await client.submit(files)
    layout = expand_prompt([PLACEHOLDER] * len(files), PLACEHOLDER, [image.tokens for image in submitted])
    images = [RowRequest(image.digest) for image in submitted]
    row_bytes = client.description.width * 2
    fetch = partial(client.fetch, request_id="album", timeout_s=600)
    seen = []
    async with PrefetchSession(
        fetch, plan(layout, submitted[0].tokens), images, row_bytes=row_bytes
    ) as session:
        async for ready in session:
            done = sum(span.end <= ready.chunk.end for span in layout.spans)
            assert all(rows.error is None for rows in ready.rows)
            seen.append((done, own_mib(server)))
    return seen


def own_mib(server: ServerProcess) -> int:
    """Return the server's memory without the store, which is shared memory of a fixed size."""
    memory = psutil.Process(server.process.pid).memory_info()
    return int(memory.rss - memory.shared) // MIB


async def serve(
    model: Path, files: Sequence[bytes], size: tuple[int, int], budget: Budget
) -> dict[str, float]:
    """Run the prompt, as much of it as there is time for, against a server and return the figures.

    The last file is no part of it: how long it takes tells how long the others will.
    """
    with running(model, store_host_gib=STORE_GIB, store_prefault="no", device="cpu") as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            began = monotonic()
            await prefill(client, files[-1:], server)
            image_s = monotonic() - began
            files = files[
                : budget.count("images", len(files) - 1, image_s, share=SHARE_OF_PROMPT, least=LEAST_IMAGES)
            ]
            seen = await prefill(client, files, server)
            geometry, width = client.description.geometry, client.description.width
        encoded = await asyncio.to_thread(server.encodes)
    embedding_bytes = geometry.tokens(geometry.grid(*size)) * width * 2
    warm, end = len(files) // 2, len(files)
    growth = max(mib for _, mib in seen) - max(mib for done, mib in seen if done <= warm)
    return {
        "images": end,
        "delivered": seen[-1][0],
        "memory_mib": max(mib for _, mib in seen),
        "growth_mib_per_image": growth / (end - warm),
        "embeddings_over_store": end * embedding_bytes / (STORE_GIB * (1 << 30)),
        "encodes_per_image": (encoded - 1) / end,
    }


def transformers_mib_per_image(model: Path, grid: Grid) -> float:
    """Return what each image more in one forward adds to the peak, patches in, rows out."""
    reference = ReferenceTower(model, torch.bfloat16)
    peaks = []
    for count in FORWARDS:  # the first warms up
        patches = random_patches([grid] * count, 3 * reference.module.config.patch_size**2)
        peaks.append(peak_bytes(lambda: _forward(reference, patches, [grid] * count)))  # noqa: B023
    return (peaks[2] - peaks[1]) / 2 / MIB


def _forward(reference: ReferenceTower, patches: Sequence[torch.Tensor], grids: Sequence[Grid]) -> None:
    reference.rows(reference.pixels(patches), grids)


def measure(images: int, width: int, height: int, folder: Path, budget: Budget) -> dict[str, float]:
    """Run both sides and return the figures."""
    model = write_checkpoint(folder / "model", depth=DEPTH, vision_only=True)
    files = [photo(width, height, seed) for seed in range(images + 1)]
    began = monotonic()
    figures = asyncio.run(serve(model, files, (width, height), budget))
    image_s = (monotonic() - began) / (figures["images"] + 1)
    if not budget.affords("`transformers`", sum(FORWARDS) * THEIRS_OVER_OURS * image_s):
        return figures
    grid = Grid(1, 2 * round(height / 32), 2 * round(width / 32))
    return figures | {"transformers_mib_per_image": transformers_mib_per_image(model, grid)}


def main() -> None:
    """Measure, print a table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=12, help="images of the prompt (default %(default)s)")
    parser.add_argument("--width", type=int, default=2560, help="pixels (default %(default)s)")
    parser.add_argument("--height", type=int, default=1440, help="pixels (default %(default)s)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args()
    budget = Budget(given.budget_s)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(given.images, given.width, given.height, Path(folder), budget)
    print(f"{given.width}x{given.height}, {DEPTH} blocks, a store of {STORE_GIB} GiB")
    for name, value in figures.items():
        print(f"{name:<28}{value:>12,.2f}")
    if given.json:
        rounded = {name: round(value, 3) for name, value in figures.items()}
        print(json.dumps({**rounded, "left_out": budget.left_out}))


if __name__ == "__main__":
    main()
