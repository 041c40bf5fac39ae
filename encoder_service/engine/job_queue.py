"""The job queue: jobs by address, who awaits them, and the scheduler that orders them, behind one lock.

The event loop submits jobs and awaits them; the workers take them out and report how they ended. The lock is held for
microseconds: no image is worked on and nothing is called upward while it is held. `FailureCache` has the images that
can never be encoded, so that the same broken file is decoded only once.
"""

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch
from cachetools import FIFOCache, LRUCache

from encoder_contract.errors import (
    AbandonedError,
    EncoderError,
    ImageLimitError,
    InternalError,
    InvalidImageError,
    OverloadedError,
    UnavailableError,
)
from encoder_contract.geometry import Grid
from encoder_service.engine.device import Device
from encoder_service.families.model import Inputs
from encoder_service.image.decoder import Decoder
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from encoder_service.limits import AT_A_TIME
from encoder_service.logs import known_error
from encoder_service.metrics import Metrics
from encoder_service.scheduler import MOST_INTERRUPTIONS, Claim, Scheduler, Snapshot, State, Task
from encoder_service.store import Pin, Store

log = logging.getLogger(__name__)

Pick = Callable[[Scheduler, float], Sequence[Task] | None]  # None: wait no longer

# The answer to a Submit goes out before workers that slept are woken: they would contend with it for cores and
# interpreter, and it would come milliseconds later. Workers that are busy do not wait for this.
ANSWER_FIRST_S = 0.001
SHORT_RETRY_MS = 500  # memory is short while other images are worked on
LOST = "the server lost its device"
# Frames whose rows are found by their pixels, some 200 bytes each.
KNOWN_FRAMES = 65536


@dataclass(eq=False, slots=True)
class Job:
    """One image on its way to its rows, and who awaits them."""

    key: ImageKey
    source: Source
    grid: Grid
    task: Task
    queued_at: float
    patches: Inputs | None = None
    patches_ready: "torch.cuda.Event | None" = None
    number: int = 0  # by which its device's process names it
    pixels: bytes = b""  # of frames: see `ImageKey.of_pixels`
    is_copied: bool = False  # its rows are those of equal frames
    stage_ms: dict[str, float] = field(default_factory=dict)
    stage_began_s: dict[str, float] = field(default_factory=dict)  # on time.monotonic's clock
    waiters: "set[asyncio.Future[Pin]]" = field(default_factory=set)

    def stage(self, name: str, began_s: float, ended_s: float) -> None:
        """Note when a stage of this image began and how long it took."""
        self.stage_began_s[name] = began_s
        self.stage_ms[name] = (ended_s - began_s) * 1000

    def fail(self, error: EncoderError) -> None:
        """Raise `error` in every caller that awaits the job."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


@dataclass(frozen=True, slots=True)
class GroupEncode:
    """One image that all devices encode as a group: the group's number, and the device that has the patches."""

    number: int
    leader: int
    devices: int
    grid: Grid


class Work(ABC):
    """The workers' side of the queue: what the threads of one device take, and how they say what became of it.

    `device` is asked after errors.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    @abstractmethod
    def encode_s(self, patches: int) -> float:
        """Return how long so many patches take a device, seconds, by what was measured; 0 before that."""

    @abstractmethod
    def take_to_prepare(self, max_images: int, max_pixels: int) -> list[Job]:
        """Wait for images to decode together, and return them; an empty list when the queue is closed.

        While the device waits for a batch, a single image.
        """

    @abstractmethod
    def take_single(self, max_pixels: int) -> list[Job]:
        """Wait for one image to decode by itself, and return it; an empty list when the queue is closed.

        At most `max_pixels` are taken at a time, plus one image that the scheduler calls large. The caller ends each
        image with `release_single`.
        """

    @abstractmethod
    def release_single(self, job: Job) -> None:
        """Report that a job from `take_single` holds no decoded pixels any more."""

    @abstractmethod
    def is_wanted(self, job: Job) -> bool:
        """Whether a caller still wants an image that is being decoded, and the queue is open."""

    @abstractmethod
    def decoded(self, jobs: Sequence[Job], seconds: float) -> None:
        """Report for how many seconds a thread was decoding these jobs together, whether or not they are good."""

    @abstractmethod
    def retry_single(self, job: Job) -> None:
        """Report that the batch decoder failed on a job's image: it is to be decoded by itself."""

    @abstractmethod
    def prepared(self, jobs: Sequence[tuple[Job, Inputs]], ready: "torch.cuda.Event | None") -> None:
        """Report that the patches of these jobs are ready, on CUDA once `ready` passes."""

    @abstractmethod
    def take_batch(self, budget_patches: int) -> tuple[list[Job] | GroupEncode, float]:
        """Wait for the next batch; return it, and for how many seconds the device waited while images were queued.

        The batch is empty when the queue is closed. Instead of a batch, the device may have to join a group encode.
        """

    @abstractmethod
    def take_overtaking(self, batch: Sequence[Job], most_patches: int) -> list[Job]:
        """Return an image to encode in the middle of `batch`, or nothing. Does not wait. See the scheduler.

        With an empty batch, in the middle of the group encode that the device has joined.
        """

    @abstractmethod
    def form_group(self, job: Job) -> GroupEncode | None:
        """Have all other devices join the encode of a job, the only one of its batch, if all wait for a batch."""

    @abstractmethod
    def group_failed(self) -> None:
        """Report that a group encode failed: the next one forms another group."""

    @abstractmethod
    def put_back(self, jobs: Sequence[Job]) -> None:
        """Report that jobs of a batch have to wait for a later one; those without claims end."""

    @abstractmethod
    def failed(self, jobs: Sequence[Job], error: Exception) -> None:
        """Report that a batch failed: a single image ends with `error`, several are retried in smaller batches."""

    @abstractmethod
    def encoded(self, jobs: Sequence[Job], outcomes: Sequence[Pin | EncoderError], seconds: float) -> None:
        """Report for how long the device was busy with a batch, and the outcome of each of its jobs."""

    @abstractmethod
    def drop(self, job: Job, error: EncoderError) -> None:
        """End a job that failed before its batch was encoded."""

    @abstractmethod
    def abort(self, why: str, error: BaseException) -> None:
        """End the process: no further work can succeed in it."""

    def known_error(self, error: Exception) -> EncoderError:
        """Return what to tell those who await an image of an error, on the thread that met it; see `lost_device`."""
        if self.lost_device(error):
            return UnavailableError(LOST)
        if self._device.is_full(error):
            log.warning("the device is short of memory", exc_info=error)
            return OverloadedError("the device is out of memory: retry", retry_after_ms=SHORT_RETRY_MS)
        return known_error(error)

    def lost_device(self, error: Exception) -> bool:
        """Whether the device turns out to be lost, asked because of `error`; then everything ends.

        If it is only full, there is room again afterwards.
        """
        if isinstance(error, EncoderError):
            return False
        if not self._device.is_lost():
            if self._device.is_full(error):
                self._device.recover(error)
            return False
        self.abort(LOST, error)
        return True


@dataclass(eq=False, slots=True)
class _DeviceState:
    """What the queue knows of a device."""

    is_open: bool = True
    waits: bool = False  # for a batch
    idle_since: float | None = None  # since when it has waited while images were queued
    group: tuple[Job, GroupEncode] | None = None  # to join instead of taking a batch
    # Being decoded by themselves; they count even after their last claim was withdrawn.
    single_pixels: int = 0
    has_large_single: bool = False

    @property
    def is_free(self) -> bool:
        """Whether it waits for a batch and has joined no group."""
        return self.is_open and self.waits and self.group is None


class JobQueue(Work):
    """Single flight: one job per address, any number of claims on it.

    `submit`, `join`, `wait`, `withdraw` and `fail_all` are called on the event loop, the rest on any thread. Workers
    name their device by its number.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        decoder: Decoder,
        store: Store,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics | None = None,
        on_end: Callable[[Job, Pin | EncoderError], None] = lambda _job, _outcome: None,
        device: Device | None = None,
        devices: int = 1,
        on_abort: Callable[[UnavailableError], None] = lambda _error: None,
    ) -> None:
        """Both callbacks run on the event loop: `on_end` at every job's end, `on_abort` when no other can succeed.

        `device` is the one of this process; without one it is the CPU. `devices` take jobs.
        """
        super().__init__(device or Device("cpu"))
        self._scheduler = scheduler
        self._decoder = decoder
        self._store = store
        self._metrics = metrics or Metrics()
        self._on_end = on_end
        self._on_abort = on_abort
        self._loop = loop
        self._failures = FailureCache()
        self._turn = threading.Condition()
        self._jobs: dict[bytes, Job] = {}
        self._of_pixels: LRUCache[bytes, bytes] = LRUCache(KNOWN_FRAMES)  # the newest address
        self._closed = False
        self._devices = [_DeviceState() for _ in range(devices)]
        self._group_number = 0

    def __len__(self) -> int:
        """Images under way, in any stage."""
        return len(self._jobs)

    def __contains__(self, key: ImageKey) -> bool:
        return key.address in self._jobs

    def knows(self, key: ImageKey) -> bool:
        """Whether an image is on its way, or its rows are held."""
        return key in self or self._store.contains(key.address)

    def snapshot(self) -> Snapshot:
        """Return the counts of the queue at this moment."""
        with self._turn:
            return self._scheduler.snapshot()

    def encode_s(self, patches: int) -> float:
        """Return how long so many patches take a device, seconds, by what was measured; 0 before that."""
        rate = self._scheduler.patches_per_s
        return patches * len(self._devices) / rate if rate else 0.0

    def check_room(self, holder: str, patches: int) -> None:
        """Raise `OverloadedError` or `ImageLimitError` if an image of so many patches would be refused now."""
        with self._turn:
            self._scheduler.check_room(holder, patches)

    # The event loop's side

    def submit(self, key: ImageKey, source: Source, grid: Grid, claim: Claim) -> Job | None:
        """Queue an image, or join its job; return None if its rows are held.

        Raises `OverloadedError` when the queue is full, `ImageLimitError` for an image that never fits, and
        `UnavailableError` when the queue is closed.
        """
        if self._store.contains(key.address):
            return None
        single = not self._decoder.can_batch(source)
        with self._turn:
            if (job := self._join(key, claim)) is not None:
                return job
            if self._closed:
                raise UnavailableError("the server is shutting down: use another server")
            now = monotonic()
            size, pixels = len(source.data), source.header.pixels
            self._scheduler.admit(
                claim,
                key.address,
                grid.patches,
                size,
                now,
                source_pixels=pixels
                if key.frames is None
                else 2 * max(pixels, math.prod(key.frames.bilinear or ())),
                single=single,
                as_large=key.frames is not None,
            )
            assert claim.task is not None
            job = self._jobs[key.address] = Job(key, source, grid, claim.task, now)
            for device in self._devices:
                if device.waits and device.idle_since is None:
                    device.idle_since = now
        self._loop.call_later(ANSWER_FIRST_S, self._wake)
        return job

    def join(self, key: ImageKey, claim: Claim) -> Job | None:
        """Join the job of an image, if there is one: a Fetch thereby makes it demanded.

        Raises `InvalidImageError` for an image that was found to be damaged, `OverloadedError` for too many claims.
        """
        self._failures.check(key)
        with self._turn:
            return self._join(key, claim)

    def wait(self, job: Job, claim: Claim) -> "asyncio.Future[Pin]":
        """Return a future of the rows of `job`, pinned, or of its error. Its end, or cancelling it, ends `claim`."""
        waiter: asyncio.Future[Pin] = self._loop.create_future()

        def left(waiter: "asyncio.Future[Pin]") -> None:
            job.waiters.discard(waiter)
            self.withdraw(claim)

        job.waiters.add(waiter)
        waiter.add_done_callback(left)
        return waiter

    def withdraw(self, claim: Claim) -> None:
        """End a claim. A job without claims is dropped, unless its batch has started."""
        with self._turn:
            task = self._scheduler.withdraw(claim)
            if task is None:
                return
            self._has_left()
            job = self._jobs.pop(task.address, None)
        if job is not None:  # else it ended when the queue closed
            self._abandon(job)

    def fail_all(self, error: EncoderError) -> None:
        """End every job that has no outcome yet with `error`."""
        for job in list(self._jobs.values()):
            self._finish(job, error)

    # The workers' side

    def take_to_prepare(self, max_images: int, max_pixels: int, device: int = 0) -> list[Job]:
        """See `Work`."""

        def pick(scheduler: Scheduler, now: float) -> Sequence[Task]:
            most = 1 if self._devices[device].waits else max_images
            return scheduler.next_to_prepare(now, most, max_pixels, device)

        with self._turn:
            return self._take(pick, device)

    def take_single(self, max_pixels: int, device: int = 0) -> list[Job]:
        """See `Work`."""
        state = self._devices[device]

        def pick(scheduler: Scheduler, now: float) -> Sequence[Task]:
            room = max_pixels - state.single_pixels if state.single_pixels else math.inf
            tasks = scheduler.next_single(now, room, large=not state.has_large_single, device=device)
            for task in tasks:
                if scheduler.is_large(task):
                    state.has_large_single = True
                else:
                    state.single_pixels += task.source_pixels
            return tasks

        with self._turn:
            return self._take(pick, device)

    def release_single(self, job: Job) -> None:
        """See `Work`."""
        state = self._devices[job.task.device]
        with self._turn:
            if self._scheduler.is_large(job.task):
                state.has_large_single = False
            else:
                state.single_pixels -= job.task.source_pixels
            self._turn.notify_all()

    def is_wanted(self, job: Job) -> bool:
        """See `Work`."""
        return not self._closed and job.task.state is not State.GONE

    def decoded(self, jobs: Sequence[Job], seconds: float) -> None:
        """See `Work`."""
        with self._turn:
            self._scheduler.decoded([job.task for job in jobs], seconds)

    def retry_single(self, job: Job) -> None:
        """See `Work`."""
        with self._turn:
            self._scheduler.retry_single(job.task, monotonic())
            self._turn.notify_all()

    def prepared(self, jobs: Sequence[tuple[Job, Inputs]], ready: "torch.cuda.Event | None") -> None:
        """See `Work`. Frames whose pixels were encoded before, of this video or another, get those rows."""
        copies = [self._copied(job) for job, _ in jobs]
        with self._turn:
            for (job, patches), copy in zip(jobs, copies, strict=True):
                if copy is not None:
                    self._scheduler.drop(job.task)
                    self._of_pixels[job.pixels] = job.key.address
                elif self._scheduler.prepared(job.task, monotonic()):
                    job.patches, job.patches_ready = patches, ready
            self._has_left()
        for (job, _), copy in zip(jobs, copies, strict=True):
            if copy is not None:
                job.is_copied = True
                self._end(job, copy)

    def take_batch(self, budget_patches: int, device: int = 0) -> tuple[list[Job] | GroupEncode, float]:
        """See `Work`."""
        state = self._devices[device]

        def pick(scheduler: Scheduler, now: float) -> Sequence[Task] | None:
            return scheduler.next_batch(now, budget_patches, device) if state.group is None else None

        with self._turn:
            state.waits, state.group = True, None
            state.idle_since = monotonic() if self._scheduler.waiting_images else None
            jobs = self._take(pick, device)
            state.waits = False
            starved_s = monotonic() - state.idle_since if state.idle_since is not None else 0.0
            return jobs if state.group is None else state.group[1], starved_s

    def form_group(self, job: Job, device: int = 0) -> GroupEncode | None:
        """See `Work`; an image whose encoding was interrupted is not shared."""
        with self._turn:
            others = [each for number, each in enumerate(self._devices) if number != device]
            if not others or job.task.interruptions or not all(each.is_free for each in others):
                return None
            group = GroupEncode(self._group_number, device, len(self._devices), job.grid)
            for each in others:
                each.group = job, group
            self._turn.notify_all()
            return group

    def group_failed(self) -> None:
        """See `Work`."""
        with self._turn:
            self._group_number += 1

    def take_overtaking(self, batch: Sequence[Job], most_patches: int, device: int = 0) -> list[Job]:
        """See `Work`."""
        with self._turn:
            group = self._devices[device].group
            tasks = [job.task for job in batch] or ([group[0].task] if group else [])
            found = (
                ()
                if self._closed
                else self._scheduler.next_overtaking(tasks, monotonic(), most_patches, device)
            )
            if found:
                self._turn.notify_all()
            return [self._jobs[task.address] for task in found]

    def put_back(self, jobs: Sequence[Job]) -> None:
        """See `Work`."""
        with self._turn:
            self._drop_unwanted(jobs, self._scheduler.put_back([job.task for job in jobs]))

    def failed(self, jobs: Sequence[Job], error: Exception) -> None:
        """See `Work`."""
        with self._turn:
            ended = self._scheduler.failed([job.task for job in jobs])
            self._drop_unwanted(jobs if len(jobs) > 1 else (), ended)
        if len(jobs) == 1:
            self._end(jobs[0], self.known_error(error))

    def encoded(self, jobs: Sequence[Job], outcomes: Sequence[Pin | EncoderError], seconds: float) -> None:
        """See `Work`."""
        with self._turn:
            # The rate of admission is that of all devices together.
            self._scheduler.done([job.task for job in jobs], seconds / len(self._devices))
            for job, outcome in zip(jobs, outcomes, strict=True):
                if job.pixels and isinstance(outcome, Pin):
                    self._of_pixels[job.pixels] = outcome.address
            self._turn.notify_all()
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._end(job, outcome)

    def drop(self, job: Job, error: EncoderError) -> None:
        """See `Work`."""
        with self._turn:
            self._scheduler.drop(job.task)
            self._has_left()
        self._end(job, error)

    def leave(self, device: int) -> None:
        """Hand out no more jobs to a device, whose process has ended: its takers get an empty list."""
        with self._turn:
            self._devices[device].is_open = False
            self._group_number += 1
            self._turn.notify_all()

    def interrupted(self, device: int) -> None:
        """Queue again what a device that left had begun, once nothing works for it any more; it may take jobs again.

        An image that its process was encoding whenever it ended fails at the third time.
        """
        with self._turn:
            self._devices[device] = _DeviceState()
            tasks = self._scheduler.interrupted(device, monotonic())
            ended = [job for task in tasks if (job := self._jobs.get(task.address)) and job.task is task]
            blamed = [job for job in ended if job.task.interruptions == MOST_INTERRUPTIONS]
            self._drop_unwanted([job for job in ended if job not in blamed], tasks)
        for job in blamed:
            self._end(
                job, InternalError(f"a device's process ended {MOST_INTERRUPTIONS} times on this image")
            )

    def abort(self, why: str, error: BaseException) -> None:
        """End every job, and the process: no further work can succeed in it."""
        log.critical("%s: ending the process", why, exc_info=error)
        self.close()
        self._loop.call_soon_threadsafe(self._abort, why)

    def close(self) -> None:
        """Refuse new images and hand out no more jobs: takers get an empty list. Callers may still join jobs."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def _end(self, job: Job, outcome: Pin | EncoderError) -> None:
        """Give everyone who awaits a job its outcome: a pin for each, or the error."""
        self._loop.call_soon_threadsafe(self._finish, job, outcome)

    def _copied(self, job: Job) -> Pin | None:
        """Return a pin on rows of equal frames, copied to the address of this job; None if none are held."""
        with self._turn:
            address = self._of_pixels.get(job.pixels)
        if address is None or (held := self._store.pin(address)) is None:
            return None
        copy = None
        with held:
            try:
                held.to_host()
                copy = self._store.receive(job.key.address, held.tokens, held.grid, job.task.holder)
                if copy is None:
                    return self._store.pin(job.key.address)
                for piece in held.rows():
                    copy.add(piece)
                return copy.commit(held.checksum())
            except EncoderError:  # there is no room, or the copy is damaged: they are encoded
                if copy is not None:
                    copy.abandon()
                return None

    # Inside, with the lock held

    def _join(self, key: ImageKey, claim: Claim) -> Job | None:
        job = self._jobs.get(key.address)
        if job is not None and claim.task is None:
            self._scheduler.claim(claim, key.address, monotonic())
            if claim.demanded:
                self._turn.notify_all()  # what was a guess may be decoded now, however many guesses are ahead
        return job

    def _take(self, pick: Pick, device: int) -> list[Job]:
        state = self._devices[device]
        while state.is_open and not self._closed:
            tasks = pick(self._scheduler, monotonic())
            if tasks is None:
                break
            if tasks:
                self._turn.notify_all()  # what moved may have made room for another stage
                return [self._jobs[task.address] for task in tasks]
            self._turn.wait()
        return []

    def _has_left(self) -> None:
        """An image will not be encoded: the device may have nothing to wait for any more."""
        if not self._scheduler.waiting_images:
            for device in self._devices:
                device.idle_since = None
        self._turn.notify_all()

    def _drop_unwanted(self, jobs: Sequence[Job], ended: Sequence[Task]) -> None:
        """Forget jobs that ended with their batch: a caller that comes now must not share a neighbour's failure."""
        self._turn.notify_all()
        for job in jobs:
            if job.task in ended:
                self._forget(job)
                self._loop.call_soon_threadsafe(self._abandon, job)

    def _forget(self, job: Job) -> bool:
        if self._jobs.get(job.key.address) is not job:
            return False
        del self._jobs[job.key.address]
        return True

    # Inside, on the event loop and without the lock

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def _abort(self, why: str) -> None:
        error = UnavailableError(f"{why}: use another server")
        self.fail_all(error)
        self._on_abort(error)

    def _abandon(self, job: Job) -> None:
        abandoned = AbandonedError("all callers of the image have left")
        if job.key not in self:  # else it has been submitted again
            self._on_end(job, abandoned)
        job.fail(abandoned)

    def _finish(self, job: Job, outcome: Pin | EncoderError) -> None:
        error = outcome if isinstance(outcome, EncoderError) else None
        with self._turn:
            forgotten = self._forget(job)
        if not forgotten and error is not None:
            return  # its end was reported when its last caller left
        self._metrics.encoded(monotonic() - job.queued_at, job.stage_ms, error, is_copied=job.is_copied)
        if isinstance(outcome, EncoderError):
            self._failures.note(job.key, outcome)
            self._on_end(job, outcome)
            job.fail(outcome)
            return
        self._on_end(job, outcome)
        self._give(outcome, list(job.waiters))

    def _give(self, held: Pin, waiters: "list[asyncio.Future[Pin]]") -> None:
        """Give each waiter a pin of its own, a few in each pass of the loop: thousands may wait."""
        for waiter in waiters[-AT_A_TIME:]:
            if not waiter.done():
                pin = self._store.pin(held.address)
                assert pin is not None, "a pinned entry is held"
                waiter.set_result(pin)
        del waiters[-AT_A_TIME:]
        if waiters:
            self._loop.call_soon(self._give, held, waiters)
        else:
            held.release()


FAILURES = 4096  # a few hundred bytes each


class FailureCache:
    """A bounded map from images to their errors, oldest out first. Used on the event loop.

    By source and not by address: a file that cannot be decoded cannot be in any of its variants. What is too large in
    one variant may fit in another, and a video may have other frames.
    """

    def __init__(self) -> None:
        self._errors: FIFOCache[bytes, InvalidImageError] = FIFOCache(FAILURES)

    def note(self, key: ImageKey, error: EncoderError) -> None:
        """Remember `error` if it is the image's own fault; other failures may be temporary."""
        if isinstance(error, InvalidImageError):
            is_one = isinstance(error, ImageLimitError) or key.frames is not None
            self._errors[key.address if is_one else key.source_key] = error

    def check(self, key: ImageKey) -> None:
        """Raise the error remembered for the image, if there is one."""
        error = self._errors.get(key.source_key) or self._errors.get(key.address)
        if error is not None:
            raise type(error)(error.message)
