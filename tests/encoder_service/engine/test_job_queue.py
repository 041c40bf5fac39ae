"""The desk and its scheduler, in any order of events: every job ends, and its image can come again."""

import threading
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from encoder_contract.geometry import Grid
from encoder_contract.header import read_header
from encoder_service.address import ImageKey
from encoder_service.engine.job_queue import Job, JobQueue
from encoder_service.image.source import Source
from encoder_service.scheduler import Claim, Limits, Scheduler, State
from testing.photos import photo

GRID = Grid(1, 4, 4)
FILE = photo(64, 64, 1)
HEADER = read_header(FILE)
PATCHES = torch.empty(0)
ADDRESSES = st.sampled_from([bytes([n]) * 32 for n in range(4)])
NO_LIMITS = Limits(images=10**6, patches=10**9, source_bytes=10**9, claims=10**6)


def new_desk(limits: Limits = NO_LIMITS, ahead_images: int = 10**6) -> JobQueue:
    return JobQueue(Scheduler(limits, max_ahead_patches=10**9, max_ahead_images=ahead_images))


def submit(desk: JobQueue, address: bytes, claim: Claim, *, apart: bool = False) -> Job:
    return desk.submit(ImageKey(address, bytes(32)), Source(address, FILE, HEADER), GRID, claim, apart=apart)


class DeskMachine(RuleBasedStateMachine):
    """Callers, stages and outcomes in any order, as the pipeline's threads and loop would make them."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.desk = new_desk()
        self.made: list[Job] = []
        self.ended: list[Job] = []  # told to have ended: each job once
        self.preparing: list[Job] = []
        self.batches: list[list[Job]] = []
        self.outcomes: list[Job] = []  # on their way from a thread to the event loop

    @rule(
        target=claims,
        address=ADDRESSES,
        is_demand=st.booleans(),
        name=st.sampled_from("abc"),
        apart=st.booleans(),
    )
    def submit(self, address: bytes, is_demand: bool, name: str, apart: bool) -> Claim:
        claim = Claim(name, name, demanded=is_demand)
        job = submit(self.desk, address, claim, apart=apart)
        if job not in self.made:
            self.made.append(job)
        assert job not in self.ended
        assert claim.work is not None or job in self.outcomes, "a caller waits for work, or for an outcome"
        return claim

    @rule(target=claims, address=ADDRESSES)
    def join(self, address: bytes) -> Claim:
        claim = Claim("d", "d", demanded=True)
        job = self.desk.join(address, claim)
        assert job is None or claim.work is not None or job in self.outcomes
        return claim

    @rule(claim=claims)
    def withdraw(self, claim: Claim) -> None:
        if (job := self.desk.withdraw(claim)) is not None:
            self.end(job)

    @precondition(lambda self: self.count(State.WAITING))
    @rule(images=st.integers(1, 3))
    def take_to_prepare(self, images: int) -> None:
        self.preparing += self.desk.take_to_prepare(10**6, images, 10**9)

    @precondition(lambda self: self.count(State.APART))
    @rule()
    def take_apart(self) -> None:
        (job,) = self.desk.take_apart(10**9)
        self.desk.taken_apart(job)
        self.preparing.append(job)

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def put_apart(self, data: st.DataObject) -> None:
        self.desk.put_apart(self.take(data, self.preparing))

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def prepared(self, data: st.DataObject) -> None:
        job = self.take(data, self.preparing)
        self.desk.prepared([(job, PATCHES)], None)

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        job = self.take(data, self.preparing)
        self.desk.drop(job)
        self.outcomes.append(job)

    @precondition(lambda self: self.count(State.PREPARED) + self.count(State.SPLIT))
    @rule(images=st.integers(1, 4))
    def take_batch(self, images: int) -> None:
        jobs, _ = self.desk.take_batch(images * GRID.patches)
        assert jobs
        self.batches.append(jobs)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def encoded(self, data: st.DataObject) -> None:
        jobs = self.take(data, self.batches)
        self.desk.encoded([job.work for job in jobs], 0.1)
        self.outcomes += jobs

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        blamed, abandoned = self.desk.failed(self.take(data, self.batches))
        self.outcomes += blamed
        for job in abandoned:
            self.end(job)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        jobs = self.take(data, self.batches)
        kept = data.draw(st.integers(0, len(jobs)))
        for job in self.desk.put_back(jobs[kept:]):
            self.end(job)
        if jobs[:kept]:
            self.batches.append(jobs[:kept])

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        job = self.take(data, self.outcomes)
        if self.desk.finish(job):
            self.end(job)

    @invariant()
    def every_job_is_under_way_or_has_ended(self) -> None:
        open_jobs = self.desk.jobs()
        assert set(self.made) == set(open_jobs) | set(self.ended)
        for job in open_jobs:
            if job.work.state is State.GONE:
                assert job in self.outcomes, "its outcome is on its way"
            else:
                assert job.work.claims or job.work.state is State.ENCODING, "somebody wants it"

    def teardown(self) -> None:
        """Let everything under way end; then every image can come again, and is made."""
        self.work_off()
        assert not self.desk.jobs()
        assert set(self.made) == set(self.ended)
        empty = self.desk.snapshot()
        assert (empty.claims, empty.requests, empty.clients, empty.source_bytes) == (0, 0, 0, 0)
        for job in {job.address: job for job in self.made}.values():
            again = submit(self.desk, job.address, Claim("again", "again"))
            assert again.work.claims
            self.made.append(again)
        self.work_off()
        assert set(self.made) == set(self.ended)

    def work_off(self) -> None:
        while self.count(State.WAITING):
            self.preparing += self.desk.take_to_prepare(10**6, 10**6, 10**9)
        while self.count(State.APART):
            self.take_apart()
        self.desk.prepared([(job, PATCHES) for job in self.preparing], None)
        self.preparing.clear()
        while self.count(State.PREPARED) + self.count(State.SPLIT):
            self.batches.append(self.desk.take_batch(10**6)[0])
        for jobs in self.batches:
            self.desk.encoded([job.work for job in jobs], 0.1)
            self.outcomes += jobs
        self.batches.clear()
        while self.outcomes:
            job = self.outcomes.pop()
            if self.desk.finish(job):
                self.end(job)

    def end(self, job: Job) -> None:
        assert job not in self.ended, "a job ends once"
        self.ended.append(job)

    def count(self, state: State) -> int:
        images = self.desk.snapshot().images
        return images[state, True] + images[state, False]

    def take(self, data: st.DataObject, among: list[Any]) -> Any:
        return among.pop(data.draw(st.integers(0, len(among) - 1)))


DeskMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestDesk = DeskMachine.TestCase


def test_a_guess_that_becomes_demanded_is_decoded_although_guesses_fill_what_may_be_ahead() -> None:
    desk = new_desk(ahead_images=1)
    address = bytes(32)
    submit(desk, b"ahead", Claim("a", "a"))
    desk.prepared([(job, PATCHES) for job in desk.take_to_prepare(10**6, 1, 10**9)], None)
    submit(desk, address, Claim("b", "b"))
    taken: list[Job] = []
    stage = threading.Thread(target=lambda: taken.extend(desk.take_to_prepare(10**6, 1, 10**9)), daemon=True)
    stage.start()
    stage.join(0.2)
    assert stage.is_alive(), "one guess ahead is all there may be"
    desk.join(address, Claim("c", "c", demanded=True))
    stage.join(20)
    assert [job.address for job in taken] == [address]
