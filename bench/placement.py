"""Simulates fleets of replicas: what the order of work and the client's placement of a call's images give together.

The order is the server's scheduler, the placement the client's router; only the stages are replaced by their times.
"""

from typing import Any

from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from bench.simulation.simulator import RequestLoad
from bench.simulation.trials import FIRST, OURS, SKEWED, Trial, answer

BENCHMARK = Benchmark(
    "placement",
    "What does an even placement of a call's images give?",
    (
        Figure(
            "mean_4", "4 replicas, mean time to first token: first come by content / ours", target=">= 1.35"
        ),
        Figure("p99_4", "4 replicas, p99: ours / first come by content", target="<= 1.07"),
        Figure(
            "mean_16", "16 replicas, mean time to first token: first come by content / ours", target=">= 1.28"
        ),
        Figure("p99_16", "16 replicas, p99: ours / first come by content", target="<= 0.92"),
        Figure(
            "unequal_p99",
            "1 fast, 4 slow (12 : 1), load 0.2, p99: ours / the fast alone",
            target="<= 1.0",
        ),
        Figure("unequal_busy_p99", "load 0.9", shown=True),
        Figure("unequal_hash_p99", "load 0.2, by content", shown=True),
    ),
    limit_s=540,
    quick=("--seeds", "1", "--requests", "100"),
)

COMPARED = {
    "first come, by content": (FIRST, "hash"),
    "first come, even": (FIRST, "even"),
    "ours, by content": (OURS, "hash"),
    "ours, even": (OURS, "even"),
}


def figures_of(replicas: int, requests: int, seeds: int) -> dict[str, float]:
    """Compare orders and placements on the same requests of distinct images."""
    machine: dict[str, Any] = {"replicas": replicas, "prefill_engines": replicas}
    load = RequestLoad(SKEWED, replicas=replicas)
    found = answer(
        [
            Trial(order, load, requests, seeds, machine | {"placement": placement})
            for order, placement in COMPARED.values()
        ]
    )
    base, ours = found[0], found[3]
    table(
        f"{replicas} replicas, load 0.8 (unit: one image; {seeds} × {requests} requests)",
        ["order and placement", "mean TTFT", "first come / it", "p99", "p99 / first come"],
        [
            [name, each.mean, base.mean / each.mean, each.p99, each.p99 / base.p99]
            for name, each in zip(COMPARED, found, strict=True)
        ],
    )
    return {
        f"mean_{replicas}": base.mean / ours.mean,
        f"p99_{replicas}": ours.p99 / base.p99,
    }


UNEQUAL = (1.0, *[1 / 12] * 4)


def unequal_figures(requests: int, seeds: int) -> dict[str, float]:
    """Compare a fleet of one fast and four slow replicas to the fast one alone, on the same requests."""
    low, high = (RequestLoad(SKEWED, load=share * sum(UNEQUAL)) for share in (0.2, 0.9))
    fleet: dict[str, Any] = {"replicas": len(UNEQUAL), "rates": UNEQUAL}
    trials = {
        "load 0.2, the fast one alone": (low, {}),
        "load 0.2, by content": (low, fleet | {"placement": "hash"}),
        "load 0.2, by rate": (low, fleet | {"placement": "even"}),
        "load 0.9, the fast one alone": (high, {}),
        "load 0.9, by rate": (high, fleet | {"placement": "even"}),
    }
    found = answer([Trial(OURS, load, requests, seeds, machine) for load, machine in trials.values()])
    table(
        f"one fast and four slow replicas, 12 : 1 ({seeds} × {requests} requests)",
        ["load and placement", "mean TTFT", "p99"],
        [[name, each.mean, each.p99] for name, each in zip(trials, found, strict=True)],
    )
    alone, by_content, ours, busy_alone, busy = (each.p99 for each in found)
    return {
        "unequal_p99": ours / alone,
        "unequal_busy_p99": busy / busy_alone,
        "unequal_hash_p99": by_content / alone,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2000, help="for 4 replicas; twice as many for 16")
    args = parser.parse_args()
    figures = figures_of(4, args.requests, args.seeds) | figures_of(16, 2 * args.requests, args.seeds)
    figures |= unequal_figures(args.requests, args.seeds)
    print_figures(figures, args)


if __name__ == "__main__":
    main()
