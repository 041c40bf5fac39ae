"""The desk: jobs by address and the scheduler that orders them, behind one lock that is held for microseconds.

The event loop hands jobs in, the threads of the pipeline take them out; nobody holds the lock while it works.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from encoder_contract.errors import UnavailableError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.image.source import Source
from encoder_service.scheduler import Claim, Scheduler, Snapshot, Task
from encoder_service.store import Pin

Pick = Callable[[Scheduler, float], Sequence[Task]]


@dataclass(eq=False, slots=True)
class Job:
    """One image on its way to its rows, and who awaits them."""

    key: ImageKey
    source: Source
    grid: Grid
    work: Task
    queued_at: float
    patches: Tensor | None = None
    patches_ready: "torch.cuda.Event | None" = None
    stage_ms: dict[str, float] = field(default_factory=dict)
    stage_began_s: dict[str, float] = field(default_factory=dict)  # on time.monotonic's clock
    waiters: "set[asyncio.Future[Pin]]" = field(default_factory=set)

    @property
    def address(self) -> bytes:
        """The store address."""
        return self.key.address

    def stage(self, name: str, began_s: float, ended_s: float) -> None:
        """Note when a stage of this image began and how long it took."""
        self.stage_began_s[name] = began_s
        self.stage_ms[name] = (ended_s - began_s) * 1000


class JobQueue:
    """Single flight: one job per address, any number of claims on it. Every method may be called by any thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._turn = threading.Condition()
        self._jobs: dict[bytes, Job] = {}
        self._closed = False
        self._device_waits = False
        self._idle_since: float | None = None
        self._apart_pixels = 0  # being decoded apart, whether or not anybody still wants them

    def __len__(self) -> int:
        """Images on their way, in whatever stage."""
        return len(self._jobs)

    def __contains__(self, address: bytes) -> bool:
        return address in self._jobs

    @property
    def patches_per_s(self) -> float:
        """The measured rate of the device; 0 before the first batch."""
        return self._scheduler.patches_per_s

    def snapshot(self) -> Snapshot:
        """Return the counts of the queue at this moment."""
        with self._turn:
            return self._scheduler.snapshot()

    def check_room(self, client_id: str, patches: int) -> None:
        """Raise `OverloadedError` if an image of so many patches would be refused now."""
        with self._turn:
            self._scheduler.check_room(client_id, patches)

    def submit(self, key: ImageKey, source: Source, grid: Grid, claim: Claim, *, apart: bool) -> Job:
        """Queue an image, to be decoded in a batch or `apart`, or join its job; `wake` tells the stages.

        Raises `OverloadedError` when the queue is full.
        """
        with self._turn:
            if (job := self._join(key.address, claim)) is not None:
                return job
            if self._closed:
                raise UnavailableError("the server is shutting down: use another one")
            now = monotonic()
            size, pixels = len(source.data), source.header.pixels
            self._scheduler.admit(
                claim, key.address, grid.patches, size, now, source_pixels=pixels, apart=apart
            )
            assert claim.work is not None
            job = self._jobs[key.address] = Job(key, source, grid, claim.work, now)
            if self._device_waits and self._idle_since is None:
                self._idle_since = now
        return job

    def wake(self) -> None:
        """Let stages that wait for work look again."""
        with self._turn:
            self._turn.notify_all()

    def join(self, address: bytes, claim: Claim) -> Job | None:
        """Join the job of `address`, if there is one: a Fetch thereby makes it demanded."""
        with self._turn:
            return self._join(address, claim)

    def withdraw(self, claim: Claim) -> Job | None:
        """End a claim; return the job if nobody wants it any more and it is in no batch yet: it is dropped."""
        with self._turn:
            work = self._scheduler.withdraw(claim)
            if work is None:
                return None
            if not self._scheduler.waiting_images:
                self._idle_since = None
            self._turn.notify_all()
            return self._jobs.pop(work.address, None)  # None: it ended when the desk closed

    def finish(self, job: Job) -> bool:
        """Forget a job that has its outcome; False if that has happened: everyone had left it, or the desk closed."""
        with self._turn:
            return self._forget(job)

    def close(self) -> None:
        """Let no more work in or out; `take` and `take_batch` return nothing from here on."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def jobs(self) -> list[Job]:
        """Return the jobs that have no outcome yet."""
        with self._turn:
            return list(self._jobs.values())

    def take_to_prepare(self, max_patches: int, max_images: int, max_pixels: int) -> list[Job]:
        """Wait for images to decode together and return them; one alone while the device waits. None when closed."""

        def pick(scheduler: Scheduler, now: float) -> Sequence[Task]:
            most = 1 if self._device_waits else max_images
            return scheduler.next_to_prepare(now, max_patches, most, max_pixels)

        with self._turn:
            return self._take(pick)

    def take_apart(self, max_pixels: int) -> list[Job]:
        """Wait for an image to decode by itself and return it; none when closed. `taken_apart` gives its room back.

        At most `max_pixels` are out at a time, or one image that is larger.
        """

        def pick(scheduler: Scheduler, now: float) -> Sequence[Task]:
            room = max_pixels - self._apart_pixels if self._apart_pixels else math.inf
            works = scheduler.next_apart(now, room)
            self._apart_pixels += sum(work.source_pixels for work in works)
            return works

        with self._turn:
            return self._take(pick)

    def taken_apart(self, job: Job) -> None:
        """Say that a job from `take_apart` needs no pixels any more."""
        with self._turn:
            self._apart_pixels -= job.work.source_pixels
            self._turn.notify_all()

    def put_apart(self, job: Job) -> None:
        """Say that the batch decoder could not read a job's image: it is to be decoded by itself."""
        with self._turn:
            self._scheduler.put_apart(job.work, monotonic())
            self._turn.notify_all()

    def prepared(self, jobs: Sequence[tuple[Job, Tensor]], ready: "torch.cuda.Event | None") -> None:
        """Say that the patches of these jobs are there, on CUDA once `ready` passes."""
        with self._turn:
            for job, patches in jobs:
                if self._scheduler.prepared(job.work, monotonic()):
                    job.patches, job.patches_ready = patches, ready
            self._turn.notify_all()

    def take_batch(self, budget_patches: int) -> tuple[list[Job], float]:
        """Wait for the next batch; return it, and for how long the device waited although images were queued."""
        with self._turn:
            self._device_waits = True
            self._idle_since = monotonic() if self._scheduler.waiting_images else None
            jobs = self._take(lambda scheduler, now: scheduler.next_batch(now, budget_patches))
            self._device_waits = False
            starved_s = monotonic() - self._idle_since if self._idle_since is not None else 0.0
            return jobs, starved_s

    def encoded(self, works: Sequence[Task], seconds: float) -> None:
        """Say that a batch is through, and how long the device was busy with it."""
        with self._turn:
            self._scheduler.done(works, seconds)
            self._turn.notify_all()

    def failed(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """Say that a batch failed; return the jobs to blame, and those forgotten because nobody wants them any more.

        The others are tried again in smaller batches.
        """
        with self._turn:
            ended = self._scheduler.failed([job.work for job in jobs])
            self._turn.notify_all()
            return (list(jobs), []) if len(jobs) == 1 else ([], self._abandoned(jobs, ended))

    def put_back(self, jobs: Sequence[Job]) -> list[Job]:
        """Say that jobs of a batch have to wait for another; return those forgotten because nobody wants them."""
        with self._turn:
            ended = self._scheduler.put_back([job.work for job in jobs])
            self._turn.notify_all()
            return self._abandoned(jobs, ended)

    def drop(self, job: Job) -> None:
        """Say that a job needs no encoding any more."""
        with self._turn:
            self._scheduler.drop(job.work)
            self._turn.notify_all()

    def _join(self, address: bytes, claim: Claim) -> Job | None:
        job = self._jobs.get(address)
        if job is not None and claim.work is None:
            self._scheduler.claim(claim, address, monotonic())
            if claim.demanded:
                self._turn.notify_all()  # what was a guess may be decoded now, however many guesses are ahead
        return job

    def _abandoned(self, jobs: Sequence[Job], ended: Sequence[Task]) -> list[Job]:
        abandoned = [job for job in jobs if job.work in ended]
        for job in abandoned:
            self._forget(job)  # now: who comes for it from here on shall not share a neighbour's failure
        return abandoned

    def _forget(self, job: Job) -> bool:
        if self._jobs.get(job.address) is not job:
            return False
        del self._jobs[job.address]
        return True

    def _take(self, pick: Pick) -> list[Job]:
        while not self._closed:
            works = pick(self._scheduler, monotonic())
            if works:
                self._turn.notify_all()  # what moved may have made room for another stage
                return [self._jobs[work.address] for work in works]
            self._turn.wait()
        return []
