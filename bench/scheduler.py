"""Compares scheduling policies in simulation, measures the cost of the scheduler's calls, and prints tables."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench.harness.benchmark import Benchmark, Figure, Table, command_line, print_figures, table
from bench.simulation.simulator import UNLIMITED, RequestLoad
from bench.simulation.trials import (
    BIG_IMAGES,
    FIRST,
    NEVER_YIELDS,
    OURS,
    POLICIES,
    SKEWED,
    UNIFORM,
    Figures,
    Trial,
    answer,
)
from encoder_service.scheduler import Claim, QueueLimits, Scheduler, Task

BENCHMARK = Benchmark(
    "scheduler",
    "What does the order of work give?",
    (
        Figure(
            "mean_ttft_fcfs_over_ours",
            "mean time to first token, first come / ours (simulated)",
            target=">= 2",
        ),
        Figure("p99_ttft_ours_over_fcfs", "p99, ours / first come", target="<= 1.1"),
        Figure("overload_p99_over_80", "p99 at ten times overload / at 80 % load", target="<= 2"),
    ),
    limit_s=540,
    dry_run=("--cost-only",),
)

# A section prints its tables; it returns figures and tables for the JSON line.
Section = tuple[dict[str, float], list[Table]]


def compare(title: str, load: RequestLoad, count: int, seeds: int) -> tuple[dict[str, Figures], Table]:
    """Compare all policies on the same requests; return figures by policy, and a table."""
    found = answer([Trial(policy.name, load, count, seeds) for policy in POLICIES])
    base = found[0]
    heads = ("policy", "mean TTFT", "first-come / it", "p99", "p99 / first-come",
             f"p99 of ≥ {BIG_IMAGES} images", "/ first-come", "images/s")  # fmt: skip
    rows = [
        (policy.name, f.mean, base.mean / f.mean, f.p99, f.p99 / base.p99, f.big_p99, f.big_p99 / base.big_p99,
         f.images_per_s) for policy, f in zip(POLICIES, found, strict=True)
    ]  # fmt: skip
    shown = table(f"{title} ({seeds} × {count} requests)", heads, rows)
    return {policy.name: f for policy, f in zip(POLICIES, found, strict=True)}, shown


def sizes_section() -> Section:
    """Compare the policies on the workload of the targets: one encoder at 80 % load."""
    found, skewed = compare(
        "Skewed sizes, Poisson arrivals, load 0.8 (unit: one image)", RequestLoad(SKEWED), 5000, 6
    )
    first, ours = found[FIRST], found[OURS]
    even, uniform = compare("Sizes 1 to 32 alike, Poisson arrivals, load 0.8", RequestLoad(UNIFORM), 2000, 3)
    _, bursts = compare(
        "Skewed sizes, bursts of 8 requests on average, load 0.8", RequestLoad(SKEWED, burst=8), 3000, 2
    )
    figures = {
        "mean_ttft_fcfs_over_ours": first.mean / ours.mean,
        "p99_ttft_ours_over_fcfs": ours.p99 / first.p99,
        "big_p99_ours_over_fcfs": ours.big_p99 / first.big_p99,
        "throughput_ours_over_fcfs": ours.images_per_s / first.images_per_s,
        "uniform_mean_ttft_fcfs_over_ours": even[FIRST].mean / even[OURS].mean,
        "uniform_p99_ttft_ours_over_fcfs": even[OURS].p99 / even[FIRST].p99,
    }
    return figures, [skewed, uniform, bursts]


def need_section() -> Section:
    """Measure the gain from encoding images that block a chunk before images that no chunk waits for."""
    rows: list[Sequence[str | float]] = []
    for prefill_s in (0.4, 3.0, 6.0):
        # So many prefill engines that none is the bottleneck: each request has one for itself.
        machine = {"prefill_s": prefill_s, "prefill_engines": 10_000}
        names = (FIRST, NEVER_YIELDS.name, OURS)
        figures = answer([Trial(name, RequestLoad(SKEWED), 2000, 2, machine) for name in names])
        base = figures[0]
        rows += [
            (prefill_s, name, f.mean, base.mean / f.mean, f.p99, f.p99 / base.p99)
            for name, f in zip(names, figures, strict=True)
        ]
    heads = ("prefill per chunk", "policy", "mean TTFT", "first-come / it", "p99", "p99 / first-come")
    return {}, [table("Prefill slower than encoding: blocking images first, load 0.8", heads, rows)]


def fleet_section() -> Section:
    """Spread the images of each request over many replicas, so that a replica sees only a part of a request."""
    return {}, [fleet_table((1, 4, 16, 64))]


def fleet_table(replicas: Sequence[int]) -> Table:
    """Return the table of fleets of these sizes."""
    rows: list[Sequence[str | float]] = []
    for n in replicas:
        machine = {"replicas": n, "prefill_engines": n}
        load, count = RequestLoad(SKEWED, replicas=n), min(2000 * n, 8000)
        first, ours, whole = answer(
            [Trial(FIRST, load, count, 1, machine), Trial(OURS, load, count, 1, machine),
             Trial(OURS, load, count, 1, machine | {"placement": "whole"})]
        )  # fmt: skip
        rows.append((str(n), first.mean, ours.mean, first.mean / ours.mean, first.p99, ours.p99, whole.mean,
                     whole.p99, ours.images_per_s / n))  # fmt: skip
    heads = ("replicas", "first-come mean", "ours mean", "ratio", "first-come p99", "ours p99",
             "ours, request kept whole, mean", "p99", "images/s a replica")  # fmt: skip
    return table("Images of a request spread over replicas by content, load 0.8 of the fleet", heads, rows)


# Room for four of the largest requests: about what the device encodes while a request of 32 images ages. One client may
# use all of it, because the bound on waiting is per client.
OVERLOAD_LIMITS = replace(UNLIMITED, images=128, client_share=0.99)


def overload_section() -> Section:
    """Offer ten times the encoder's capacity, with a bounded queue."""
    machine = {"limits": OVERLOAD_LIMITS}
    loads = [("0.8", 1), ("10", 1), ("0.8", 16), ("10", 16)]
    found = answer(
        [Trial(OURS, RequestLoad(SKEWED, float(load), clients=clients), 4000 if load == "0.8" else 10_000, 2, machine)
         for load, clients in loads]
    )  # fmt: skip
    calm, flood = found[:2]
    rows = [
        (load, str(clients), f.mean, f.p99, f"{f.refused:.0%}", str(f.most_queued_images),
         f"{f.retry_after_ms / 1000:.0f}") for (load, clients), f in zip(loads, found, strict=True)
    ]  # fmt: skip
    heads = (
        "load",
        "clients",
        "mean TTFT of the admitted",
        "p99",
        "requests refused",
        "most images queued",
        "median retry hint",
    )
    shown = table(f"Ten times overload, queue of {OVERLOAD_LIMITS.images} images", heads, rows)
    figures = {"overload_p99_over_80": flood.p99 / calm.p99, "overload_images_per_s": flood.images_per_s}
    return figures, [shown]


def cost_section() -> Section:
    """Time the calls with 10 000 images queued."""
    source, spent = random.Random(0), {}  # type: random.Random, dict[str, list[float]]

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        spent.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
        return result

    limits = QueueLimits(images=20_000, patches=10**9, source_bytes=10**12, claims=10**6)
    scheduler = Scheduler[Task](limits, max_ahead_patches=16_384, max_ahead_images=64)
    claims: list[Claim] = []
    for turn in range(4_000):
        now = turn * 0.01
        for chunk in range(source.choices(list(SKEWED), list(SKEWED.values()))[0]):
            if scheduler.snapshot().claims >= 10_000:
                break
            claim = Claim(
                f"request-{turn}", f"client-{turn % 50}", 0, chunk, now + chunk * 0.1, demanded=True
            )
            patches = source.choice((1024, 3520, 8160))
            timed("admit", scheduler.admit, claim, Task(source.randbytes(32), patches, 300_000), now)
            claims.append(claim)
        if turn < 2_000:
            continue
        for task in timed("next_to_prepare", scheduler.next_to_prepare, now, 8):
            timed("prepared", scheduler.prepared, task, now)
        timed("done", scheduler.done, timed("next_batch", scheduler.next_batch, now, 8_192), 0.05)
        timed("withdraw", scheduler.withdraw, source.choice(claims))
    rows = [(name, np.percentile(us, 50), np.percentile(us, 99)) for name, us in spent.items()]
    shown = table("Cost of a call with 10 000 images queued, microseconds", ("call", "p50", "p99"), rows)
    return {f"{name}_p99_us": float(np.percentile(us, 99)) for name, us in spent.items()}, [shown]


SECTIONS: tuple[Callable[[], Section], ...] = (
    sizes_section,
    need_section,
    fleet_section,
    overload_section,
    cost_section,
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--cost-only", action="store_true", help="only the cost of the calls")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    tables: list[Table] = []
    for section in (cost_section,) if args.cost_only else SECTIONS:
        found, shown = section()
        figures |= {name: round(value, 4) for name, value in found.items()}
        tables += shown
    print_figures({**figures, "tables": tables}, args)


if __name__ == "__main__":
    main()
