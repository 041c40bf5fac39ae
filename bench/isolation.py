"""What decoding in processes of its own costs: the same files by both decoders in turns, and decoders that are killed.

A round decodes every file as the server does, JPEGs two at a time by DALI, others one at a time by Pillow, first in
this process and then in those of its own. What the machine does meanwhile slows both. Figures are medians.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import psutil
from torch import Tensor

from bench.harness.benchmark import Benchmark, Figure
from bench.harness.tables import table
from encoder_service.engine.allocator import keep_freed_memory
from encoder_service.image.decode import Decoder
from encoder_service.image.isolated import IsolatedDecoder
from encoder_service.image.source import Source
from testing.photos import photo

# By what decodes them: as photos come, and screenshots and documents.
FILES = {
    "JPEG": [(960, 1280), (1280, 720), (1280, 960), (1920, 1080), (3000, 2000)],
    "PNG": [(1280, 720), (1920, 1080)],
    "WEBP": [(1280, 720), (1920, 1080)],
}
BATCH = 2  # of JPEGs: what the server gives DALI at a time on the CPU
BENCHMARK = Benchmark(
    "isolation",
    "What does decoding in processes of its own cost?",
    (
        Figure(
            "decoder_isolation_percent",
            "time to decode all files, beyond that in the server's process",
            "%",
            target="<= 10",
            summary="time that decoding takes more in a process without files and network",
        ),
        *(
            Figure(f"{kind.lower()}_percent", f"the same, {kind} only ({by})", "%")
            for kind, by in (("JPEG", "DALI"), ("PNG", "Pillow"), ("WEBP", "Pillow"))
        ),
        Figure("overhead_ms", "of a file of 16×16 pixels: what every request costs more", "ms"),
        Figure("restart_ms", "from a decoder's death to its next pixels", "ms", target="<= 1000"),
        Figure("start_s", "until the first process can decode", "s"),
        Figure("memory_mb", "memory of all decoder processes that nothing else has", "MB"),
    ),
    limit_s=60,
    quick=("--rounds", "3"),
)


def main() -> None:
    """Measure, print the table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args()
    keep_freed_memory()
    began = time.perf_counter()
    isolated = IsolatedDecoder(threads=1)
    isolated.start()
    start_s = time.perf_counter() - began
    try:
        figures = {"start_s": start_s, **measure(Decoder(threads=1), isolated, given.rounds)}
    finally:
        isolated.close()
    if given.json:
        print(json.dumps(figures))


def measure(here: Decoder, isolated: IsolatedDecoder, rounds: int) -> dict[str, Any]:
    """Decode in turns, print what each kind of file takes; return the figures."""
    spent: dict[str, tuple[list[float], list[float]]] = {}
    for kind, sizes in FILES.items():
        sources = [source_of(here, photo(*size, seed, kind)) for seed, size in enumerate(sizes)]
        spent[kind] = in_turns([partial(decode, each, sources) for each in (here, isolated)], rounds)
    small = source_of(here, photo(16, 16, 1, "PNG"))
    alone = in_turns([partial(decode, each, [small]) for each in (here, isolated)], 8 * rounds)
    rows: list[list[str | float]] = [
        [kind, len(FILES[kind]), median(inside) * 1e3, median(apart) * 1e3]
        for kind, (inside, apart) in spent.items()
    ]
    whole = [sum(median(times[which]) for times in spent.values()) for which in (0, 1)]
    return {
        "decoder_isolation_percent": percent(*whole),
        **{f"{kind.lower()}_percent": percent(*map(median, times)) for kind, times in spent.items()},
        "overhead_ms": (median(alone[1]) - median(alone[0])) * 1e3,
        "restart_ms": median(restart_s(isolated, small) for _ in range(5)) * 1e3,
        "memory_mb": sum(each.memory_full_info().uss for each in processes()) / 1e6,
        "tables": [table("Milliseconds for all files", ["files", "count", "in process", "isolated"], rows)],
    }


def source_of(decoder: Decoder, file: bytes) -> Source:
    """Return a file with its header read, as validation hands it over."""
    source = decoder._source(file)
    assert isinstance(source, Source), source
    return source


def decode(decoder: Decoder, sources: Sequence[Source]) -> None:
    """Decode all as the server does."""
    batched = [source for source in sources if decoder.batches(source)]
    for first in range(0, len(batched), BATCH):
        assert None not in decoder.decode_batch(batched[first : first + BATCH])
    for source in sources:
        if not decoder.batches(source):
            assert isinstance(decoder.decode_one(source), Tensor)


def in_turns(works: Sequence[Callable[[], None]], rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds that each of two took, in each round but the first."""
    spent: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        for work, seconds in zip(works, spent, strict=True):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return spent[0][1:], spent[1][1:]


def percent(inside: float, apart: float) -> float:
    """Return by how much the second is longer."""
    return (apart / inside - 1) * 100


def restart_s(isolated: IsolatedDecoder, source: Source) -> float:
    """Kill the decoders; return how long it takes until pixels come again, the image that noticed it included."""
    for each in processes():
        os.kill(each.pid, signal.SIGKILL)
    began = time.perf_counter()
    while not isinstance(isolated.decode_one(source), Tensor):
        pass
    return time.perf_counter() - began


def processes() -> list[psutil.Process]:
    """Return the decoder processes, without the parent that has nothing of its own."""
    return [each for each in psutil.Process().children(recursive=True) if each.name() == "decoder"]


if __name__ == "__main__":
    main()
