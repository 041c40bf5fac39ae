"""Measures videos: overlap within a clip, a second question, a longer clip, memory by length, cost of decoding.

The server is a real process; this process is the prefill side. Each has half the cores. Every round has a new clip. The
second question is the next turn of the same chat, so rows and KV cache are kept. Decoding is measured with a tower of
published size, on two pairs of a 360p clip. Memory is the peak of the server and its decoder processes, for a clip of
one minute and for one of ten.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures
from bench.harness.memory import peak_bytes
from bench.overlap import TEXT, TEXT_LAYERS, VISION_LAYERS, first_token
from encoder_contract.video import VideoSettings
from prefill_client import EncoderClient, RowRequest, Video, read_videos
from prefill_reference.chat import Chat
from prefill_reference.engine import Engine
from prefill_reference.language_model import load_language_model
from prefill_reference.prefix import PrefixCache
from testing.checkpoints import write_checkpoint
from testing.clips import clip
from testing.server_process import HALF_THE_CORES, ServerProcess, running

BENCHMARK = Benchmark(
    "video",
    "What does a video cost?",
    (
        Figure("ttft_ms", "time to first token, overlapped", "ms"),
        Figure("serial_ms", "time to first token, all pairs first", "ms"),
        Figure("ttft_serial_over_overlapped", "all pairs first / overlapped", target=">= 1.5"),
        Figure(
            "ttft_over_longer", "overlapped / the longer of encode and prefill, which no overlap can beat"
        ),
        Figure(
            "second_question_ratio", "time to first token, first question / second question", target=">= 5"
        ),
        Figure("extended_encoded_over_new", "pairs encoded for the longer clip / new pairs", target="<= 1"),
        Figure("memory_ratio", "memory of the server, clip of 10 minutes / of 1 minute", target="<= 1.2"),
        Figure("decode_over_encode", "decode / encode of a pair of frames", target="<= 0.15"),
    ),
    limit_s=480,
    dry_run=("--rounds", "1", "--shrink", "10"),
)

CHUNK_TOKENS = 256
ROUNDS = 3
# Pixels of all frames. A pair of the clip has 80 tokens.
SIZE = {"size": {"shortest_edge": 4096, "longest_edge": 1 << 26}}
DECODED_PAIRS = 2
WAIT_S = 300.0  # on a busy machine, the tower of published size takes a minute for a pair


def one(seed: int, seconds: int, *, width: int = 320, height: int = 256, fps: float = 10.0) -> bytes:
    """Return a clip, a different one for each seed."""
    return clip("mp4", frames=int(seconds * fps), fps=fps, width=width, height=height, seed=seed)


def question(file: bytes, text: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt about a video."""
    return [{"role": "user", "content": [{"type": "video", "video": file}, {"type": "text", "text": text}]}]


async def rows_of(client: EncoderClient, file: bytes, settings: VideoSettings, pairs: int = 0) -> Video:
    """Fetch the rows of a video, or of its first pairs. Raises the first error."""
    (video,) = await read_videos(client, [file], settings)
    if not isinstance(video, Video):
        raise video
    images = video.images[: pairs or None]
    for answer in await client.submit(images):
        if answer.error is not None:
            raise answer.error
    requests = [RowRequest.of(image) for image in images]
    async with client.fetch(requests, timeout_s=WAIT_S) as outcomes:
        async for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
    return video


async def first_tokens(model: Path, server: ServerProcess, rounds: int, seconds: int) -> dict[str, Any]:
    """Return the times to first token: with overlap, without it, and for the second question."""
    language_model = load_language_model(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    settings = VideoSettings.from_folder(model)
    overlapped, alone, prefill, second, pairs = [], [], [], [], 0
    async with await EncoderClient.connect(server.endpoint) as client:
        engine = Engine(language_model, row_width=client.description.width)
        for number in range(1 + rounds):  # the first round warms up
            files = [one(3 * number + way, seconds) for way in range(2)]
            chat = Chat(
                client,
                engine,
                tokenizer,
                chunk_tokens=CHUNK_TOKENS,
                prefixes=PrefixCache(100_000),
                videos=settings,
            )
            messages = question(files[0], "What happens?")
            first_ms, prefilled = await first_token(chat, messages)
            tokens = [token async for token in chat.decode(prefilled, max_tokens=4)]
            answer = {"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)}
            again = [*messages, answer, {"role": "user", "content": "And then?"}]
            second_ms, _ = await first_token(chat, again)
            began = time.monotonic()
            await rows_of(client, files[1], settings)
            rows_ms = (time.monotonic() - began) * 1000
            prefill_ms, _ = await first_token(chat, question(files[1], "What happens?"))
            chat.close()
            if number:
                overlapped.append(first_ms)
                alone.append(rows_ms)
                prefill.append(prefill_ms)
                second.append(second_ms)
            pairs = len(prefilled.images)
    rounds_ms = list(zip(overlapped, alone, prefill, strict=True))
    return {
        "pairs": pairs,
        "ttft_ms": median(overlapped),
        "serial_ms": median(r + p for _, r, p in rounds_ms),
        "ttft_serial_over_overlapped": median((r + p) / o for o, r, p in rounds_ms),
        "rows_ms": median(alone),
        "prefill_ms": median(prefill),
        "ttft_over_longer": median(o / max(r, p) for o, r, p in rounds_ms),
        "second_ms": median(second),
        "second_question_ratio": median(o / s for s, o in zip(second, overlapped, strict=True)),
    }


async def memory_ratio(model: Path, server: ServerProcess, minutes: tuple[float, float]) -> dict[str, Any]:
    """Return the ratio of the server's peak memory during a long clip to that during a short one."""
    settings = VideoSettings.from_folder(model)
    peaks = []
    async with await EncoderClient.connect(server.endpoint) as client:
        # A first clip of each length starts the decoder process and fills the caches.
        for number, length in enumerate((minutes[0], *minutes)):
            file = one(900 + number, round(60 * length), width=160, height=96)
            with peak_bytes(server.process.pid) as peak:
                await rows_of(client, file, settings)
            peaks.append(peak())
    return {"memory_short_bytes": peaks[1], "memory_ratio": peaks[2] / peaks[1]}


async def extended(model: Path, server: ServerProcess, seconds: int) -> dict[str, Any]:
    """Send a clip, then the same clip ten seconds longer; return the numbers of added and of encoded pairs.

    The model samples by rate, so the longer clip has all frames of the shorter one, and more.
    """
    settings = VideoSettings.from_folder(model)
    async with await EncoderClient.connect(server.endpoint) as client:
        short = await rows_of(client, one(960, seconds), settings)
        before = server.encodes()
        longer = await rows_of(client, one(960, seconds + 10), settings)
    new = len(longer.images) - len(short.images)
    return {"extended_new_pairs": new, "extended_encoded_over_new": (server.encodes() - before) / new}


async def decoding(model: Path, server: ServerProcess, pairs: int) -> dict[str, Any]:
    """Return the times of decoding and encoding a pair of a 360p clip."""
    settings = VideoSettings.from_folder(model)
    async with await EncoderClient.connect(server.endpoint) as client:
        await rows_of(client, one(950, 5, width=320, height=256), settings, 1)  # warm up
        before = server.metrics()
        await rows_of(client, one(951, 20, width=640, height=360, fps=30.0), settings, pairs)
        after = server.metrics()

    def spent(stage: str) -> float:
        seconds = [each.total("stage_seconds_sum", stage=stage) for each in (before, after)]
        return (seconds[1] - seconds[0]) / pairs * 1000

    decode_ms, encode_ms = spent("decode"), spent("vit")
    return {"decode_ms": decode_ms, "encode_ms": encode_ms, "decode_over_encode": decode_ms / encode_ms}


def run(folder: Path, rounds: int, shrink: int) -> dict[str, Any]:
    """Measure everything. With `shrink`, clips are shorter by this factor, and decoding is beside a small tower."""
    small = write_checkpoint(folder / "small", depth=VISION_LAYERS, text_layers=TEXT_LAYERS, text=TEXT)
    tower = write_checkpoint(folder / "tower", vision_only=shrink == 1)
    for model in (small, tower):
        (model / "video_preprocessor_config.json").write_text(json.dumps(SIZE))
    by_rate = write_checkpoint(folder / "by_rate", "qwen2_5_vl")
    settings: dict[str, Any] = {"store_host_gib": 0.5, "threads": HALF_THE_CORES, "video": "yes"}
    found: dict[str, Any] = {}
    with running(small, log=folder / "small.log", batch_patches=512, **settings) as server:
        found |= asyncio.run(first_tokens(small, server, rounds, 60 // shrink))
        found |= asyncio.run(memory_ratio(small, server, (1 / shrink, 10 / shrink)))
    with running(by_rate, log=folder / "by_rate.log", **settings) as server:
        found |= asyncio.run(extended(by_rate, server, 60 // shrink))
    with running(tower, log=folder / "tower.log", **settings) as server:
        found |= asyncio.run(decoding(tower, server, DECODED_PAIRS))
    return {**found, "rounds": rounds}


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of times to first token (default %(default)s)"
    )
    parser.add_argument(
        "--shrink", type=int, default=1, help="clips are so many times shorter (default %(default)s)"
    )
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(HALF_THE_CORES)
    with tempfile.TemporaryDirectory() as folder:
        print_figures(run(Path(folder), args.rounds, args.shrink), args)


if __name__ == "__main__":
    main()
