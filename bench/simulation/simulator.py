"""Drives the server's scheduler with a virtual clock: requests, replicas and prefill engines, without sleeping.

The scheduler is the server's own code. The simulation replaces each stage by the seconds that it takes. Times and
patches may be in any unit, if it is the same unit everywhere.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from encoder_contract.errors import OverloadedError
from encoder_service.scheduler import LEAST_WORK_LEFT, Claim, Policy, QueueLimits, Scheduler, Task
from prefill_client.fleet.routing import Router

UNLIMITED = QueueLimits(images=10**9, patches=10**15, source_bytes=10**15, claims=10**9)
SOURCE_BYTES = 300_000  # of a 720p JPEG


@dataclass(frozen=True, slots=True)
class SimulatedImage:
    """An image of a request: its address, and its work in patches."""

    address: bytes
    patches: int


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: when it arrives, and its images in the order of the prompt."""

    arrived_s: float
    images: tuple[SimulatedImage, ...]
    client_id: str = "client"


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated deployment. A device encodes one patch per second, unless `rates` differ; other times are given."""

    policy: Policy = LEAST_WORK_LEFT
    replicas: int = 1
    prefill_engines: int = 1
    # Time to decode and preprocess an image. This stage runs beside the device and takes one batch at a time.
    prepare_s: float = 0.0
    prefill_s: float = 0.8  # prefill of one chunk
    images_per_chunk: int = 1
    budget_patches: int = 1
    max_ahead_patches: int = 2
    max_ahead_images: int = 64
    # Latency of the index, before each admission and after each encode.
    index_s: float = 0.0
    limits: QueueLimits = UNLIMITED
    # How the images of a request go to replicas: each by its content ("hash"), all to one replica ("whole"), or as the
    # client places them ("even").
    placement: Literal["hash", "whole", "even"] = "hash"
    rates: Sequence[float] = ()  # of the replicas, patches/s; the client knows them


@dataclass(slots=True)
class RunResult:
    """The measurements of a run. `ttft_s` has one entry for each job, None for a refused job."""

    ttft_s: list[float | None]
    span_s: float = 0.0
    encodes: int = 0
    most_queued_images: int = 0
    retry_after_ms: list[int] = field(default_factory=list)

    @property
    def images_per_s(self) -> float:
        """The throughput of the whole run."""
        return self.encodes / self.span_s if self.span_s else 0.0


@dataclass(eq=False, slots=True)
class _Replica:
    scheduler: Scheduler[Task]
    rate: float
    preparing: bool = False
    encoding: bool = False


@dataclass(eq=False, slots=True)
class _Progress:
    """The progress of a job: its missing images, and the chunk to prefill next."""

    job: SimulatedRequest
    number: int
    missing: list[int]  # for each chunk, the number of its images that are not ready
    claims: list[tuple[_Replica, Claim]] = field(default_factory=list)
    chunk: int = 0
    refused: bool = False


class Simulation:
    """A run over a list of jobs; `run` returns the outcome."""

    def __init__(self, machine: Machine, jobs: Sequence[SimulatedRequest]) -> None:
        self._machine = machine
        self._jobs = jobs
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = 0
        self._replicas = [
            _Replica(
                Scheduler(
                    machine.limits,
                    max_ahead_patches=machine.max_ahead_patches,
                    max_ahead_images=machine.max_ahead_images,
                    policy=machine.policy,
                ),
                rate,
            )
            for rate in machine.rates or [1.0] * machine.replicas
        ]
        self._stored: set[bytes] = set()
        self._waiting: dict[bytes, list[tuple[_Progress, int]]] = defaultdict(list)
        self._ready: list[list[tuple[int, _Progress]]] = [[] for _ in range(machine.prefill_engines)]
        self._prefilling = [False] * machine.prefill_engines
        self._outcome = RunResult(ttft_s=[None] * len(jobs))

    def run(self) -> RunResult:
        """Run until all jobs have ended."""
        for number, job in enumerate(self._jobs):
            self._at(job.arrived_s + self._machine.index_s, partial(self._arrive, number, job))
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
            self._outcome.span_s = now
        return self._outcome

    def _at(self, time_s: float, event: Callable[[float], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (time_s, self._numbers, event))

    def _arrive(self, number: int, job: SimulatedRequest, now: float) -> None:
        per_chunk = self._machine.images_per_chunk
        progress = _Progress(job, number, missing=[0] * -(-len(job.images) // per_chunk))
        touched: dict[int, _Replica] = {}
        for place, (image, replica) in enumerate(zip(job.images, self._place(number, job), strict=True)):
            if image.address in self._stored:
                continue
            chunk = place // per_chunk
            touched[id(replica)] = replica
            claim = Claim(
                str(number), job.client_id, chunk=chunk, demanded=True,
                needed_at=job.arrived_s + chunk * self._machine.prefill_s,
            )  # fmt: skip
            try:
                replica.scheduler.admit(claim, Task(image.address, image.patches, SOURCE_BYTES), now)
            except OverloadedError as error:
                self._outcome.retry_after_ms.append(error.retry_after_ms)
                progress.refused = True
                break
            progress.claims.append((replica, claim))
            progress.missing[chunk] += 1
            self._waiting[image.address].append((progress, chunk))
        if progress.refused:
            for replica, claim in progress.claims:
                replica.scheduler.withdraw(claim)
        else:
            self._offer(progress, now)
        for replica in touched.values():
            self._turn(replica, now)

    def _place(self, number: int, job: SimulatedRequest) -> list[_Replica]:
        """Return the replica of each image of a job."""
        if (
            self._machine.placement == "even"
        ):  # each job has a client of its own, with nothing else in progress
            names = {str(place): replica for place, replica in enumerate(self._replicas)}
            router = Router(names)
            for name, replica in names.items():
                router.set_rate(name, replica.rate)
            return [names[name] for name in router.place([image.address for image in job.images])]
        is_whole = self._machine.placement == "whole"
        by = [number if is_whole else int.from_bytes(image.address[:8], "little") for image in job.images]
        return [self._replicas[each % len(self._replicas)] for each in by]

    def _turn(self, replica: _Replica, now: float) -> None:
        """Start the next work in each of a replica's two stages that is free."""
        scheduler, machine = replica.scheduler, self._machine
        while not replica.preparing:
            tasks = scheduler.next_to_prepare(now, machine.max_ahead_images)
            if not tasks:
                break
            if machine.prepare_s == 0:
                self._prepared(replica, tasks, now)
                continue
            replica.preparing = True
            time_s = now + machine.prepare_s * len(tasks)
            self._at(time_s, partial(self._end_prepare, replica, tasks))
        if not replica.encoding and (batch := scheduler.next_batch(now, machine.budget_patches)):
            replica.encoding = True
            seconds = sum(task.patches for task in batch) / replica.rate
            self._at(now + seconds, partial(self._end_encode, replica, batch, seconds))
            self._turn(replica, now)

    def _prepared(self, replica: _Replica, tasks: list[Task], now: float) -> None:
        for task in tasks:
            replica.scheduler.prepared(task, now)

    def _end_prepare(self, replica: _Replica, tasks: list[Task], now: float) -> None:
        replica.preparing = False
        self._prepared(replica, tasks, now)
        self._turn(replica, now)

    def _end_encode(self, replica: _Replica, batch: list[Task], seconds: float, now: float) -> None:
        outcome = self._outcome
        outcome.most_queued_images = max(outcome.most_queued_images, replica.scheduler.queued.images)
        outcome.encodes += len(batch)
        replica.encoding = False
        replica.scheduler.done(batch, seconds)
        for task in batch:
            self._at(now + self._machine.index_s, partial(self._image_ready, task.address))
        self._turn(replica, now)

    def _image_ready(self, address: bytes, now: float) -> None:
        self._stored.add(address)
        for progress, chunk in self._waiting.pop(address, ()):
            progress.missing[chunk] -= 1
            if not progress.refused and chunk == progress.chunk:
                self._offer(progress, now)

    def _offer(self, progress: _Progress, now: float) -> None:
        """Give the next chunk to the job's prefill engine if its images are ready."""
        if progress.missing[progress.chunk]:
            return
        engine = progress.number % len(self._ready)
        heapq.heappush(self._ready[engine], (progress.number, progress))
        self._prefill(engine, now)

    def _prefill(self, engine: int, now: float) -> None:
        if self._prefilling[engine] or not self._ready[engine]:
            return
        _, progress = heapq.heappop(self._ready[engine])
        self._prefilling[engine] = True
        self._at(now + self._machine.prefill_s, partial(self._end_prefill, engine, progress))

    def _end_prefill(self, engine: int, progress: _Progress, now: float) -> None:
        self._prefilling[engine] = False
        progress.chunk += 1
        if progress.chunk == len(progress.missing):
            self._outcome.ttft_s[progress.number] = now - progress.job.arrived_s
        else:
            self._offer(progress, now)
        self._prefill(engine, now)


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """A stream of requests: images per request, work per image, and arrival rate."""

    sizes: dict[int, int]  # images per request -> weight
    # Work that arrives per second, over the work that all `replicas` do per second.
    load: float = 0.8
    image_patches: int = 1
    replicas: int = 1
    burst: float = 1.0  # mean number of requests that arrive at the same moment
    clients: int = 1

    def jobs(self, count: int, seed: int) -> list[SimulatedRequest]:
        """Return `count` requests of distinct images, with Poisson arrivals (batch Poisson if `burst` > 1)."""
        source = random.Random(seed)
        sizes, weights = list(self.sizes), list(self.sizes.values())
        mean = sum(s * w for s, w in self.sizes.items()) / sum(weights)
        rate = self.load * self.replicas / (mean * self.burst)
        jobs: list[SimulatedRequest] = []
        time_s = 0.0
        while len(jobs) < count:
            time_s += source.expovariate(rate)
            together = 1
            while source.random() > 1 / self.burst:
                together += 1
            for _ in range(together):
                images = tuple(
                    SimulatedImage(source.randbytes(32), self.image_patches)
                    for _ in range(source.choices(sizes, weights)[0])
                )
                jobs.append(SimulatedRequest(time_s, images, f"client-{source.randrange(self.clients)}"))
        return jobs[:count]
