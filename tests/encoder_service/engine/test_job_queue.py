"""The job queue and its scheduler under any order of events: every job ends, and its image can be submitted again."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from encoder_contract.errors import EncoderError, InternalError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_contract.header import read_header
from encoder_service.engine import job_queue
from encoder_service.engine.job_queue import GroupEncode, Job, JobQueue
from encoder_service.image.decoder import Decoder
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from encoder_service.scheduler import Claim, Limits, Scheduler, State
from encoder_service.store import Pin, Store
from testing.photos import photo
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

GRID = Grid(1, 4, 4)
FILE = photo(64, 64, 1)
HEADER = read_header(FILE)
SINGLE = b"to be decoded by itself"
PATCHES = torch.empty(0)
ADDRESSES = st.sampled_from([bytes([n]) * 32 for n in range(4)])
NO_LIMITS = Limits(images=10**6, patches=10**9, source_bytes=10**9, claims=10**6)


OUTCOME = UnavailableError("it ended")


class Posts:
    """An event loop that runs posted calls on request, in any order."""

    def __init__(self) -> None:
        self.posted: list[partial[None]] = []

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: object) -> None:
        """Store a call for later."""
        self.posted.append(partial(function, *arguments))

    def call_later(self, _seconds: float, function: Callable[[], None]) -> None:
        """Call at once."""
        function()

    def jobs(self) -> set[Job]:
        """The jobs of the stored calls."""
        return {post.args[0] for post in self.posted}


def key_of(address: bytes) -> ImageKey:
    return ImageKey(address, bytes(32))


def new_queue(
    loop: Posts,
    on_end: Callable[[Job, Pin | EncoderError], None] = lambda _job, _outcome: None,
    ahead_images: int = 10**6,
    large_pixels: float = math.inf,
    devices: int = 1,
) -> JobQueue:
    return JobQueue(
        Scheduler(
            NO_LIMITS,
            max_ahead_patches=10**9,
            max_ahead_images=ahead_images,
            large_pixels=large_pixels,
            devices=devices,
        ),
        cast(Decoder, SimpleNamespace(can_batch=lambda source: source.key != SINGLE)),
        cast(Store, SimpleNamespace(contains=lambda _address: False)),
        loop=cast(asyncio.AbstractEventLoop, loop),
        on_end=on_end,
        devices=devices,
    )


def submit(
    queue: JobQueue, address: bytes, claim: Claim, *, single: bool = False, width: int = HEADER.width
) -> Job:
    source = Source(SINGLE if single else b"", FILE, replace(HEADER, width=width))
    job = queue.submit(key_of(address), source, GRID, claim)
    assert job is not None
    return job


class QueueMachine(RuleBasedStateMachine):
    """Callers, stages and outcomes in any order that the workers and the event loop can produce."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.loop = Posts()
        self.queue = new_queue(self.loop, self.end)
        self.made: list[Job] = []
        self.ended: list[Job] = []  # jobs in the order of their reported ends, each once
        self.preparing: list[Job] = []
        self.batches: list[list[Job]] = []
        self.replaced: list[Job] = []  # abandoned jobs that were resubmitted before the report

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
        assert job not in self.ended
        assert claim.task is not None or job in self.loop.jobs(), "a caller waits for work, or for an outcome"
        return claim

    @rule(target=claims, address=ADDRESSES)
    def join(self, address: bytes) -> Claim:
        claim = Claim("d", "d", demanded=True)
        job = self.queue.join(key_of(address), claim)
        assert job is None or claim.task is not None or job in self.loop.jobs()
        return claim

    @rule(claim=claims)
    def withdraw(self, claim: Claim) -> None:
        self.queue.withdraw(claim)

    @precondition(lambda self: self.count(State.WAITING))
    @rule(images=st.integers(1, 3))
    def take_to_prepare(self, images: int) -> None:
        self.preparing += self.queue.take_to_prepare(images, 10**9)

    @precondition(lambda self: self.count(State.SINGLE))
    @rule()
    def take_single(self) -> None:
        (job,) = self.queue.take_single(10**9)
        self.preparing.append(job)

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def retry_single(self, data: st.DataObject) -> None:
        self.queue.retry_single(self.take(data, self.preparing))

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def prepared(self, data: st.DataObject) -> None:
        job = self.take(data, self.preparing)
        self.queue.prepared([(job, PATCHES)], None)

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.queue.drop(self.take(data, self.preparing), OUTCOME)

    @precondition(lambda self: self.count(State.PREPARED) + self.count(State.SPLIT))
    @rule(images=st.integers(1, 4))
    def take_batch(self, images: int) -> None:
        jobs, _ = self.queue.take_batch(images * GRID.patches)
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

    @precondition(lambda self: self.loop.posted)
    @rule(data=st.data())
    def run_what_was_posted(self, data: st.DataObject) -> None:
        self.run_post(self.take(data, self.loop.posted))

    @invariant()
    def every_job_is_under_way_or_has_ended(self) -> None:
        open_jobs = set(self.queue._jobs.values())
        assert set(self.made) == open_jobs | {*self.ended, *self.replaced, *self.loop.jobs()}
        for job in open_jobs:
            if job.task.state is State.GONE:
                assert job in self.loop.jobs(), "its outcome is on its way"
            else:
                assert job.task.claims or job.task.state is State.ENCODING, "somebody wants it"

    def teardown(self) -> None:
        """Finish all jobs; then every image can be submitted and encoded again."""
        self.work_off()
        assert not self.queue
        assert set(self.made) == {*self.ended, *self.replaced}
        empty = self.queue.snapshot()
        assert (empty.claims, empty.requests, empty.clients, empty.source_bytes) == (0, 0, 0, 0)
        for job in {job.key: job for job in self.made}.values():
            again = submit(self.queue, job.key.address, Claim("again", "again"))
            assert again.task.claims
            self.made.append(again)
        self.work_off()
        assert set(self.made) == {*self.ended, *self.replaced}

    def work_off(self) -> None:
        while self.count(State.WAITING):
            self.preparing += self.queue.take_to_prepare(10**6, 10**9)
        while self.count(State.SINGLE):
            self.take_single()
        self.queue.prepared([(job, PATCHES) for job in self.preparing], None)
        self.preparing.clear()
        while self.count(State.PREPARED) + self.count(State.SPLIT):
            self.batches.append(self.queue.take_batch(10**6)[0])
        for jobs in self.batches:
            self.encode(jobs)
        self.batches.clear()
        while self.loop.posted:
            self.run_post(self.loop.posted.pop())

    def encode(self, jobs: list[Job]) -> None:
        self.queue.encoded(jobs, [OUTCOME] * len(jobs), 0.1)

    def run_post(self, post: partial[None]) -> None:
        post()
        if (job := post.args[0]) not in self.ended:
            assert job.key in self.queue, "it was begun anew"
            self.replaced.append(job)

    def end(self, job: Job, _outcome: Pin | EncoderError) -> None:
        assert job not in self.ended, "a job ends once"
        self.ended.append(job)

    def count(self, state: State) -> int:
        images = self.queue.snapshot().images
        return images[state, True] + images[state, False]

    def take(self, data: st.DataObject, among: list[Any]) -> Any:
        return among.pop(data.draw(st.integers(0, len(among) - 1)))


QueueMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


def test_a_newly_demanded_image_is_decoded_past_a_full_speculative_window() -> None:
    queue = new_queue(Posts(), ahead_images=1)
    address = bytes(32)
    submit(queue, b"ahead", Claim("a", "a"))
    queue.prepared([(job, PATCHES) for job in queue.take_to_prepare(1, 10**9)], None)
    submit(queue, address, Claim("b", "b"))
    taken: list[Job] = []
    stage = threading.Thread(target=lambda: taken.extend(queue.take_to_prepare(1, 10**9)), daemon=True)
    stage.start()
    stage.join(0.2)
    assert stage.is_alive(), "one guess ahead is all there may be"
    queue.join(key_of(address), Claim("c", "c", demanded=True))
    stage.join(30)
    assert [job.key.address for job in taken] == [address]


def test_time_with_an_empty_queue_does_not_count_as_starved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, taken = new_queue(Posts()), list[tuple[list[Job], float]]()
    device = threading.Thread(target=lambda: taken.append(queue.take_batch(10**6)))
    device.start()
    while not queue._devices[0].waits:
        time.sleep(0.001)
    submit(queue, b"a" * 32, Claim("a", "a"))
    (damaged,) = queue.take_to_prepare(1, 10**9)
    queue.drop(damaged, OUTCOME)
    monkeypatch.setattr(job_queue, "monotonic", lambda: time.monotonic() + 3600)
    submit(queue, b"b" * 32, Claim("b", "b"))
    (good,) = queue.take_to_prepare(1, 10**9)
    queue.prepared([(good, PATCHES)], None)
    device.join()
    [(jobs, starved_s)] = taken
    assert jobs == [good]
    assert 0 < starved_s < 3000


def wait_for_batch(queue: JobQueue, device: int) -> list[list[Job] | GroupEncode]:
    """Make a device wait for a batch; return the list that will receive it."""
    taken: list[list[Job] | GroupEncode] = []
    threading.Thread(target=lambda: taken.append(queue.take_batch(10**6, device)[0]), daemon=True).start()
    until(lambda: queue._devices[device].waits)
    return taken


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def batch_of(queue: JobQueue, address: bytes, device: int = 0) -> Job:
    """Return the job of an image that a device is encoding."""
    submit(queue, address, Claim("a", "a", demanded=True))
    jobs = queue.take_to_prepare(1, 10**9, device)
    queue.prepared([(job, PATCHES) for job in jobs], None)
    [job], _ = queue.take_batch(10**6, device)
    return job


def test_a_group_forms_only_while_all_other_devices_wait() -> None:
    queue = new_queue(Posts(), devices=3)
    job, other = batch_of(queue, b"a" * 32), batch_of(queue, b"b" * 32, 1)
    taken = wait_for_batch(queue, 2)
    assert queue.form_group(job) is None, "device 1 is busy"
    assert not taken, "device 2 waits on"
    queue.encoded([other], [OUTCOME], 1.0)
    more = wait_for_batch(queue, 1)
    group = queue.form_group(job)
    assert group == GroupEncode(0, 0, 3, GRID)
    until(lambda: taken == more == [group])
    second = wait_for_batch(queue, 2)
    assert queue.form_group(job) is None, "device 1 has not joined yet"
    queue.close()
    until(lambda: second == [[]])


def test_a_device_in_a_group_may_encode_its_own_images_in_between() -> None:
    queue = new_queue(Posts(), devices=2)
    job, taken = batch_of(queue, b"a" * 32), wait_for_batch(queue, 1)
    assert queue.form_group(job)
    until(lambda: taken)
    submit(queue, b"b" * 32, Claim("b", "b", demanded=True))
    [small] = queue.take_to_prepare(1, 10**9, 1)
    queue.prepared([(small, PATCHES)], None)
    assert queue.take_overtaking([job], GRID.patches) == [], "the device that has not decoded it"
    assert queue.take_overtaking([], GRID.patches, 1) == [small]


def test_an_interrupted_image_forms_no_group_and_the_next_group_has_a_new_number() -> None:
    queue = new_queue(Posts(), devices=2)
    job, taken = batch_of(queue, b"a" * 32, 1), wait_for_batch(queue, 0)
    assert queue.form_group(job, 1) == GroupEncode(0, 1, 2, GRID)
    until(lambda: taken)
    queue.leave(1)
    assert queue.form_group(job, 0) is None, "a device that has left does not wait"
    queue.interrupted(1)
    [again] = queue.take_to_prepare(1, 10**9, 0)
    queue.prepared([(again, PATCHES)], None)
    assert queue.take_batch(10**6, 0)[0] == [job]
    taken = wait_for_batch(queue, 1)
    assert queue.form_group(job, 0) is None
    queue.encoded([job], [OUTCOME], 1.0)
    queue.group_failed()
    assert queue.form_group(batch_of(queue, b"b" * 32)) == GroupEncode(2, 0, 2, GRID)
    until(lambda: taken)


WINDOW_PIXELS = 10_000


def take_single_on_a_thread(queue: JobQueue) -> tuple[threading.Thread, list[Job]]:
    """Start a thread that takes an image to decode by itself. Return it, and the list that gets the image."""
    taken: list[Job] = []
    stage = threading.Thread(target=lambda: taken.extend(queue.take_single(WINDOW_PIXELS)), daemon=True)
    stage.start()
    return stage, taken


def take_single(queue: JobQueue) -> Job:
    """Take an image to decode by itself, or fail when the queue hands out none."""
    stage, taken = take_single_on_a_thread(queue)
    stage.join(PATIENCE_S)
    assert taken, "no image is handed out"
    return taken[0]


def test_a_large_single_decode_does_not_block_small_ones() -> None:
    queue = new_queue(Posts(), large_pixels=WINDOW_PIXELS)
    size = {b"large": 1000, b"large too": 1000, b"small": 100, b"small too": 50}
    for number, (name, width) in enumerate(size.items()):
        submit(queue, name, Claim(str(number), "a", demanded=True), single=True, width=width)
    large = take_single(queue)
    assert large.key.address == b"large"
    small = take_single(queue)
    assert small.key.address == b"small", "the other large image waits, and does not block small ones"
    queue.prepared([(large, {})], None)
    assert take_single(queue).key.address == b"large too"
    queue.prepared([(small, {})], None)
    assert take_single(queue).key.address == b"small too", "it did not fit beside the first small one"


def test_large_images_decode_beside_small_ones_and_after_batch_refusals() -> None:
    queue = new_queue(Posts(), large_pixels=WINDOW_PIXELS)
    submit(queue, b"small", Claim("1", "a", demanded=True), single=True, width=100)
    small = take_single(queue)
    submit(queue, b"large", Claim("2", "a", demanded=True), width=1000)
    (refused,) = queue.take_to_prepare(1, 10**9)
    queue.retry_single(refused)
    assert take_single(queue).key.address == b"large"
    queue.prepared([(small, {})], None)
    submit(queue, b"small too", Claim("3", "a", demanded=True), single=True, width=100)
    assert take_single(queue).key.address == b"small too"


def test_a_withdrawn_single_decode_holds_its_pixels_until_it_is_reported() -> None:
    queue = new_queue(Posts(), large_pixels=WINDOW_PIXELS)
    claim = Claim("1", "a", demanded=True)
    submit(queue, b"small", claim, single=True, width=100)
    small = take_single(queue)
    queue.withdraw(claim)
    submit(queue, b"small too", Claim("2", "a", demanded=True), single=True, width=100)
    stage, taken = take_single_on_a_thread(queue)
    stage.join(0.05)
    assert not taken, "the pixels of both exceed the window"
    queue.drop(small, InternalError("abandoned"))
    stage.join(PATIENCE_S)
    assert [job.key.address for job in taken] == [b"small too"]


def test_a_single_decode_that_began_before_its_image_was_resubmitted_holds_its_pixels() -> None:
    queue = new_queue(Posts(), large_pixels=WINDOW_PIXELS)
    claim = Claim("1", "a", demanded=True)
    submit(queue, b"small", claim, single=True, width=100)
    first = take_single(queue)
    queue.withdraw(claim)
    again = submit(queue, b"small", Claim("2", "a", demanded=True), single=True, width=100)
    stage, taken = take_single_on_a_thread(queue)
    stage.join(0.05)
    assert not taken, "the pixels of both exceed the window"
    queue.prepared([(first, {})], None)
    stage.join(PATIENCE_S)
    assert taken == [again]


def test_single_decodes_of_a_device_that_ended_hold_no_pixels() -> None:
    queue = new_queue(Posts(), large_pixels=WINDOW_PIXELS)
    submit(queue, b"small", Claim("1", "a", demanded=True), single=True, width=100)
    submit(queue, b"large", Claim("2", "a", demanded=True), single=True, width=1000)
    begun = {take_single(queue), take_single(queue)}
    queue.leave(0)
    queue.interrupted(0)
    assert {take_single(queue), take_single(queue)} == begun
