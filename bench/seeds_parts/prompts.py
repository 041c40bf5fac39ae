"""Time to first token over the number of images, and over the rounds of a chat, with the reference engine."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from bench.harness.benchmark import table
from bench.overlap import CHUNK_TOKENS, SIDE, TEXT, TEXT_LAYERS, VISION_LAYERS, Bench, first_token, new_photos
from prefill_client import EncoderClient
from prefill_reference.chat import Chat
from prefill_reference.engine import Engine
from prefill_reference.language_model import load_language_model
from prefill_reference.prefix import PrefixCache
from testing.checkpoints import write_checkpoint
from testing.server_process import HALF_THE_CORES, ServerProcess, running

COUNTS = (1, 2, 4, 8, 16, 32, 64)
FEW = 8  # prompts of few images vary more
CHAT_ROUNDS = 8
TIMES = 3
"""How often prompts of few images, and chats, are measured."""
CACHED_TOKENS = 100_000
Figures = dict[str, Any]


async def prompts(folder: Path, counts: Sequence[int], rounds: int, times: int) -> Figures:
    """Measure both on one server and one engine, each with half of the cores."""
    model = write_checkpoint(folder / "prompts", depth=VISION_LAYERS, text_layers=TEXT_LAYERS, text=TEXT)
    torch.set_num_threads(HALF_THE_CORES)
    language_model = load_language_model(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    settings: dict[str, Any] = {"store_host_gib": 0.5, "threads": HALF_THE_CORES}
    with running(model, batch_patches=(SIDE // 16) ** 2, **settings) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            bench = Bench(client, language_model, tokenizer)
            await bench.overlap(new_photos(0, 1))  # warm up
            figures = await first_tokens(bench, counts, times)
            return figures | await chats(client, bench.engine, tokenizer, server, rounds, times)


async def first_tokens(bench: Bench, counts: Sequence[int], times: int) -> Figures:
    """Return the time to first token for each number of new images: encode first, and overlapped."""
    rows: list[tuple[float, ...]] = []
    seed = 1
    for images in counts:
        serial, overlapped = [], []
        for _ in range(times if images <= FEW else 1):
            overlap_ms, prefilled = await bench.overlap(new_photos(seed, images))
            serial.append(await bench.serial(new_photos(seed + 1, images), prefilled.layout))
            overlapped.append(overlap_ms)
            seed += 2
        rows.append((images, median(serial), median(overlapped), median(serial) / median(overlapped)))
    heads = ("images", "encode first, ms", "overlapped, ms", "encode first / overlapped")
    return {
        "ttft_overlapped_ms": {f"images_{row[0]}": round(row[2], 1) for row in rows},
        "ttft_ratio": {f"images_{row[0]}": round(row[3], 3) for row in rows},
        "tables": [table("Time to first token", heads, rows)],
    }


async def chats(
    client: EncoderClient, engine: Engine, tokenizer: Any, server: ServerProcess, rounds: int, times: int
) -> Figures:
    """Return the tower's time, the encodes and the time to first token in each round of a chat, as medians."""
    tower: list[list[float]] = [[] for _ in range(rounds)]
    encodes: list[list[float]] = [[] for _ in range(rounds)]
    first: list[list[float]] = [[] for _ in range(rounds)]
    for number in range(times):
        chat = Chat(client, engine, tokenizer, chunk_tokens=CHUNK_TOKENS, prefixes=PrefixCache(CACHED_TOKENS))
        messages: list[dict[str, Any]] = []
        for at in range(rounds):
            (image,) = new_photos(500 + 20 * number + at, 1)
            parts = [{"type": "image", "image": image}, {"type": "text", "text": f"And in picture {at}?"}]
            messages.append({"role": "user", "content": parts})
            before = server.metrics()
            first_ms, prefilled = await first_token(chat, messages)
            first[at].append(first_ms)
            now = server.metrics()
            grown = {
                name: now.total(name) - before.total(name)
                for name in ("device_busy_seconds_total", "encoded_images_total")
            }
            tower[at].append(1000 * grown["device_busy_seconds_total"])
            encodes[at].append(grown["encoded_images_total"])
            tokens = [token async for token in chat.decode(prefilled, max_tokens=4)]
            answer = tokenizer.decode(tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
        chat.close()
    rows = [(at + 1, median(tower[at]), max(encodes[at]), median(first[at])) for at in range(rounds)]
    return {
        "chat_tower_ms": {f"round_{row[0]}": round(row[1], 1) for row in rows},
        "chat_ttft_ms": {f"round_{row[0]}": round(row[3], 1) for row in rows},
        "chat_tower_last_over_first": rows[-1][1] / rows[0][1],
        "chat_most_encodes_a_round": max(row[2] for row in rows),
        "chat_tables": [
            table(
                "A chat with one new image a round",
                ("round", "tower, ms", "encodes", "first token, ms"),
                rows,
            )
        ],
    }
