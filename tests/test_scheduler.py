"""The scheduler against its promises: order, batches, single flight, bounds, no starvation."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator import Load, Machine, Simulation
from encoder_contract.errors import OverloadedError
from encoder_service.scheduler import (
    LEAST_WORK_LEFT,
    POLICIES,
    Claim,
    Limits,
    Scheduler,
    State,
    Work,
    least_work_left,
)
from encoder_service.scheduler.policy import STRETCH

PATCHES = 100
ROOMY = Limits(images=10**6, patches=10**9, source_bytes=10**12, claims=10**6)


def make(limits=ROOMY, ahead_patches=10**6, ahead_images=10**6, policy=LEAST_WORK_LEFT) -> Scheduler:
    return Scheduler(limits, max_ahead_patches=ahead_patches, max_ahead_images=ahead_images, policy=policy)


def want(scheduler, address, request="r", *, patches=PATCHES, now=0.0, shape=(), **claim) -> Claim:
    claim = Claim(request, claim.pop("client", "c"), **{"demanded": True, **claim})
    scheduler.admit(claim, address.encode(), patches, 1000, now, shape)
    return claim


def prepare_all(scheduler, now=0.0) -> None:
    while works := scheduler.next_to_prepare(now, 10**9, 10**6):
        for work in works:
            assert scheduler.prepared(work, now)


def names(works) -> list[str]:
    return [work.address.decode() for work in works]


def encode_order(scheduler, now=0.0) -> list[str]:
    """Return the addresses in the order in which they are encoded, one image a batch."""
    out = []
    while True:
        prepare_all(scheduler, now)
        batch = scheduler.next_batch(now, 1)
        if not batch:
            return out
        out += names(batch)
        scheduler.done(batch, 0.1)


def is_empty(scheduler) -> bool:
    now = scheduler.snapshot()
    return not (sum(now.images.values()) or sum(now.patches.values()) or now.source_bytes or now.requests
                or now.claims or now.clients)  # fmt: skip


# Order


def test_demanded_comes_before_speculative_whatever_its_priority():
    scheduler = make()
    want(scheduler, "guess", "a", priority=8, demanded=False)
    want(scheduler, "demand", "b", priority=-8)
    assert encode_order(scheduler) == ["demand", "guess"]


def test_a_higher_priority_comes_before_less_work():
    scheduler = make()
    want(scheduler, "small", "a", patches=1)
    want(scheduler, "urgent", "b", patches=500, priority=1)
    assert encode_order(scheduler) == ["urgent", "small"]


def test_the_request_with_the_least_work_left_comes_first_and_its_images_by_chunk():
    scheduler = make()
    for chunk in (2, 0, 1):
        want(scheduler, f"big{chunk}", "big", chunk=chunk)
    want(scheduler, "small", "small", chunk=5)
    assert encode_order(scheduler) == ["small", "big0", "big1", "big2"]


def test_work_that_is_done_makes_its_request_smaller():
    scheduler = make()
    for chunk in range(3):
        want(scheduler, f"a{chunk}", "a", chunk=chunk)
    prepare_all(scheduler)
    scheduler.done(scheduler.next_batch(0.0, 2 * PATCHES), 0.1)
    for chunk in range(2):  # two left against one left of a
        want(scheduler, f"b{chunk}", "b", chunk=chunk)
    assert encode_order(scheduler) == ["a2", "b0", "b1"]


def test_an_image_that_blocks_a_chunk_comes_before_one_ahead_of_need_until_that_is_due():
    scheduler = make()
    want(scheduler, "ahead", "small", needed_at=10.0)
    want(scheduler, "blocking1", "big", patches=500)
    want(scheduler, "blocking2", "big", patches=500, chunk=1)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(9.9, 1)) == ["blocking1"]
    assert names(scheduler.next_batch(10.0, 1)) == ["ahead"]
    assert names(scheduler.next_batch(10.0, 1)) == ["blocking2"]


def test_images_ahead_of_need_do_not_leave_the_device_idle():
    scheduler = make()
    want(scheduler, "later", needed_at=1e9)
    assert encode_order(scheduler) == ["later"]


def test_a_work_ranks_by_its_best_claim():
    scheduler = make()
    for chunk in range(4):
        want(scheduler, f"big{chunk}", "big", chunk=chunk)
    want(scheduler, "other", "other", patches=2 * PATCHES)
    want(scheduler, "big3", "tiny")
    assert encode_order(scheduler)[:2] == ["big3", "other"]


def test_a_fetch_promotes_speculative_work_wherever_it_waits():
    scheduler = make()
    for name in ("a", "b", "c"):
        want(scheduler, name, name, demanded=False)
    prepare_all(scheduler)
    want(scheduler, "c", "fetcher")
    assert names(scheduler.next_batch(0.0, 1)) == ["c"]


def test_withdrawing_the_demand_makes_the_work_speculative_again():
    scheduler = make()
    want(scheduler, "a", "submitter", demanded=False)
    fetch = want(scheduler, "a", "fetcher")
    want(scheduler, "b", "other", patches=500)
    prepare_all(scheduler)
    assert scheduler.withdraw(fetch) is None
    assert encode_order(scheduler) == ["b", "a"]


# Ageing


def finish_clock(stretch: int, small_patches: list[int]) -> tuple[int, int]:
    """Let small requests flood the queue from the moment a big one is demanded.

    Return the patches encoded until the big one is done, and the bound that the documentation states.
    """
    limits = Limits(images=10**6, patches=40 * PATCHES, source_bytes=10**12, claims=10**6, client_share=0.99)
    ahead = 2 * PATCHES
    scheduler = make(limits, ahead, 10, least_work_left(stretch))
    big = [want(scheduler, f"big{chunk}", "big", chunk=chunk) for chunk in range(10)]
    encoded = number = 0
    while any(claim.work for claim in big) and encoded < 10**6:
        try:
            while True:
                number += 1
                patches = small_patches[number % len(small_patches)]
                want(scheduler, f"s{number}", f"s{number}", patches=patches, client=f"c{number % 40}")
        except OverloadedError:
            pass
        for work in scheduler.next_to_prepare(0.0, 10**9, 10):
            scheduler.prepared(work, 0.0)
        batch = scheduler.next_batch(0.0, PATCHES)
        encoded += sum(work.patches for work in batch)
        scheduler.done(batch, 0.1)
    return encoded, stretch * 10 * PATCHES + limits.patches + 2 * ahead


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(20, PATCHES), min_size=1, max_size=20))
def test_a_big_request_is_done_within_the_stated_bound_under_a_flood_of_small_ones(small_patches):
    encoded, bound = finish_clock(STRETCH, small_patches)
    assert encoded <= bound


def test_without_ageing_the_flood_breaks_the_bound():
    encoded, _ = finish_clock(10**6, [PATCHES])
    assert encoded > finish_clock(STRETCH, [PATCHES])[1]


def test_a_request_identifier_used_for_ever_does_not_stay_the_oldest():
    scheduler = make()
    want(scheduler, "x0", "for-ever")
    rival = want(scheduler, "rival", "rival", patches=2 * PATCHES)
    for turn in range(1, 100):
        want(scheduler, f"x{turn}", "for-ever")  # named before the one before it is done
        prepare_all(scheduler)
        scheduler.done(scheduler.next_batch(0.0, 1), 0.1)
        if rival.work is None:
            break
    assert turn <= 2 * STRETCH


# Batches


def test_a_batch_is_the_longest_head_of_the_order_that_fits_the_budget():
    scheduler = make()
    for number, patches in enumerate((300, 300, 500, 100)):
        want(scheduler, f"{number}", chunk=number, patches=patches)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 1000)) == ["0", "1"]
    assert names(scheduler.next_batch(0.0, 1000)) == ["2", "3"]
    assert scheduler.next_batch(0.0, 1000) == []


def test_an_image_larger_than_the_budget_goes_alone():
    scheduler = make()
    want(scheduler, "huge", patches=5000)
    want(scheduler, "next", chunk=1)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 1000)) == ["huge"]


def test_equal_shapes_are_batched_together_when_asked_and_nothing_is_lost():
    scheduler = make()
    for number, shape in enumerate(((1, 2), (3, 4), (1, 2), (3, 4), (1, 2))):
        want(scheduler, f"{number}", chunk=number, shape=shape)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 1000, equal_shapes=True)) == ["0", "2", "4"]
    assert names(scheduler.next_batch(0.0, 1000, equal_shapes=True)) == ["1", "3"]


def test_speculative_work_joins_no_demanded_batch_and_makes_only_small_ones():
    scheduler = make()
    want(scheduler, "demand", "a")
    for number in range(8):
        want(scheduler, f"guess{number}", "b", demanded=False)
    prepare_all(scheduler)
    assert names(scheduler.next_batch(0.0, 8 * PATCHES)) == ["demand"]
    assert len(scheduler.next_batch(0.0, 8 * PATCHES)) == 2


def test_prepared_guesses_do_not_keep_a_demand_from_being_prepared():
    scheduler = make(ahead_patches=3 * PATCHES)
    for number in range(10):
        want(scheduler, f"guess{number}", "b", demanded=False)
    prepare_all(scheduler)
    want(scheduler, "demand", "a")
    assert names(scheduler.next_to_prepare(0.0, 10**9, 10)) == ["demand"]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_failed_batch_is_split_until_exactly_the_culprits_fail(count, data):
    culprits = {str(n) for n in data.draw(st.sets(st.integers(0, count - 1), max_size=3))}
    scheduler = make()
    for number in range(count):
        want(scheduler, str(number))
    prepare_all(scheduler)
    failed, encoded, runs = [], [], 0
    while batch := scheduler.next_batch(0.0, 10**9):
        runs += 1
        if culprits & set(names(batch)):
            failed += names(scheduler.failed(batch))
        else:
            encoded += names(batch)
            scheduler.done(batch, 0.1)
    assert set(failed) == culprits
    assert sorted(failed + encoded) == sorted(map(str, range(count)))
    assert runs <= max(1, 2 * count - 1)
    assert is_empty(scheduler)


def test_who_leaves_after_the_batch_failed_is_not_tried_again():
    scheduler = make()
    claims = [want(scheduler, str(number), chunk=number) for number in range(4)]
    prepare_all(scheduler)
    scheduler.failed(scheduler.next_batch(0.0, 10**9))
    assert names([scheduler.withdraw(claims[0])]) == ["0"]
    assert names(scheduler.next_batch(0.0, 10**9)) == ["1"]


# Single flight


def test_many_callers_share_one_work_and_only_the_last_withdrawal_drops_it():
    scheduler = make()
    claims = [want(scheduler, "a", f"r{number}") for number in range(5)]
    assert len({id(claim.work) for claim in claims}) == 1
    assert scheduler.snapshot().images[State.WAITING, True] == 1
    for claim in claims[:-1]:
        assert scheduler.withdraw(claim) is None
    assert names([scheduler.withdraw(claims[-1])]) == ["a"]
    assert is_empty(scheduler)


def test_work_that_is_being_encoded_goes_on_without_callers_and_new_ones_join_it():
    scheduler = make()
    first = want(scheduler, "a", "r1")
    prepare_all(scheduler)
    batch = scheduler.next_batch(0.0, 1000)
    assert scheduler.withdraw(first) is None
    late = Claim("r2", "c", demanded=True)
    assert scheduler.claim(late, b"a", 0.0)
    scheduler.done(batch, 0.1)
    assert late.work is None
    assert is_empty(scheduler)


def test_what_comes_back_from_decoding_after_everyone_left_is_refused_even_if_it_was_admitted_anew():
    scheduler = make()
    claim = want(scheduler, "a")
    (old,) = scheduler.next_to_prepare(0.0, 1000, 10)
    scheduler.withdraw(claim)
    again = want(scheduler, "a")
    assert not scheduler.prepared(old, 0.0)
    assert again.work is not old
    assert again.work.state is State.WAITING


def test_a_claim_on_an_address_that_nobody_admitted_is_not_attached():
    assert not make().claim(Claim("r", "c"), b"nowhere", 0.0)


# Random schedules against a naive model


@dataclass
class Model:
    """What a slow, obvious scheduler would know, from the same calls."""

    clock: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    arrivals: list[str] = field(default_factory=list)

    def named(self, claim: Claim, live: list[Claim]) -> None:
        others = [c for c in live if c.work and c is not claim and c.request_id == claim.request_id]
        if claim.work not in [c.work for c in others]:
            self.marks[claim.request_id] = self.clock

    def rank(self, work: Work, live: list[Claim], now: float) -> tuple:
        ranks = []
        for claim in (c for c in live if c.work is work):
            works = {c.work for c in live if c.request_id == claim.request_id and c.work}
            due = self.marks[claim.request_id] + STRETCH * sum(w.patches for w in works)
            ahead = claim.demanded and claim.needed_at is not None and claim.needed_at > now
            ranks.append((not claim.demanded, -claim.priority, ahead, due))
        return min(ranks)


LIMITS = Limits(images=12, patches=1500, source_bytes=9000, claims=25, client_share=0.6)
AHEAD_PATCHES, AHEAD_IMAGES, BUDGET = 300, 4, 250


class Schedule:
    """A random schedule of calls, with every answer checked against the model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = make(LIMITS, AHEAD_PATCHES, AHEAD_IMAGES)
        self.model = Model()
        self.now = 0.0
        self.live: list[Claim] = []
        self.preparing: list[Work] = []
        self.batches: list[list[Work]] = []
        self.outcomes: dict[int, str] = {}  # id of a work -> its one outcome
        self.works: list[Work] = []  # keeps identities unique

    def play(self, steps: int) -> None:
        steps_of = (
            self.submit,
            self.submit,
            self.withdraw,
            self.prepare,
            self.prepared,
            self.start,
            self.end,
        )
        for _ in range(steps):
            self.now += self.random.choice((0.0, 0.1, 1.0))
            self.random.choice(steps_of)()
            self.check()
        while any(claim.work for claim in self.live) or self.batches or self.preparing:
            for step in (self.prepare, self.prepared, self.start, self.end):
                step()
                self.check()
        assert is_empty(self.scheduler)
        assert all(id(work) in self.outcomes for work in self.works)

    def outcome(self, work: Work, what: str) -> None:
        assert id(work) not in self.outcomes, (what, self.outcomes[id(work)])
        assert work.state is State.GONE
        self.outcomes[id(work)] = what

    def submit(self) -> None:
        pick = self.random
        address = bytes([pick.randrange(20)])
        claim = Claim(
            f"r{pick.randrange(5)}", f"c{pick.randrange(3)}", pick.choice((0, 0, 1)), pick.randrange(4),
            pick.choice((None, self.now, self.now + 2)), demanded=pick.random() < 0.7,
        )  # fmt: skip
        held = [w for w in self.works if w.address == address and w.state is not State.GONE]
        try:
            new = self.scheduler.admit(claim, address, 20 + 10 * address[0], 1000, self.now)
        except OverloadedError:
            assert claim.work is None
            return
        assert new == (not held)
        if new:
            self.works.append(claim.work)
        else:
            assert claim.work is held[0]
        self.live.append(claim)
        self.model.named(claim, self.live)

    def withdraw(self) -> None:
        if self.live:
            claim = self.live.pop(self.random.randrange(len(self.live)))
            work = claim.work
            dropped = self.scheduler.withdraw(claim)
            if dropped is not None:
                assert dropped is work
                self.outcome(dropped, "dropped")

    def expected(self, state: State) -> list[tuple]:
        works = [w for w in self.works if w.state is state and w.claims]
        return sorted(self.model.rank(w, self.live, self.now) for w in works)

    def prepare(self) -> None:
        order = self.expected(State.WAITING)
        before = {
            id(w): self.model.rank(w, self.live, self.now) for w in self.works if w.state is State.WAITING
        }
        taken = self.scheduler.next_to_prepare(self.now, BUDGET, 3)
        assert [before[id(w)] for w in taken] == order[: len(taken)]
        self.preparing += taken

    def prepared(self) -> None:
        if self.preparing:
            work = self.preparing.pop(self.random.randrange(len(self.preparing)))
            if self.random.random() < 0.1 and work.state is State.PREPARING:
                self.scheduler.drop(work)
                self.outcome(work, "not decoded")
            else:
                assert self.scheduler.prepared(work, self.now) == (id(work) not in self.outcomes)

    def start(self) -> None:
        retry = any(w.state is State.SPLIT for w in self.works)
        order = self.expected(State.PREPARED)
        ranks = {id(w): self.model.rank(w, self.live, self.now) for w in self.works if w.claims}
        batch = self.scheduler.next_batch(self.now, BUDGET)
        assert bool(batch) == bool(order or retry), "work-conserving"
        if not batch:
            return
        if not retry:
            assert [ranks[id(w)] for w in batch] == order[: len(batch)]
        assert all(w.claims for w in batch), "departed work is never batched"
        assert len({w.demanded for w in batch}) == 1 or retry
        assert len(batch) == 1 or sum(w.patches for w in batch) <= BUDGET
        self.model.clock += sum(w.patches for w in batch)
        self.batches.append(batch)

    def end(self) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(self.random.randrange(len(self.batches)))
        if self.random.random() < 0.8:
            self.scheduler.done(batch, 0.1)
            for work in batch:
                self.outcome(work, "encoded")
        else:
            departed = [w for w in batch if not w.claims]
            for work in self.scheduler.failed(batch):
                self.outcome(work, "failed")
            for work in departed:
                self.outcomes.setdefault(id(work), "departed")

    def check(self) -> None:
        self.live = [claim for claim in self.live if claim.work]
        held = [w for w in self.works if w.state is not State.GONE]
        assert len({w.address for w in held}) == len(held), "single flight"
        snapshot = self.scheduler.snapshot()
        assert sum(snapshot.images.values()) == len(held) <= LIMITS.images
        assert sum(snapshot.patches.values()) == sum(w.patches for w in held) <= LIMITS.patches
        assert snapshot.source_bytes == sum(w.source_bytes for w in held) <= LIMITS.source_bytes
        assert snapshot.claims == len(self.live) <= LIMITS.claims
        ahead = [w for w in held if w.state in (State.PREPARING, State.PREPARED)]
        assert len(ahead) <= 2 * AHEAD_IMAGES
        assert sum(w.patches for w in ahead) <= 2 * AHEAD_PATCHES


@pytest.mark.parametrize("block", range(10))
def test_random_schedules_agree_with_a_naive_model(block):
    for seed in range(250 * block, 250 * (block + 1)):
        Schedule(seed).play(80)


# The whole deployment in simulation


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(15))
def test_every_request_is_answered_or_refused_whatever_the_deployment(policy, seed):
    pick = random.Random(seed)
    load = Load({1: 3, 5: 2, 64: 1}, load=pick.choice((0.5, 0.9, 5.0)), burst=pick.choice((1, 6)), clients=5,
                image_patches=pick.choice((1, 3)), replicas=pick.choice((1, 3, 16)))  # fmt: skip
    limits = Limits(images=pick.choice((80, 10**6)), patches=10**9, source_bytes=10**12, claims=10**6)
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
    load = Load({1: 6, 2: 4, 4: 3, 8: 2, 16: 1, 32: 1})
    jobs = load.jobs(2000, seed=3)
    means = {}
    for policy in POLICIES:
        ttft = Simulation(Machine(policy=policy), jobs).run().ttft_s
        means[policy.name] = sum(ttft) / len(ttft)
    assert 2 * means["least-work-left"] < means["first-come"]
    assert means["least-work-left"] == min(means.values())
