"""Two replicas, an index and clients run among attackers, restarts and faults, which are drawn from a seed.

Clients submit and fetch prompts the whole time. Every image must end in its rows or one error, and never in the rows of
another. Each event happens once before memory is first measured. At the end all load stops, and what the replica that
was never restarted holds is compared: memory, files, threads, pins, uploads, calls, leases.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import transformers

from bench.harness.benchmark import Benchmark, Figure, command_line, tell
from bench.harness.tables import table
from testing.checkpoints import write_checkpoint
from testing.hard_day import EVENTS, Day
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
        Figure("minutes", "under load", "min"),
        Figure("images", "images that ended"),
        Figure("failed", "of these in an error"),
        Figure("events", "attacks, restarts and faults"),
    ),
    limit_s=420,
    arguments=("--minutes", "4"),
    quick=("--minutes", "0.2", "--events", "flush", "restart"),
)

IDLE_S = 90.0  # longer than a lease and a fetched image's grace
SPARE_FILES = 4  # connections between replicas
SPARE_THREADS = (os.cpu_count() or 1) + 4  # asyncio's pool, which grows to its bound when it is needed
MIB = 1 << 20
SETTINGS: dict[str, Any] = {
    "store_host_gib": 0.06,
    "source_gib": 0.05,
    "max_queued_gib": 0.0625,
    "max_queued_images": 256,
    "source_ttl_s": 20,
    "log_level": "error",
}
# Images are resized to a quarter of a megapixel at most: the tiny tower takes milliseconds for each.
PREPROCESSOR = {"size": {"shortest_edge": 65536, "longest_edge": 262144}}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a replica holds at one moment."""

    rss_mib: float
    files: int
    threads: int
    pins: int
    uploads: int
    calls: int

    @classmethod
    def of(cls, replica: ReplicaProcess, index_port: int) -> "Usage":
        """Read it: memory without the store's segment, files without connections to the index.

        The segment has its size from the start; the pool of connections has a bound, and keeps what it once needed.
        """
        process, now = psutil.Process(replica.process.process.pid), replica.metrics()
        memory = process.memory_info()
        return cls(
            (memory.rss - memory.shared) / MIB,
            process.num_fds()
            - sum(each.raddr[1:] == (index_port,) for each in process.net_connections("tcp")),
            process.num_threads(),
            int(now.total("store_pins")),
            int(now.total("upload_bytes")),
            int(now.total("calls_in_progress")),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no caller holds anything."""
        return not (self.pins or self.uploads or self.calls)


async def live(
    day: Day, names: Sequence[str], minutes: float, seed: int
) -> tuple[Usage, list[Served], list[str]]:
    """Run clients and events; return what the first replica held after the warm-up, what was served, what was lost."""
    began, lost = time.monotonic(), []
    endpoints = [replica.endpoint for replica in day.replicas]
    warm: Usage | None = None
    # Few new images at a time: two cores have two replicas, the clients and an attacker to run.
    load = Traffic(endpoints, Supply(seed=seed), workers=3, images=4, pause_s=0.05)
    try:
        async with load:
            for name in day.draw.sample(names, len(names)):
                await day.happen(name)
            warm = await asyncio.to_thread(Usage.of, day.replicas[0], day.redis.port)
            day.rss_mib.append(warm.rss_mib)
            while time.monotonic() - began < minutes * 60:
                await day.happen(day.draw.choice(names))
                day.rss_mib.append(
                    (await asyncio.to_thread(Usage.of, day.replicas[0], day.redis.port)).rss_mib
                )
                _progress(began, minutes, load, day)
    except (
        AssertionError,
        TimeoutError,
        KeyError,
    ) as error:  # what `Traffic` raises of an image that went wrong
        lost.append(f"{type(error).__name__}: {error}")
    assert warm is not None, f"the day ended before the warm-up did: {lost}"
    return warm, load.served, lost


async def at_rest(day: Day) -> tuple[Usage, int]:
    """Wait until no caller holds anything; return what the first replica still holds, and the leases in the index."""
    deadline = time.monotonic() + IDLE_S
    while True:
        usages = [await asyncio.to_thread(Usage.of, replica, day.redis.port) for replica in day.replicas]
        with day.redis.client() as client:
            leases = sum(1 for _ in client.scan_iter("*:lease", count=1000))
        if (not leases and all(usage.is_idle for usage in usages)) or time.monotonic() > deadline:
            return usages[0], leases
        await asyncio.sleep(1)


async def soak(names: Sequence[str], minutes: float, seed: int) -> dict[str, Any]:
    """Run events and clients, print the tables and return the figures."""
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        model = write_checkpoint(Path(folder), preprocessor=PREPROCESSOR)
        replicas = [ReplicaProcess(model, number, index=redis.url, **SETTINGS) for number in range(2)]
        with fleet_of(replicas):
            began = time.monotonic()
            day = Day(replicas, redis, random.Random(seed))
            warm, served, lost = await live(day, names, minutes, seed)
            took_s, crashes = time.monotonic() - began, day.crashes()
            rest, leases = await at_rest(day)
    errors = Counter(each.error.partition(":")[0] for each in served if each.error)
    for loss in lost:
        print(f"lost: {loss}")
    held = [
        [name, str(round(getattr(warm, name))), str(round(getattr(rest, name)))] for name in Usage.__slots__
    ]
    table("What the replica that was never restarted holds", ["", "after the warm-up", "at rest"], held)
    quarters = [part for part in np.array_split(np.array([*day.rss_mib, rest.rss_mib]), 4) if part.size]
    memory: list[list[str | float]] = [
        [str(n), float(np.median(part)), float(part.max())] for n, part in enumerate(quarters, 1)
    ]
    table("Its memory by quarter of the time", ["quarter", "median MiB", "largest"], memory)
    for title, head, counts in (
        ("What happened", "event", day.happened),
        ("Errors of images", "error", errors),
    ):
        table(title, [head, "times"], [[name, str(times)] for name, times in counts.most_common()])
    return {
        "lost": len(lost),
        "crashes": crashes,
        "hangs": day.hangs,
        "leaked_pins": rest.pins + rest.uploads + rest.calls,
        "leaked_fds": max(0, rest.files - warm.files - SPARE_FILES),
        "leaked_threads": max(0, rest.threads - warm.threads - SPARE_THREADS),
        "leaked_leases": leases,
        "rss_growth_percent": 100 * max(0.0, rest.rss_mib / warm.rss_mib - 1),
        "minutes": took_s / 60,
        "images": len(served),
        "failed": errors.total(),
        "events": day.happened.total(),
        "seed": seed,
        "p50_s": median(each.seconds for each in served),
    }


def _progress(began: float, minutes: float, load: Traffic, day: Day) -> None:
    if sys.stderr.isatty():
        gone = (time.monotonic() - began) / 60
        says = f"{gone:.1f} of {minutes:g} min: {len(load.served)} images, {day.happened.total()} events"
        print(f"\r{says}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Run the command line; 1 when a target was missed."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=4, help="at least one round of events (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of images and events")
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=list(EVENTS))
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    figures = asyncio.run(soak(given.events, given.minutes, given.seed))
    missed = [f for f in BENCHMARK.figures if f.target and not f.met(figures[f.key])]
    verdict = "; ".join(f"{f.key} is {figures[f.key]:g}, not {f.target}" for f in missed)
    print(f"\n{verdict or 'nothing lost, stuck or larger'}")
    tell(figures, given)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
