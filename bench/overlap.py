"""Measures overlap within a request: time to first token with encode and prefill in parallel, and in sequence.

The server is a real process; this process is the prefill side. Each has half the cores. Every round uses new images,
so nothing is cached except where the code says so. The ideal is max(encode of all, prefill of all) + encode of the
first chunk's images, each measured alone in the same round.

Overlap needs all cores at the same time, but encode and prefill alone do not. So on a busy machine the ratios mean
nothing. Each round waits until other processes are quiet (for a limited time), and records the CPU time that they used
during the round. Medians are over the quiet rounds if there are enough of them; the JSON has their number.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import transformers

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from bench.harness.calls import ms_of, submit_and_fetch
from prefill_client import Chunk, EncoderClient, FetchedRows, Layout, RowRequest, Trace, plan, read
from prefill_reference.chat import Chat, Prefilled
from prefill_reference.engine import Embedded, Engine, Prompt
from prefill_reference.language_model import LanguageModel, load_language_model
from testing.checkpoints import write_checkpoint
from testing.photos import photo
from testing.server_process import HALF_THE_CORES, running

BENCHMARK = Benchmark(
    "overlap",
    "What does overlap inside one request give?",
    (
        Figure("ttft_over_ideal", "overlapped / ideal time", target="<= 1.1"),
        Figure(
            "serial_over_overlap",
            "all images first / overlapped",
            target=">= 1.6",
            summary="time to first token of 16 new images: encode all first ÷ overlap with prefill, same cores",
        ),
    ),
    limit_s=270,
    dry_run=("--rounds", "1"),
)

IMAGES, SIDE = 16, 512  # pixels: 1024 patches, 256 tokens each
CHUNK_TOKENS, IMAGES_A_CHUNK = 512, 2
# Encoding an image takes about as long as prefilling its tokens: overlap gains most then, and is hardest to reach.
VISION_LAYERS, TEXT_LAYERS = 8, 4
# As in models of real size, the cost of a chunk depends on its tokens, and attention to earlier tokens is a small part.
# (With the tiny model's own MLP the last chunk took five times as long as the first: no order of work could reach the
# ideal.)
TEXT = {"intermediate_size": 10240}
ROUNDS = 5
# If all other processes together use less than this share of one core, both of our processes have their cores.
QUIET_CORES = 0.15
QUIET_WAIT_S, QUIET_LOOK_S = 10.0, 0.5
ENOUGH_ROUNDS = 3
MAX_S = 180.0  # for all rounds


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds of one round."""

    encode: float
    first_chunk_encode: float
    prefill: float
    serial: float
    overlap: float
    others_cores: float  # used by other processes during the round

    @property
    def quiet(self) -> bool:
        """Whether other processes were idle."""
        return self.others_cores <= QUIET_CORES

    @property
    def ideal(self) -> float:
        """The best time of any schedule, up to the first chunk's prefill."""
        return max(self.encode, self.prefill) + self.first_chunk_encode


class Bench:
    """A language model and a client, and the ways to run a prompt with them."""

    def __init__(self, client: EncoderClient, language_model: LanguageModel, tokenizer: Any) -> None:
        self.client = client
        self.engine = Engine(language_model, row_width=client.description.width)
        self.chat = Chat(client, self.engine, tokenizer, chunk_tokens=CHUNK_TOKENS)
        self.trace = Trace("overlap")

    async def encode(self, files: Sequence[bytes]) -> float:
        """Return the milliseconds from Submit to the last image's rows."""
        return await ms_of(submit_and_fetch(self.client, files))

    async def overlap(self, files: Sequence[bytes]) -> tuple[float, Prefilled]:
        """Return the milliseconds to the first token's logits, and the prefill; set `trace`."""
        self.trace = Trace("overlap")
        return await first_token(self.chat, question(files), trace=self.trace)

    async def serial(self, files: Sequence[bytes], layout: Layout) -> float:
        """Fetch all rows, then prefill the prompt; return the milliseconds."""
        began = time.monotonic()
        submitted = await self.client.submit(files)
        prompt = self.engine.start(layout, [image.grid for image in submitted if image.grid])
        async with self.client.fetch([RowRequest(image.digest) for image in submitted]) as outcomes:
            rows = {outcome.index: outcome async for outcome in outcomes}
            for chunk in plan(layout, CHUNK_TOKENS):
                embed = partial(self._embed, prompt, chunk)
                embedded = await read([rows[window.image] for window in chunk.windows], embed)
                await asyncio.to_thread(self.engine.run, prompt, chunk, embedded)
        return (time.monotonic() - began) * 1000

    def _embed(self, prompt: Prompt, chunk: Chunk, rows: Sequence[FetchedRows]) -> Embedded:
        """Return the embeddings of a chunk, from the rows of whole images."""
        windows = zip(chunk.windows, rows, strict=True)
        return self.engine.embed(
            prompt, chunk, [image.tensor()[w.row_begin : w.row_end] for w, image in windows]
        )


async def first_token(
    chat: Chat, messages: Sequence[dict[str, Any]], **options: Any
) -> tuple[float, Prefilled]:
    """Return the milliseconds to the first token's logits, and the prefill."""
    began = time.monotonic()
    prefilled = await chat.prefill(messages, **options)
    return (time.monotonic() - began) * 1000, prefilled


def question(files: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the messages of the prompt."""
    images = [{"type": "image", "image": file} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": "What do these show?"}]}]


def new_photos(seed: int, count: int) -> list[bytes]:
    """Return images that no other seed has."""
    return [photo(SIDE, SIDE, 1000 * seed + number) for number in range(count)]


class Others:
    """Measures the CPU time of all processes except ours and our children's, since construction."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = self._cpu_s()

    def cores(self) -> float:
        """Return the mean number of cores. It is clipped at 0: the two clocks tick at different moments."""
        return max(0.0, (self._cpu_s() - self._before) / (time.monotonic() - self._began))

    @staticmethod
    def _cpu_s() -> float:
        ours = psutil.Process()
        times = [process.cpu_times() for process in (ours, *ours.children(recursive=True))]
        total = psutil.cpu_times()
        busy_s = total.user + total.nice + total.system + total.irq + total.softirq
        return float(busy_s - sum(each.user + each.system for each in times))


async def quiet() -> None:
    """Wait until other processes are quiet, for a limited time."""
    until = time.monotonic() + QUIET_WAIT_S
    while time.monotonic() < until:
        others = Others()
        await asyncio.sleep(QUIET_LOOK_S)
        if others.cores() <= QUIET_CORES:
            return


async def measure(bench: Bench, number: int) -> Round:
    """Run a round. Each way of running the prompt has its own images.

    Overlap and serial alternate in running first.
    """
    alone, overlapped, serial = (new_photos(4 * number + way, IMAGES) for way in range(3))
    first = new_photos(4 * number + 3, IMAGES_A_CHUNK)
    others = Others()
    encode_ms = await bench.encode(alone)
    _, cached = await bench.overlap(alone)  # its rows are stored, so prefill runs alone
    serial_ms = await bench.serial(serial, cached.layout) if number % 2 else 0.0
    overlap_ms, _ = await bench.overlap(overlapped)
    serial_ms = serial_ms or await bench.serial(serial, cached.layout)
    prefill_ms = sum(run.prefill_ms for run in cached.runs)
    first_ms = await bench.encode(first)
    return Round(encode_ms, first_ms, prefill_ms, serial_ms, overlap_ms, others.cores())


def summary(all_rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the medians, over the quiet rounds if there are enough of them.

    Each ratio is computed within a round, because rounds differ in speed.
    """
    quiet_rounds = [each for each in all_rounds if each.quiet]
    rounds = quiet_rounds if len(quiet_rounds) >= ENOUGH_ROUNDS else all_rounds
    return {
        "encode_ms": median(r.encode for r in rounds),
        "prefill_ms": median(r.prefill for r in rounds),
        "first_chunk_encode_ms": median(r.first_chunk_encode for r in rounds),
        "ttft_ms": median(r.overlap for r in rounds),
        "serial_ms": median(r.serial for r in rounds),
        "ttft_over_ideal": median(r.overlap / r.ideal for r in rounds),
        "serial_over_overlap": median(r.serial / r.overlap for r in rounds),
        "rounds": len(all_rounds),
        "quiet_rounds": len(quiet_rounds),
        "others_cores": median(r.others_cores for r in rounds),
    }


async def run(folder: Path, rounds: int, trace: Path | None) -> list[Round]:
    """Start a server on a seeded checkpoint and measure until enough rounds were quiet, or for `MAX_S`."""
    model = write_checkpoint(folder / "checkpoint", depth=VISION_LAYERS, text_layers=TEXT_LAYERS, text=TEXT)
    language_model = load_language_model(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    done: list[Round] = []
    settings: dict[str, Any] = {"store_host_gib": 0.5, "threads": HALF_THE_CORES}
    # A batch is one image, so that prefill runs on one image while the next is encoded.
    with running(model, log=folder / "server.log", batch_patches=(SIDE // 16) ** 2, **settings) as server:
        async with await EncoderClient.connect(server.endpoint) as client:
            bench = Bench(client, language_model, tokenizer)
            began = time.monotonic()
            await measure(bench, 0)  # warm up
            round_s = time.monotonic() - began
            until = began + MAX_S - round_s  # the last moment at which another round can start
            while sum(each.quiet for each in done) < rounds and (time.monotonic() < until or not done):
                await quiet()
                done.append(await measure(bench, len(done) + 1))
                if trace and done[-1].overlap == min(each.overlap for each in done):
                    bench.trace.write(trace)
    return done


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="quiet ones (default %(default)s)")
    parser.add_argument("--trace", type=Path, help="write the trace of the fastest overlapped run here")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(HALF_THE_CORES)
    with tempfile.TemporaryDirectory() as folder:
        rounds = asyncio.run(run(Path(folder), args.rounds, args.trace))
    heads = ("encode", "prefill", "first", "ideal", "overlap", "serial", "others, cores")
    rows = [
        (r.encode, r.prefill, r.first_chunk_encode, r.ideal, r.overlap, r.serial, r.others_cores)
        for r in rounds
    ]
    table("Rounds, ms", heads, rows)
    print_figures(summary(rounds), args)


if __name__ == "__main__":
    main()
