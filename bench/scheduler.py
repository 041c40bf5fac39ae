"""Compares scheduling policies in simulation, and prints tables."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.harness.benchmark import Benchmark, Figure, Table, command_line, print_figures, table
from bench.simulation.simulator import UNLIMITED, RequestLoad
from bench.simulation.trials import BIG_IMAGES, FIRST, OURS, POLICIES, SKEWED, Trial, answer

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
    dry_run=("--share", "0.01"),
)

Section = tuple[dict[str, float], Table]
"""The figures of a section, and the table that it printed."""


def sizes_section(share: float) -> Section:
    """Compare all policies on the same requests, the workload of the targets: one encoder at 80 % load."""
    count, seeds = round(5000 * share), 6
    found = answer([Trial(policy.name, RequestLoad(SKEWED), count, seeds) for policy in POLICIES])
    of = dict(zip((policy.name for policy in POLICIES), found, strict=True))
    first, ours = of[FIRST], of[OURS]
    heads = ("policy", "mean TTFT", "first-come / it", "p99", "p99 / first-come",
             f"p99 of ≥ {BIG_IMAGES} images", "/ first-come", "images/s")  # fmt: skip
    rows = [
        (name, f.mean, first.mean / f.mean, f.p99, f.p99 / first.p99, f.big_p99, f.big_p99 / first.big_p99,
         f.images_per_s) for name, f in of.items()
    ]  # fmt: skip
    title = "Skewed sizes, Poisson arrivals, load 0.8 (unit: one image)"
    figures = {
        "mean_ttft_fcfs_over_ours": first.mean / ours.mean,
        "p99_ttft_ours_over_fcfs": ours.p99 / first.p99,
    }
    return figures, table(f"{title} ({seeds} × {count} requests)", heads, rows)


def fleet_section(share: float) -> Section:
    """Spread the images of each request over many replicas, so that a replica sees only a part of a request."""
    return {}, fleet_table((1, 4, 16, 64), share)


def fleet_table(replicas: Sequence[int], share: float = 1.0) -> Table:
    """Return the table of fleets of these sizes."""
    rows: list[Sequence[str | float]] = []
    for n in replicas:
        machine = {"replicas": n, "prefill_engines": n}
        load, count = RequestLoad(SKEWED, replicas=n), round(min(2000 * n, 8000) * share)
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


def overload_section(share: float) -> Section:
    """Offer ten times the encoder's capacity, with a bounded queue."""
    machine = {"limits": OVERLOAD_LIMITS}
    loads = [("0.8", 1, 4000), ("10", 1, 10_000), ("0.8", 16, 4000), ("10", 16, 10_000)]
    found = answer(
        [
            Trial(
                OURS, RequestLoad(SKEWED, float(load), clients=clients), round(requests * share), 2, machine
            )
            for load, clients, requests in loads
        ]
    )
    calm, flood = found[:2]
    rows = [
        (load, str(clients), f.mean, f.p99, f"{f.refused:.0%}", str(f.most_queued_images),
         f"{f.retry_after_ms / 1000:.0f}") for (load, clients, _), f in zip(loads, found, strict=True)
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
    return {"overload_p99_over_80": flood.p99 / calm.p99}, shown


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests (default: all)")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    tables: list[Table] = []
    for section in (sizes_section, fleet_section, overload_section):
        found, shown = section(args.share)
        figures |= {name: round(value, 4) for name, value in found.items()}
        tables.append(shown)
    print_figures({**figures, "tables": tables}, args)


if __name__ == "__main__":
    main()
