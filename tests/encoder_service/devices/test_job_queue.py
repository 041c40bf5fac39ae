"""The job queue and its scheduler under any order of events: every job ends, and its image can be submitted again."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from encoder_contract.errors import EncoderError, InternalError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_contract.header import read_header
from encoder_service.devices.job_queue import Job, JobQueue
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from encoder_service.scheduler import Claim, QueueLimits, Scheduler, State
from encoder_service.store import Pin, Store
from testing.photos import photo

pytestmark = pytest.mark.slow

GRID = Grid(1, 4, 4)
FILE = photo(64, 64, 1)
HEADER = read_header(FILE)
SINGLE = b"to be decoded by itself"
ADDRESSES = st.sampled_from([bytes([n]) * 32 for n in range(4)])
NO_LIMITS = QueueLimits(images=10**6, patches=10**9, source_bytes=10**9, claims=10**6)


OUTCOME = UnavailableError("it ended")


class Posts:
    """An event loop that runs nothing by itself."""

    def call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Ignore the call: nothing is dispatched here."""

    def call_later(self, _seconds: float, function: Callable[[], None]) -> None:
        """Ignore the call."""


def key_of(address: bytes) -> ImageKey:
    return ImageKey(address, address)


def new_queue(
    on_end: Callable[[Job, Pin | EncoderError], None] = lambda _job, _outcome: None,
    on_gone: Callable[[Job], None] = lambda _job: None,
) -> JobQueue:
    queue = JobQueue(
        Scheduler(NO_LIMITS, max_ahead_patches=10**9, max_ahead_images=10**6),
        lambda source: source.key != SINGLE,
        cast(Store, SimpleNamespace(contains=lambda _address: False)),
        loop=cast(asyncio.AbstractEventLoop, Posts()),
        on_end=on_end,
    )
    queue.on_gone = on_gone
    return queue


def submit(queue: JobQueue, address: bytes, claim: Claim, *, single: bool = False) -> Job:
    job = queue.submit(key_of(address), Source(SINGLE if single else b"", FILE, HEADER), GRID, claim)
    assert job is not None
    return job


class QueueMachine(RuleBasedStateMachine):
    """Callers, stages and outcomes in any order that the devices and the callers can produce."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[Job] = set()
        self.queue = new_queue(self.end, self.gone.add)
        self.made: list[Job] = []
        self.ended: list[Job] = []  # jobs in the order of their reported ends, each once
        self.told: list[Job] = []  # jobs whose waiter was called
        self.preparing: list[Job] = []
        self.batches: list[list[Job]] = []

    @rule(
        target=claims,
        address=ADDRESSES,
        is_demand=st.booleans(),
        name=st.sampled_from("abc"),
        single=st.booleans(),
    )
    def submit(self, address: bytes, is_demand: bool, name: str, single: bool) -> Claim:
        claim = Claim(name, name, demanded=is_demand)
        job = submit(self.queue, address, claim, single=single)
        if job not in self.made:
            self.made.append(job)
            self.queue.watch(job, lambda _: self.told.append(job))
        assert job not in self.ended
        assert claim.task is not None, "a caller waits for work"
        return claim

    @rule(target=claims, address=ADDRESSES)
    def join(self, address: bytes) -> Claim:
        claim = Claim("d", "d", demanded=True)
        try:
            job = self.queue.join(key_of(address), claim)
        except InternalError:
            assert address in [job.key.address for job in self.ended], "it ended three devices"
        else:
            assert job is None or claim.task is not None
        return claim

    @rule(claim=claims)
    def withdraw(self, claim: Claim) -> None:
        self.queue.withdraw(claim)

    @precondition(lambda self: self.count(State.WAITING))
    @rule(images=st.integers(1, 3))
    def next_to_prepare(self, images: int) -> None:
        self.preparing += self.queue.scheduler.next_to_prepare(0.0, images, 10**9)

    @precondition(lambda self: self.count(State.SINGLE))
    @rule()
    def next_single(self) -> None:
        jobs = self.queue.scheduler.next_single(0.0, 10**9)
        assert len(jobs) == 1 or any(job.interruptions for job in self.queue._jobs.values())
        self.preparing += jobs

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def retry_single(self, data: st.DataObject) -> None:
        self.queue.scheduler.retry_single(self.take(data, self.preparing), 0.0)

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def prepared(self, data: st.DataObject) -> None:
        self.queue.prepared(self.take(data, self.preparing))

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.queue.end(self.take(data, self.preparing), OUTCOME)

    @precondition(lambda self: self.count(State.PREPARED) + self.count(State.SPLIT))
    @rule(images=st.integers(1, 4))
    def next_batch(self, images: int) -> None:
        jobs = self.queue.scheduler.next_batch(0.0, images * GRID.patches)
        assert jobs
        self.batches.append(jobs)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def encoded(self, data: st.DataObject) -> None:
        self.encode(self.take(data, self.batches))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        self.queue.failed(self.take(data, self.batches), OUTCOME)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        jobs = self.take(data, self.batches)
        kept = data.draw(st.integers(0, len(jobs)))
        self.queue.put_back(jobs[kept:])
        if jobs[:kept]:
            self.batches.append(jobs[:kept])

    @rule()
    def interrupted(self) -> None:
        """Lose the device: it has nothing any more."""
        self.queue.interrupted(0)
        self.preparing.clear()
        self.batches.clear()

    @invariant()
    def every_job_is_under_way_or_has_ended(self) -> None:
        open_jobs = set(self.queue._jobs.values())
        assert set(self.made) == open_jobs | set(self.ended)
        assert not open_jobs & set(self.ended)
        assert set(self.told) == set(self.ended) == self.gone
        assert len(self.told) == len(self.ended)
        for job in open_jobs:
            assert job.state is not State.GONE
            assert job.claims or job.state is State.ENCODING, "somebody wants it"

    def teardown(self) -> None:
        """Finish all jobs; then every image can be submitted and encoded again."""
        self.work_off()
        assert not self.queue
        assert set(self.made) == set(self.ended)
        empty = self.queue.scheduler.snapshot()
        assert (empty.claims, empty.requests, empty.clients, empty.source_bytes) == (0, 0, 0, 0)
        for job in {job.key: job for job in self.made}.values():
            again = submit(self.queue, job.key.address, Claim("again", "again"))
            assert again.claims
            self.made.append(again)
        self.work_off()
        assert set(self.made) == set(self.ended)

    def work_off(self) -> None:
        """Let the device work on everything that is left: an interrupted image once nothing else is."""
        while self.queue:
            self.preparing += self.queue.scheduler.next_to_prepare(0.0, 10**6, 10**9)
            self.preparing += self.queue.scheduler.next_single(0.0, 10**9)
            while self.count(State.PREPARED) + self.count(State.SPLIT):
                self.batches.append(self.queue.scheduler.next_batch(0.0, 10**6))
            assert self.preparing or self.batches, "the device is never idle"
            for job in self.preparing:
                self.queue.prepared(job)
            self.preparing.clear()
            for jobs in self.batches:
                self.encode(jobs)
            self.batches.clear()

    def encode(self, jobs: list[Job]) -> None:
        self.queue.encoded(jobs, [OUTCOME] * len(jobs), 0.1)

    def end(self, job: Job, _outcome: Pin | EncoderError) -> None:
        assert job not in self.ended, "a job ends once"
        self.ended.append(job)

    def count(self, state: State) -> int:
        images = self.queue.scheduler.snapshot().images
        return images[state, True] + images[state, False]

    def take(self, data: st.DataObject, among: list[Any]) -> Any:
        return among.pop(data.draw(st.integers(0, len(among) - 1)))


QueueMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase
