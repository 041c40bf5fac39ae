"""Thousands of random schedules against a naive model, and whole deployments in simulation."""

import random
from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation.simulator import Machine, RequestLoad, Simulation
from bench.simulation.trials import POLICIES
from encoder_contract.errors import OverloadedError
from encoder_service.scheduler import Claim, QueueLimits, Scheduler, State, Task, least_work_left
from encoder_service.scheduler.policy import STRETCH, allowance
from encoder_service.scheduler.scheduler import MOST_COST
from tests.scheduling import PATCHES, ROOMY, make

pytestmark = pytest.mark.slow


@dataclass
class Model:
    """What a slow, obvious scheduler would know, from the same calls."""

    clock: int = 0
    clocks: dict[str, int] = field(default_factory=dict)  # by holder
    marks: dict[tuple[str, str], int] = field(default_factory=dict)
    # By stage and class: the charge of each holder, and the tag of the holder that was served last.
    charged: dict[tuple[State, bool], dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    served: dict[tuple[State, bool], float] = field(default_factory=lambda: defaultdict(float))
    payers: dict[int, list[tuple[bool, str]]] = field(default_factory=dict)

    def named(self, claim: Claim, live: list[Claim]) -> None:
        name = claim.holder, claim.request_id
        clock = self.clocks.setdefault(claim.holder, self.clock)
        others = [c for c in live if c.task and c is not claim and (c.holder, c.request_id) == name]
        if claim.task not in [c.task for c in others]:
            self.marks[name] = clock

    def tag(self, state: State, claim: Claim) -> float:
        stage = state, claim.demanded
        return max(self.served[stage], self.charged[stage].get(claim.holder, 0))

    def rank(self, task: Task, live: list[Claim], now: float, holder: str | None = None) -> tuple:
        ranks = []
        for claim in (c for c in live if c.task is task and holder in (None, c.holder)):
            name = claim.holder, claim.request_id
            tasks = {c.task for c in live if (c.holder, c.request_id) == name and c.task}
            due = self.marks[name] + allowance(sum(t.patches for t in tasks), claim.request.scale)
            ahead = claim.demanded and claim.needed_at is not None and claim.needed_at > now
            ranks.append((not claim.demanded, self.tag(task.state, claim), -claim.priority, ahead, due))
        return min(ranks)

    def take(self, state: State, task: Task, left: list[Task]) -> None:
        tags = {(c.demanded, c.holder): self.tag(state, c) for c in task.claims}
        waiting = [self.tag(state, c) for t in left for c in t.claims if c.demanded == task.demanded]
        self.served[state, task.demanded] = max(self.served[state, task.demanded], min(waiting))
        self.payers[id(task)] = list(tags)
        for (kind, holder), tag in tags.items():
            self.charged[state, kind][holder] = tag + task.patches

    def done(self, batch: list[Task], cost: float, live: list[Claim], tasks: list[Task]) -> None:
        """Charge the difference between the time of a batch and its patches, where anybody waits or is worked on."""
        for task in batch:
            for state, worked_on in WORKED_ON.items():
                is_busy = any(t.state in worked_on for t in tasks)
                for demanded, holder in self.payers[id(task)]:
                    stage = state, demanded
                    waits = any(c.task and c.task.state is state and c.demanded is demanded for c in live)
                    if is_busy or waits:
                        tag = max(self.served[stage], self.charged[stage].get(holder, 0))
                        self.charged[stage][holder] = tag + (cost - 1) * task.patches

    def started(self, task: Task, claims: list[Claim]) -> None:
        self.clock += task.patches
        for holder in {c.holder for c in claims}:
            self.clocks[holder] += task.patches

    def forget(self, live: list[Claim], tasks: list[Task]) -> None:
        self.clocks = {holder: self.clocks[holder] for holder in {c.holder for c in live}}
        for state, worked_on in WORKED_ON.items():
            for demanded in (False, True):
                waits = any(c.task.state is state and c.demanded is demanded for c in live)
                if not waits and not any(t.state in worked_on for t in tasks):
                    self.charged[state, demanded].clear()
                    self.served[state, demanded] = 0


WORKED_ON = {State.WAITING: (State.PREPARING,), State.PREPARED: (State.ENCODING, State.SPLIT)}
LIMITS = QueueLimits(images=12, patches=1500, source_bytes=9000, claims=25, client_share=0.6)
AHEAD_PATCHES, AHEAD_IMAGES, BUDGET = 300, 4, 250


class Schedule:
    """A random schedule of calls, with every answer checked against the model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler(LIMITS, max_ahead_patches=AHEAD_PATCHES, max_ahead_images=AHEAD_IMAGES)
        self.model = Model()
        self.now = 0.0
        self.live: list[Claim] = []
        self.preparing: list[Task] = []
        self.batches: list[list[Task]] = []
        self.outcomes: dict[int, str] = {}  # id of a task -> its one outcome
        self.tasks: list[Task] = []  # keeps identities unique

    def play(self, steps: int) -> None:
        choices = (self.submit, self.submit, self.withdraw, self.prepare, self.prepared, self.start, self.end)
        for _ in range(steps):
            self.now += self.random.choice((0.0, 0.1, 1.0))
            self.random.choice(choices)()
            self.check()
        while any(claim.task for claim in self.live) or self.batches or self.preparing:
            for step in (self.prepare, self.prepared, self.start, self.end):
                step()
                self.check()
        empty = self.scheduler.snapshot()
        assert (empty.requests, empty.clients, empty.claims, empty.source_bytes) == (0, 0, 0, 0)
        assert all(id(task) in self.outcomes for task in self.tasks)

    def outcome(self, task: Task, what: str) -> None:
        assert id(task) not in self.outcomes, (what, self.outcomes[id(task)])
        assert task.state is State.GONE
        self.outcomes[id(task)] = what

    def submit(self) -> None:
        pick = self.random
        address = bytes([pick.randrange(20)])
        claim = Claim(
            f"r{pick.randrange(5)}", f"c{pick.randrange(3)}", pick.choice((0, 0, 1)), pick.randrange(4),
            pick.choice((None, self.now, self.now + 2)), demanded=pick.random() < 0.7,
        )  # fmt: skip
        held = [t for t in self.tasks if t.address == address and t.state is not State.GONE]
        try:
            new = self.scheduler.admit(claim, Task(address, 20 + 10 * address[0], 1000), self.now)
        except OverloadedError:
            assert claim.task is None
            return
        assert new == (not held)
        if new:
            self.tasks.append(claim.task)
        else:
            assert claim.task is held[0]
        self.live.append(claim)
        self.model.named(claim, self.live)

    def withdraw(self) -> None:
        if self.live:
            claim = self.live.pop(self.random.randrange(len(self.live)))
            task = claim.task
            dropped = self.scheduler.withdraw(claim)
            if dropped is not None:
                assert dropped is task
                self.outcome(dropped, "dropped")

    def took(self, state: State, take: Callable[[], list[Task]]) -> list[Task]:
        """Return the tasks that `take` moves out of `state`; each must have been the best in that state."""
        left = [t for t in self.tasks if t.state is state and t.claims]
        taken = take()
        now = [(task, task.state) for task in left]
        for task, _ in now:
            task.state = state
        for at, task in enumerate(taken):
            ranks = {id(t): self.model.rank(t, self.live, self.now) for t in left}
            if ranks[id(task)] != (first := min(ranks.values())):
                assert state is State.WAITING
                best = [t for t in left if ranks[id(t)] == first]
                self.check_passing(task, best, left, taken[:at])
            self.model.take(state, task, left)
            left.remove(task)
        for task, after in now:
            task.state = after
        return taken

    def check_passing(self, task: Task, best: list[Task], left: list[Task], taken: list[Task]) -> None:
        """Check that a task which is none of the best may be decoded.

        There is no room for a best one, and the task is the first of a holder that has nothing decoded.
        """
        decoded = [t for t in self.tasks if t.state is State.PREPARED]
        ahead = [t for t in self.tasks if t.state is State.PREPARING] + decoded + taken
        asked = [t for t in ahead if t.demanded]

        def holders(t: Task) -> set[str]:
            return {c.holder for c in t.claims if c.demanded}

        def fits(tasks: list[Task], t: Task, times: int) -> bool:
            patches = sum(other.patches for other in tasks) + t.patches
            return len(tasks) < times * AHEAD_IMAGES and patches <= times * AHEAD_PATCHES

        def is_first(holder: str) -> bool:
            own = [t for t in left if holder in holders(t)]
            ranks = {id(t): self.model.rank(t, self.live, self.now, holder) for t in own}
            return ranks[id(task)] == min(ranks.values())

        assert ahead, "an idle device decodes the best"
        assert not all(fits(asked if t.demanded else ahead, t, 1) and fits(ahead, t, 2) for t in best)
        assert fits(ahead, task, 2)
        idle = holders(task) - {holder for t in decoded for holder in holders(t)}
        assert any(is_first(holder) for holder in idle)

    def prepare(self) -> None:
        self.preparing += self.took(State.WAITING, lambda: self.scheduler.next_to_prepare(self.now, 3))

    def prepared(self) -> None:
        if self.preparing:
            task = self.preparing.pop(self.random.randrange(len(self.preparing)))
            if self.random.random() < 0.1 and task.state is State.PREPARING:
                self.scheduler.drop(task)
                self.outcome(task, "not decoded")
            else:
                assert self.scheduler.prepared(task, self.now) == (id(task) not in self.outcomes)

    def start(self) -> None:
        retry = any(t.state is State.SPLIT for t in self.tasks)
        is_ready = any(t.state is State.PREPARED and t.claims for t in self.tasks)

        def next_batch() -> list[Task]:
            return self.scheduler.next_batch(self.now, BUDGET)

        batch = next_batch() if retry else self.took(State.PREPARED, next_batch)
        assert bool(batch) == (is_ready or retry), "work-conserving"
        if not batch:
            return
        assert all(t.claims for t in batch), "a departed task is never batched"
        assert len({t.demanded for t in batch}) == 1 or retry
        assert len(batch) == 1 or sum(t.patches for t in batch) <= BUDGET
        for task in batch:
            self.model.started(task, list(task.claims))
        self.batches.append(batch)

    def end(self) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(self.random.randrange(len(self.batches)))
        if self.random.random() < 0.8:
            seconds = self.random.choice((0.05, 0.1, 0.2))
            working = [t for t in self.tasks if t.state is not State.GONE]
            rate, patches = copy(self.scheduler._admission.rate), sum(task.patches for task in batch)
            rate.add(patches, seconds)
            self.model.done(batch, min(seconds * rate.patches_per_s / patches, MOST_COST), self.live, working)
            self.scheduler.done(batch, seconds)
            for task in batch:
                self.outcome(task, "encoded")
        else:
            departed = [task for task in batch if not task.claims]
            ended = self.scheduler.failed(batch)
            assert set(departed) <= set(ended), "who is not tried again has ended"
            for task in ended:
                self.outcome(task, "failed")

    def check(self) -> None:
        self.live = [claim for claim in self.live if claim.task]
        self.model.forget(self.live, self.tasks)
        held = [t for t in self.tasks if t.state is not State.GONE]
        assert len({t.address for t in held}) == len(held), "single flight"
        snapshot = self.scheduler.snapshot()
        assert sum(snapshot.images.values()) == len(held) <= LIMITS.images
        assert sum(snapshot.patches.values()) == sum(t.patches for t in held) <= LIMITS.patches
        assert snapshot.source_bytes == sum(t.source_bytes for t in held) <= LIMITS.source_bytes
        assert snapshot.claims == len(self.live) <= LIMITS.claims
        ahead = [t for t in held if t.state in (State.PREPARING, State.PREPARED)]
        assert len(ahead) <= 2 * AHEAD_IMAGES
        assert sum(t.patches for t in ahead) <= 2 * AHEAD_PATCHES


@pytest.mark.parametrize("block", range(10))
def test_random_schedules_agree_with_a_naive_model(block):
    for seed in range(250 * block, 250 * (block + 1)):
        Schedule(seed).play(80)


# A flood of small requests


def finish_clock(stretch: int, small_patches: list[int]) -> tuple[int, float]:
    """Let small requests flood the queue from the moment a big one is demanded.

    Return the patches encoded until the big one is done, and the bound that the documentation states.
    """
    limits, ahead = replace(ROOMY, patches=40 * PATCHES, client_share=0.99), 2 * PATCHES
    scheduler = make(limits, ahead, 10, least_work_left(stretch))
    for number in range(50):  # so that the scheduler knows what an ordinary request is: one small image
        scheduler.admit(Claim(f"w{number}", "warm"), Task(b"warm", PATCHES, 1000), 0.0)
        (task,) = scheduler.next_to_prepare(0.0, 10)
        scheduler.prepared(task, 0.0)
        scheduler.done(scheduler.next_batch(0.0, PATCHES), 0.1)
    big = [Claim("big", "big", chunk=chunk, demanded=True) for chunk in range(10)]
    for claim in big:
        scheduler.admit(claim, Task(f"big{claim.chunk}".encode(), PATCHES, 1000), 0.0)
    encoded = number = 0
    while any(claim.task for claim in big) and encoded < 10**6:
        try:
            while True:
                number += 1
                patches = small_patches[number % len(small_patches)]
                small = Claim(f"s{number}", "big", demanded=True)
                scheduler.admit(small, Task(f"s{number}".encode(), patches, 1000), 0.0)
        except OverloadedError:
            pass
        for task in scheduler.next_to_prepare(0.0, 10):
            scheduler.prepared(task, 0.0)
        batch = scheduler.next_batch(0.0, PATCHES)
        encoded += sum(task.patches for task in batch)
        scheduler.done(batch, 0.1)
    return encoded, allowance(10 * PATCHES, 2 * PATCHES, stretch) + limits.patches + 2 * ahead


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(20, PATCHES), min_size=1, max_size=20))
def test_a_big_request_meets_its_bound_under_a_flood_of_small_ones(small_patches):
    encoded, bound = finish_clock(STRETCH, small_patches)
    assert encoded <= bound


def test_without_ageing_the_flood_breaks_the_bound():
    encoded, _ = finish_clock(10**6, [PATCHES])
    assert encoded > finish_clock(STRETCH, [PATCHES])[1]


# The whole deployment in simulation


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(15))
def test_every_request_is_answered_or_refused_in_any_deployment(policy, seed):
    pick = random.Random(seed)
    load = RequestLoad({1: 3, 5: 2, 64: 1}, load=pick.choice((0.5, 0.9, 5.0)), burst=pick.choice((1, 6)), clients=5,
                image_patches=pick.choice((1, 3)), replicas=pick.choice((1, 3, 16)))  # fmt: skip
    limits = replace(ROOMY, images=pick.choice((80, 10**6)))
    machine = Machine(
        policy=policy, replicas=load.replicas, prefill_engines=pick.choice((1, 4)), limits=limits,
        images_per_chunk=pick.choice((1, 3)), budget_patches=pick.choice((1, 8)), max_ahead_patches=16,
        prepare_s=pick.choice((0.0, 0.5)), index_s=pick.choice((0.0, 0.1)),
    )  # fmt: skip
    jobs = load.jobs(60, seed)
    jobs += [type(job)(job.arrived_s + 1.0, job.images, "other") for job in jobs[::3]]  # shared images
    outcome = Simulation(machine, jobs).run()
    answered = [job for job, ttft in zip(jobs, outcome.ttft_s, strict=True) if ttft is not None]
    images = {image.address for job in answered for image in job.images}
    assert outcome.most_queued_images <= limits.images
    assert outcome.encodes >= len(images)
    if not outcome.retry_after_ms:
        assert len(answered) == len(jobs)
        assert outcome.encodes == len(images), "each image is encoded once"
    assert all(hint > 0 for hint in outcome.retry_after_ms)


def test_least_work_left_halves_the_mean_of_first_come_on_skewed_sizes():
    load = RequestLoad({1: 6, 2: 4, 4: 3, 8: 2, 16: 1, 32: 1})
    jobs = load.jobs(2000, seed=3)
    means = {}
    for policy in POLICIES:
        ttft = Simulation(Machine(policy=policy), jobs).run().ttft_s
        means[policy.name] = sum(ttft) / len(ttft)
    assert 2 * means["least-work-left"] < means["first-come"]
    assert means["least-work-left"] == min(means.values())
