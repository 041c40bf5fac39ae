"""Three designs on the same tower, the same language model and the same prompt: time to first token of each.

- whole set first: all images are decoded, preprocessed and encoded in one batch, then the prompt is prefilled;
- chunk by chunk: before a chunk is prefilled, the images that overlap it are encoded, each by itself;
- ours: a server beside the language model, over gRPC and shared memory.

The first two are published designs of language servers, built here of our own parts ("ours in their design"): in this
process, one device for both models, no transport at all. A device is half of this machine's cores, so ours has two, as
a deployment with an encoder beside its language model has. What one device alone could win is not shown.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
import transformers

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.budget import Budget
from bench.overlap import (
    CHUNK_TOKENS,
    SIDE,
    TEXT,
    TEXT_LAYERS,
    VISION_LAYERS,
    Bench,
    image_at_a_time,
    new_photos,
)
from bench.tower.bare_engine import patches_of
from encoder_service.config import Config
from encoder_service.engine.model import Model, load_model
from prefill_client import Chunk, EncoderClient, Layout, plan
from prefill_client.reference.engine import Engine
from prefill_client.reference.language_model import load_language_model
from testing.checkpoints import write_checkpoint
from testing.server_process import HALF_THE_CORES

BENCHMARK = Benchmark(
    "designs",
    "How do three designs compare on the same tower?",
    (
        Figure("whole_set_ttft_ms", "whole set first, one device, in process", "ms"),
        Figure("chunk_aware_ttft_ms", "chunk by chunk, one device, in process", "ms"),
        Figure("ours_ttft_ms", "ours: an encoder beside the language model", "ms"),
        Figure("whole_set_over_ours", "whole set first / ours"),
        Figure("chunk_aware_over_ours", "chunk by chunk / ours"),
    ),
    limit_s=300,
    quick=("--rounds", "1", "--images", "4"),
)

BUDGET_S = 200.0
DESIGNS = ("whole_set", "chunk_aware", "ours")


class OneDevice:
    """Tower and language model in one process, one after the other."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine

    def ttft_ms(self, files: Sequence[bytes], layout: Layout, *, whole_set: bool) -> float:
        """Return the milliseconds until the last chunk is prefilled."""
        began = time.perf_counter()
        rows = dict(enumerate(self.encode(files))) if whole_set else {}
        geometry = self._model.processor.geometry
        prompt = self._engine.start(layout, [geometry.grid(SIDE, SIDE)] * len(files))
        for chunk in plan(layout, CHUNK_TOKENS):
            for image in _images_of(chunk):
                if image not in rows:
                    rows |= {image: self.encode([files[image]])[0]}
            parts = [rows[w.image][w.row_begin : w.row_end] for w in chunk.windows]
            self._engine.prefill(prompt, chunk, parts)
        return (time.perf_counter() - began) * 1e3

    def encode(self, files: Sequence[bytes]) -> list[torch.Tensor]:
        """Decode, preprocess and encode files in one batch."""
        return self._model.tower.encode(*patches_of(self._model, files))


def _images_of(chunk: Chunk) -> Iterator[int]:
    return (window.image for window in chunk.windows)


async def measure(folder: Path, rounds: int, images: int, budget: Budget) -> dict[str, list[float]]:
    """Alternate the designs, each with images of its own, and return the milliseconds of every round."""
    path = write_checkpoint(folder / "checkpoint", depth=VISION_LAYERS, text_layers=TEXT_LAYERS, text=TEXT)
    language_model = load_language_model(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = load_model(Config(model=path, device="cpu", torch_threads=HALF_THE_CORES))
    spent: dict[str, list[float]] = {design: [] for design in DESIGNS}
    with image_at_a_time(path, folder / "server.log") as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            bench = Bench(client, language_model, tokenizer)
            alone = OneDevice(model, bench.engine)
            while len(spent["chunk_aware"]) <= rounds:
                number, began = len(spent["chunk_aware"]), time.monotonic()
                photos = [new_photos(3 * number + design, images) for design in range(len(DESIGNS))]
                ours_ms, prefilled = await bench.overlap(photos[2])
                layout = prefilled.layout
                spent["ours"].append(ours_ms)
                spent["whole_set"].append(alone.ttft_ms(photos[0], layout, whole_set=True))
                spent["chunk_aware"].append(alone.ttft_ms(photos[1], layout, whole_set=False))
                if number == 0:
                    rounds = budget.count("rounds", rounds, time.monotonic() - began)
    return {design: times[1:] for design, times in spent.items()}  # the first warms up


def summary(spent: dict[str, list[float]]) -> dict[str, float]:
    """Return medians, and ratios taken inside each round."""
    figures = {f"{design}_ttft_ms": median(times) for design, times in spent.items()}
    for design in DESIGNS[:2]:
        ratios = [theirs / ours for theirs, ours in zip(spent[design], spent["ours"], strict=True)]
        figures[f"{design}_over_ours"] = median(ratios)
    return figures


def main() -> None:
    """Measure, print the table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--images", type=int, default=16, help="images of the prompt (default %(default)s)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(HALF_THE_CORES)
    budget = Budget(given.budget_s)
    with tempfile.TemporaryDirectory() as folder:
        spent = asyncio.run(measure(Path(folder), given.rounds, given.images, budget))
    print(f"{given.images} images of {SIDE}x{SIDE}, chunks of {CHUNK_TOKENS} tokens, ms to the first token")
    for design, times in spent.items():
        print(f"{design:<14}" + "".join(f"{ms:9.0f}" for ms in times))
    if given.json:
        rounded = {name: round(value, 3) for name, value in summary(spent).items()}
        print(json.dumps({**rounded, "left_out": budget.left_out}))


if __name__ == "__main__":
    main()
