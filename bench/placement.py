"""Simulates fleets of replicas: what the order of work and the client's placement of a call's images give together.

The order is the server's scheduler, the placement the client's router; only the stages are replaced by their times.
At the end, two real servers get requests that are also simulated. Their towers sleep, one four times as long.
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from itertools import count
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.edge import SETTINGS, SMALL
from bench.edge_parts.null_tower import installed
from bench.harness.benchmark import Benchmark, Figure, command_line, print_figures, table
from bench.harness.calls import submit_and_fetch
from bench.simulation.simulator import Machine, RequestLoad, SimulatedImage, SimulatedRequest, Simulation
from bench.simulation.trials import FIRST, OURS, SKEWED, Trial, answer
from encoder_contract.digest import content_digest
from prefill_client import EncoderClient
from testing.checkpoints import write_checkpoint
from testing.photos import photo, with_comment
from testing.server_process import running

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
            "unequal_p99", "1 fast, 4 slow (12 : 1), load 0.2, p99: ours / the fast alone", target="<= 1.0"
        ),
        Figure("unequal_busy_p99", "load 0.9"),
        Figure("unequal_hash_p99", "load 0.2, by content"),
        Figure("real_off", "two real servers, 4 : 1: mean wait, off the simulated one by", target="<= 0.1"),
    ),
    limit_s=540,
    dry_run=("--seeds", "1", "--requests", "100", "--real-requests", "20"),
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
    return {f"mean_{replicas}": base.mean / ours.mean, f"p99_{replicas}": ours.p99 / base.p99}


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


IMAGE_S = 0.04  # of the fast server
SLOWER = 4
PATCHES = 256
REAL_SIZES = {1: 6, 2: 4, 4: 3, 8: 2}
CLIENTS = 16  # so that a client has hardly another request in progress, as in the simulation
FAST_PATCHES_PER_S = PATCHES / IMAGE_S
WAIT_S = 600.0


def requests_of(requests: int) -> tuple[list[SimulatedRequest], list[list[bytes]]]:
    """Return requests for two servers at 60 % load, and the files of each."""
    base, numbers = photo(*SMALL, 7), count(int(time.time() * 1000) << 20)
    per_s = (1 + 1 / SLOWER) / IMAGE_S
    jobs = RequestLoad(REAL_SIZES, load=0.6 * per_s).jobs(requests, 0)
    files = [[with_comment(base, next(numbers)) for _ in job.images] for job in jobs]
    named = [
        SimulatedRequest(
            job.arrived_s, tuple(SimulatedImage(content_digest(file), PATCHES) for file in one), job.client_id
        )
        for job, one in zip(jobs, files, strict=True)
    ]
    return named, files


async def warm_up(endpoint: str, rate: float) -> None:
    """Encode images for two seconds: a server knows its rate after one."""
    base = photo(*SMALL, 8)
    async with await EncoderClient.connect(endpoint) as client:
        for number in range(ceil(2 * rate / PATCHES)):
            await submit_and_fetch(client, [with_comment(base, number)], timeout_s=WAIT_S)


async def real_waits(
    endpoints: dict[str, float], jobs: list[SimulatedRequest], files: list[list[bytes]]
) -> list[float]:
    """Make the requests at their times, and return how long each waits for its last image, seconds."""
    await asyncio.gather(*(warm_up(*each) for each in endpoints.items()))
    async with AsyncExitStack() as clients:
        callers = [
            await clients.enter_async_context(await EncoderClient.connect(list(endpoints)))
            for _ in range(CLIENTS)
        ]
        began = time.monotonic() + 0.5

        async def request(number: int) -> float:
            due = began + jobs[number].arrived_s
            await asyncio.sleep(due - time.monotonic())
            await submit_and_fetch(callers[number % CLIENTS], files[number], timeout_s=WAIT_S)
            return time.monotonic() - due

        return list(await asyncio.gather(*map(request, range(len(jobs)))))


def real_figures(requests: int) -> dict[str, float]:
    """Compare two real servers of different speeds with their simulation."""
    jobs, files = requests_of(requests)
    rates = (FAST_PATCHES_PER_S, FAST_PATCHES_PER_S / SLOWER)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        model, endpoints = write_checkpoint(Path(folder)), dict[str, float]()
        for rate in rates:
            with installed("qwen3_vl", rate):
                server = running(model, devices="cpu", threads=1, batch_patches=PATCHES, **SETTINGS)
                endpoints[servers.enter_context(server).endpoint] = rate
        found = asyncio.run(real_waits(endpoints, jobs, files))
    machine = Machine(
        replicas=2, rates=rates, placement="even", prefill_s=0.0, prefill_engines=len(jobs),
        budget_patches=PATCHES, max_ahead_patches=2 * PATCHES,
    )  # fmt: skip
    expected = [wait for wait in Simulation(machine, jobs).run().ttft_s if wait is not None]
    real, simulated = fmean(found), fmean(expected)
    return {
        "real_s": real,
        "simulated_s": simulated,
        "real_over_simulated": real / simulated,
        "real_off": abs(real / simulated - 1),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=2000, help="for 4 replicas; twice as many for 16")
    parser.add_argument("--real-requests", type=int, default=300, help="to two real servers; 0: none")
    args = parser.parse_args()
    figures = real_figures(args.real_requests) if args.real_requests else {}
    figures |= figures_of(4, args.requests, args.seeds) | figures_of(16, 2 * args.requests, args.seeds)
    figures |= unequal_figures(args.requests, args.seeds)
    print_figures(figures, args)


if __name__ == "__main__":
    main()
