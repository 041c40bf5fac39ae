"""Runs trials of the simulator over several seeds, and pools their figures."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.simulation.simulator import Machine, RequestLoad, SimulatedRequest, Simulation
from encoder_service.scheduler import LEAST_WORK_LEFT, Claim, Policy


def _chunk(claim: Claim) -> float:
    return claim.chunk


# The server's policy, and three others to compare it with.
FIRST_COME = Policy("first-come", request_key=lambda request: request.number, claim_key=_chunk)
EARLIEST_NEED = Policy(
    "earliest-need",
    request_key=lambda _: 0,
    claim_key=lambda claim: claim.needed_at if claim.needed_at is not None else float("-inf"),
)
CHUNK_FIRST = Policy("chunk-first", request_key=lambda _: 0, claim_key=_chunk)
POLICIES = (FIRST_COME, EARLIEST_NEED, CHUNK_FIRST, LEAST_WORK_LEFT)

# Images per request -> weight: most chats send one image, some send an album.
SKEWED = {1: 6, 2: 4, 4: 3, 8: 2, 16: 1, 32: 1}
BIG_IMAGES = 16

FIRST, OURS = FIRST_COME.name, LEAST_WORK_LEFT.name
BY_NAME = {policy.name: policy for policy in POLICIES}


@dataclass(frozen=True)
class Trial:
    """`seeds` runs of `count` requests each, whose figures are pooled."""

    policy: str
    load: RequestLoad
    count: int
    seeds: int
    machine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """The figures of a trial, over the requests of all seeds that were not refused."""

    ttft_s: NDArray[np.float64]
    images: NDArray[np.int64]
    images_per_s: float
    refused: float
    most_queued_images: int
    retry_after_ms: float

    @property
    def mean(self) -> float:
        """Mean TTFT."""
        return float(self.ttft_s.mean())

    @property
    def p99(self) -> float:
        """99th percentile of TTFT."""
        return float(np.percentile(self.ttft_s, 99))

    @property
    def big_p99(self) -> float:
        """99th percentile of TTFT of the requests with many images."""
        return float(np.percentile(self.ttft_s[self.images >= BIG_IMAGES], 99))


Run = tuple[list[float | None], list[int], float, int, list[int]]


def run_seed(trial: Trial, seed: int) -> Run:
    """Run one seed of a trial (in a worker process)."""
    jobs: list[SimulatedRequest] = trial.load.jobs(trial.count, seed)
    outcome = Simulation(Machine(policy=BY_NAME[trial.policy], **trial.machine), jobs).run()
    images = [len(job.images) for job in jobs]
    return outcome.ttft_s, images, outcome.images_per_s, outcome.most_queued_images, outcome.retry_after_ms


def answer(trials: Sequence[Trial]) -> list[Figures]:
    """Run all trials, in several processes."""
    tasks = [(trial, seed) for trial in trials for seed in range(trial.seeds)]
    # Spawned: a fork of a process that has run gRPC or torch may crash.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(4, os.cpu_count() or 1), mp_context=context) as pool:
        runs = iter(list(pool.map(run_seed, *zip(*tasks, strict=True))))
    return [_pool([next(runs) for _ in range(trial.seeds)]) for trial in trials]


def _pool(runs: list[Run]) -> Figures:
    ttft = [value for run in runs for value in run[0]]
    images = [count for run in runs for count in run[1]]
    kept = [at for at, value in enumerate(ttft) if value is not None]
    hints = [hint for run in runs for hint in run[4]]
    return Figures(
        ttft_s=np.array([ttft[at] for at in kept], dtype=np.float64),
        images=np.array([images[at] for at in kept]),
        images_per_s=sum(run[2] for run in runs) / len(runs),
        refused=1 - len(kept) / len(ttft),
        most_queued_images=max(run[3] for run in runs),
        retry_after_ms=float(np.median(hints)) if hints else 0.0,
    )
