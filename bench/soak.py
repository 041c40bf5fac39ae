"""Runs two replicas, an index and clients amid attacks, restarts and faults, which are drawn from a seed.

Clients submit and fetch prompts the whole time. Every image must end in its own rows or one error. Each event happens
once before memory is first measured. At the end all load stops. The benchmark then compares what the replica that was
never restarted holds with what it held after the warm-up: memory, files, threads, pins, uploads, calls, leases.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import transformers

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from testing.chaos import EVENTS, Chaos
from testing.checkpoints import SMALL_IMAGES, write_checkpoint
from testing.redis_servers import redis_server
from testing.replicas import ReplicaProcess, fleet_of
from testing.traffic import Served, Supply, Traffic

BENCHMARK = Benchmark(
    "soak",
    "Does anything get lost, stuck or larger in the long run?",
    (
        Figure(
            "lost",
            "images without an outcome, with other images' rows, or later than their deadline",
            target="<= 0",
        ),
        Figure("crashes", "replicas that ended by themselves", target="<= 0"),
        Figure("hangs", "drains and restarts that did not end", target="<= 0"),
        Figure("leaked_pins", "pins when all is quiet", target="<= 0"),
        Figure("leaked_fds", "files more than before", target="<= 0"),
        Figure("leaked_threads", "threads more than before", target="<= 0"),
        Figure("leaked_leases", "leases in the index when all is quiet", target="<= 0"),
        Figure("rss_growth_percent", "memory more than after the warm-up", "%", target="<= 3"),
    ),
    limit_s=420,
    arguments=("--minutes", "4"),
    dry_run=("--minutes", "0.2", "--events", "flush", "restart"),
)

IDLE_S = 90.0  # longer than a lease, and than the grace period of a fetched image
SPARE_FILES = 4  # for connections between replicas
SPARE_THREADS = (os.cpu_count() or 1) + 4  # asyncio's thread pool grows on demand, up to this bound
MIB = 1 << 20
SETTINGS: dict[str, Any] = {
    "store_host_gib": 0.06,
    "source_gib": 0.05,
    "max_queued_gib": 0.0625,
    "max_queued_images": 256,
    "log_level": "error",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a replica holds at one moment."""

    rss_mib: float
    files: int
    threads: int
    pins: int
    uploads: int
    calls: int

    @classmethod
    def of(cls, replica: ReplicaProcess, index_port: int) -> "Usage":
        """Measure a replica: memory without the store's segment, files without connections to the index.

        The segment has its full size from the start, and the pool of connections never shrinks.
        """
        process, now = psutil.Process(replica.process.process.pid), replica.metrics()
        memory = process.memory_info()
        to_index = sum(each.raddr[1:] == (index_port,) for each in process.net_connections("tcp"))
        return cls(
            (memory.rss - memory.shared) / MIB,
            process.num_fds() - to_index,
            process.num_threads(),
            int(now.total("store_pins")),
            int(now.total("upload_bytes")),
            int(now.total("calls_in_progress")),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no caller holds anything."""
        return not (self.pins or self.uploads or self.calls)


@dataclass
class Run:
    """The outcomes of the clients, and the usage of the first replica."""

    served: list[Served]
    lost: list[str]
    """What `Traffic` found wrong."""
    usages: list[Usage]
    """Of the first replica: after the warm-up, and after each event since."""


async def usage(chaos: Chaos, number: int = 0) -> Usage:
    return await asyncio.to_thread(Usage.of, chaos.replicas[number], chaos.redis.port)


async def run(chaos: Chaos, events: Sequence[str], minutes: float, seed: int) -> Run:
    """Run clients amid events for `minutes`: each event once as a warm-up, then events at random."""
    began = time.monotonic()
    endpoints = [replica.endpoint for replica in chaos.replicas]
    # Few new images at a time, because two cores run two replicas, the clients and an attacker.
    load = Traffic(endpoints, Supply(seed=seed), workers=3, images=4, pause_s=0.05)
    result = Run(load.served, [], [])
    try:
        async with load:
            for name in chaos.rng.sample(events, len(events)):
                await chaos.inject(name)
            chaos.is_warm = True
            result.usages.append(await usage(chaos))
            while time.monotonic() - began < minutes * 60:
                await chaos.inject(chaos.rng.choice(events))
                result.usages.append(await usage(chaos))
                _show_progress(began, minutes, load, chaos)
    except (
        AssertionError,
        TimeoutError,
        KeyError,
    ) as error:  # `Traffic` raises these for an image that went wrong
        result.lost.append(f"{type(error).__name__}: {error}")
    assert result.usages, f"the run ended before the warm-up did: {result.lost}"
    return result


async def at_rest(chaos: Chaos) -> tuple[Usage, int]:
    """Wait until no caller holds anything; return the first replica's usage, and the number of leases in the index."""
    deadline = time.monotonic() + IDLE_S
    while True:
        usages = [await usage(chaos, number) for number in range(len(chaos.replicas))]
        with chaos.redis.client() as client:
            leases = sum(1 for _ in client.scan_iter("*:lease", count=1000))
        if (not leases and all(each.is_idle for each in usages)) or time.monotonic() > deadline:
            return usages[0], leases
        await asyncio.sleep(1)


async def soak(events: Sequence[str], minutes: float, seed: int) -> dict[str, Any]:
    """Run events and clients, print the tables and return the figures."""
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        model = write_checkpoint(Path(folder), preprocessor=SMALL_IMAGES)
        replicas = [ReplicaProcess(model, number, index=redis.url, **SETTINGS) for number in range(2)]
        with fleet_of(replicas):
            began = time.monotonic()
            chaos = Chaos(replicas, redis, random.Random(seed))
            result = await run(chaos, events, minutes, seed)
            took_s, crashes = time.monotonic() - began, chaos.crashes()
            rest, leases = await at_rest(chaos)
    warm = result.usages[0]
    errors = Counter(each.error.partition(":")[0] for each in result.served if each.error)
    for loss in result.lost:
        print(f"lost: {loss}")
    _print_tables(result, rest, {"event": chaos.counts, "error": errors})
    return {
        "lost": len(result.lost),
        "crashes": crashes,
        "hangs": chaos.hangs,
        "leaked_pins": rest.pins + rest.uploads + rest.calls,
        "leaked_fds": max(0, rest.files - warm.files - SPARE_FILES),
        "leaked_threads": max(0, rest.threads - warm.threads - SPARE_THREADS),
        "leaked_leases": leases,
        "rss_growth_percent": 100 * max(0.0, rest.rss_mib / warm.rss_mib - 1),
        "minutes": took_s / 60,
        "images": len(result.served),
        "failed": errors.total(),
        "events": chaos.counts.total(),
        "seed": seed,
        "p50_s": median(each.seconds for each in result.served),
    }


def _print_tables(result: Run, rest: Usage, counts: Mapping[str, Counter[str]]) -> None:
    warm = result.usages[0]
    held = [
        [name, str(round(getattr(warm, name))), str(round(getattr(rest, name)))] for name in Usage.__slots__
    ]
    table("What the replica that was never restarted holds", ["", "after the warm-up", "at rest"], held)
    rss_mib = np.array([each.rss_mib for each in (*result.usages, rest)])
    quarters = [part for part in np.array_split(rss_mib, 4) if part.size]
    memory: list[list[str | float]] = [
        [str(n), float(np.median(part)), float(part.max())] for n, part in enumerate(quarters, 1)
    ]
    table("Its memory by quarter of the time", ["quarter", "median MiB", "largest"], memory)
    for head, counted in counts.items():
        table(f"Each {head}", [head, "times"], [[name, str(n)] for name, n in counted.most_common()])


def _show_progress(began: float, minutes: float, load: Traffic, chaos: Chaos) -> None:
    if sys.stderr.isatty():
        elapsed = (time.monotonic() - began) / 60
        counts = f"{len(load.served)} images, {chaos.counts.total()} events"
        print(f"\r{elapsed:.1f} of {minutes:g} min: {counts}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Run the command line; return 1 if a target was missed."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=4, help="at least one round of events (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of images and events")
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=list(EVENTS))
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    figures = asyncio.run(soak(args.events, args.minutes, args.seed))
    missed = [f for f in BENCHMARK.figures if f.target and not f.met(figures[f.key])]
    verdict = "; ".join(f"{f.key} is {figures[f.key]:g}, not {f.target}" for f in missed)
    print(f"\n{verdict or 'nothing lost, stuck or larger'}")
    print_figures(figures, args)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
