"""A chat of eight rounds with one new image each: what the tower does in each round, all images again against ours.

"All again" is what a server does that keeps no embeddings, or keys them by all pixels of a request: each round encodes
the whole set in one batch, here with our own tower in this process. Ours is a real server: a round submits and fetches
all images so far. Same weights, same threads, one after the other; only the tower's time counts on both sides.
"""

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.budget import Budget
from bench.tower.bare_engine import tower_seconds
from bench.tower.cases import full_checkpoint
from encoder_service.config import Config
from encoder_service.engine.model import load_model
from prefill_client import EncoderClient, RowRequest
from testing.photos import photo
from testing.server_process import HALF_THE_CORES, running

BENCHMARK = Benchmark(
    "chat",
    "What does per-image caching give in a chat of eight rounds, one new image each?",
    (
        Figure("whole_set_vit_ms", "ViT in round 8, all images encoded again", "ms"),
        Figure("ours_vit_ms", "ViT in round 8, ours", "ms"),
        Figure(
            "round_8_ratio",
            "all again / ours",
            target=">= 5",
            compare="SGLang, one H200: 90 → 17 ms at 720p, 282 → 39 at 1080p, 698 → 88 at 2560×1440 (PR 22038)",
            summary="ViT time in round 8 of a chat, all images again / ours",
        ),
        Figure("whole_set_encodes", "images encoded in eight rounds, all again"),
        Figure("ours_encodes", "images encoded in eight rounds, ours", target="<= 8"),
    ),
    limit_s=540,
    quick=("--side", "128"),
)

BUDGET_S = 240.0
ROUNDS = 8


async def ours_ms(client: EncoderClient, files: Sequence[bytes]) -> tuple[float, int]:
    """Return the milliseconds of the server's tower in this round, and how many images it encoded."""
    submitted = await client.submit(files)
    spent: list[float] = []
    async with client.fetch([RowRequest(image.digest) for image in submitted]) as outcomes:
        async for rows in outcomes:
            if rows.error is not None:
                raise rows.error
            if "vit" in rows.stage_ms:
                spent.append(rows.stage_ms["vit"])
    return sum(spent), len(spent)


async def chat(side: int, folder: Path, budget: Budget) -> dict[str, float]:
    """Run all rounds both ways and return the figures; a first image warms both up."""
    path = full_checkpoint("qwen3_vl")
    files = [photo(side, side, seed) for seed in range(ROUNDS + 1)]
    ours: list[tuple[float, int]] = []
    settings: dict[str, Any] = {"store_host_gib": 0.5, "torch_threads": HALF_THE_CORES}
    with running(path, log=folder / "server.log", **settings) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            await ours_ms(client, files[-1:])
            ours = [await ours_ms(client, files[:n]) for n in range(1, ROUNDS + 1)]
    model = load_model(Config(model=path, device="cpu", torch_threads=HALF_THE_CORES))
    image_s = tower_seconds(model, files[-1:])
    theirs = [math.nan] * ROUNDS
    if budget.affords("all again in rounds 1 to 7", image_s * ROUNDS * (ROUNDS + 1) // 2):
        theirs = [tower_seconds(model, files[:n]) * 1e3 for n in range(1, ROUNDS)]
    theirs = [*theirs[: ROUNDS - 1], tower_seconds(model, files[:ROUNDS]) * 1e3]
    print(f"{side}x{side}, 27 blocks, {HALF_THE_CORES} threads, milliseconds of ViT")
    print(f"{'round':>6} {'all again':>10} {'ours':>8} {'encoded':>8}")
    for number, (all_ms, (our_ms, encoded)) in enumerate(zip(theirs, ours, strict=True), 1):
        print(f"{number:>6} {all_ms:>10.0f} {our_ms:>8.0f} {encoded:>8}")
    return {
        "side": side,
        "whole_set_vit_ms": theirs[-1],
        "ours_vit_ms": ours[-1][0],
        "round_8_ratio": theirs[-1] / ours[-1][0],
        "whole_set_encodes": ROUNDS * (ROUNDS + 1) // 2,
        "ours_encodes": sum(encoded for _, encoded in ours),
    }


def main() -> None:
    """Run the chat, print the table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--side", type=int, default=448, help="pixels of an image's side (default %(default)s)"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args()
    torch.set_num_threads(HALF_THE_CORES)
    budget = Budget(given.budget_s)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(chat(given.side, Path(folder), budget))
    if given.json:
        rounded = {name: round(value, 3) for name, value in figures.items()}
        print(json.dumps({**rounded, "left_out": budget.left_out}))


if __name__ == "__main__":
    main()
