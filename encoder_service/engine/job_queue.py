"""The job queue: one job per address, the callers that wait for it, and the scheduler that orders the jobs.

The event loop submits jobs and waits for them; workers take jobs out and report how they ended. One lock guards all of
it. It is held for microseconds: no stage runs and no callback is called under it. `FailureCache` remembers images that
can never be encoded, so that a broken file is decoded only once.
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

Pick = Callable[[Scheduler, float], Sequence[Task] | None]  # None: stop waiting

# Idle workers are woken this long after a Submit, so that its answer is sent first: workers compete with the event loop
# for cores and the interpreter, and would delay the answer by milliseconds. Busy workers do not wait for this.
ANSWER_FIRST_S = 0.001
SHORT_RETRY_MS = 500  # other images in the pipeline release memory soon
DEVICE_LOST = "the server lost its device"
# Pairs of frames whose rows can be found by their pixels, about 200 bytes each.
KNOWN_FRAMES = 65536


@dataclass(eq=False, slots=True)
class Job:
    """One image to encode, and the callers that wait for its rows."""

    key: ImageKey
    source: Source
    grid: Grid
    task: Task
    queued_at: float
    patches: Inputs | None = None
    patches_ready: "torch.cuda.Event | None" = None
    number: int = 0  # its name between the server and the device process
    pixels: bytes = b""  # of frames: see `ImageKey.of_pixels`
    is_copied: bool = False  # its rows were copied from equal frames
    stage_ms: dict[str, float] = field(default_factory=dict)
    stage_began_s: dict[str, float] = field(default_factory=dict)  # on time.monotonic's clock
    waiters: "set[asyncio.Future[Pin]]" = field(default_factory=set)

    def stage(self, name: str, began_s: float, ended_s: float) -> None:
        """Record when a stage of this image began and how long it took."""
        self.stage_began_s[name] = began_s
        self.stage_ms[name] = (ended_s - began_s) * 1000

    def fail(self, error: EncoderError) -> None:
        """Raise `error` in every caller that waits for the job."""
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
    """The workers' side of the queue: how the threads of one device take jobs and report how they ended."""

    def __init__(self, device: Device) -> None:
        """After an error, `device` tells whether it is lost."""
        self._device = device

    @abstractmethod
    def encode_s(self, patches: int) -> float:
        """Return the seconds that a device needs for `patches` at the measured rate; 0 before the first measurement."""

    @abstractmethod
    def take_to_prepare(self, max_images: int, max_pixels: int) -> list[Job]:
        """Wait for images to decode in one batch and return them; an empty list when the queue is closed.

        Returns only one image while the device waits for a batch.
        """

    @abstractmethod
    def take_single(self, max_pixels: int) -> list[Job]:
        """Wait for one image to decode by itself and return it; an empty list when the queue is closed.

        Until `prepared` or `drop` is called for them, the images taken here hold at most `max_pixels` together, plus
        one image that the scheduler calls large.
        """

    @abstractmethod
    def is_wanted(self, job: Job) -> bool:
        """Whether the queue is open, and a caller still wants an image that is being decoded."""

    @abstractmethod
    def decoded(self, jobs: Sequence[Job], seconds: float) -> None:
        """Report how many seconds a thread spent on decoding these jobs together, including jobs that failed."""

    @abstractmethod
    def retry_single(self, job: Job) -> None:
        """Report that the batch decoder failed on a job's image: queue it to be decoded by itself."""

    @abstractmethod
    def prepared(self, jobs: Sequence[tuple[Job, Inputs]], ready: "torch.cuda.Event | None") -> None:
        """Report that the patches of these jobs are ready; on CUDA, once `ready` has passed."""

    @abstractmethod
    def take_batch(self, budget_patches: int) -> tuple[list[Job] | GroupEncode, float]:
        """Wait for the next batch; return it, and the seconds that the device was idle while images were queued.

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
        """Return jobs of a batch to the queue, for a later batch. Jobs without claims end."""

    @abstractmethod
    def failed(self, jobs: Sequence[Job], error: Exception) -> None:
        """Report that a batch failed: one image ends with `error`, several are retried in smaller batches."""

    @abstractmethod
    def encoded(self, jobs: Sequence[Job], outcomes: Sequence[Pin | EncoderError], seconds: float) -> None:
        """Report the outcome of each job of a batch, and the seconds that the device was busy with the batch."""

    @abstractmethod
    def drop(self, job: Job, error: EncoderError) -> None:
        """End a job that failed before its batch was encoded."""

    @abstractmethod
    def abort(self, why: str, error: BaseException) -> None:
        """End the process: it cannot encode any more."""

    def known_error(self, error: Exception) -> EncoderError:
        """Translate an error for the callers that wait for an image. Call it on the thread that caught the error.

        Ends the process if the device is lost; see `lost_device`.
        """
        if self.lost_device(error):
            return UnavailableError(DEVICE_LOST)
        if self._device.is_full(error):
            log.warning("the device is short of memory", exc_info=error)
            return OverloadedError("the device is out of memory: retry", retry_after_ms=SHORT_RETRY_MS)
        return known_error(error)

    def lost_device(self, error: Exception) -> bool:
        """Check the device after `error`. Return whether it is lost, and then end the process.

        If the device is only out of memory, free memory.
        """
        if isinstance(error, EncoderError):
            return False
        if not self._device.is_lost():
            if self._device.is_full(error):
                self._device.recover(error)
            return False
        self.abort(DEVICE_LOST, error)
        return True


@dataclass(eq=False, slots=True)
class _DeviceState:
    """What the queue knows about a device."""

    is_open: bool = True
    waits: bool = False  # for a batch
    idle_since: float | None = None  # when it began to wait for a batch while images were queued
    group: tuple[Job, GroupEncode] | None = None  # to join instead of taking a batch
    # Tasks being decoded by themselves. They hold pixels even after their last claim is withdrawn.
    singles: set[Task] = field(default_factory=set)

    @property
    def is_free(self) -> bool:
        """Whether the device waits for a batch and has not been told to join a group."""
        return self.is_open and self.waits and self.group is None


class JobQueue(Work):
    """Single flight: one job per address, any number of claims on it.

    Call `submit`, `join`, `wait`, `withdraw` and `fail_all` on the event loop, the rest on any thread. The methods of
    `Work` take the number of the worker's device.
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
        """Create a queue for this number of `devices`; `device` is the one of this process, by default the CPU.

        Both callbacks run on the event loop: `on_end` at the end of every job, `on_abort` when no job can succeed.
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
        self._of_pixels: LRUCache[bytes, bytes] = LRUCache(KNOWN_FRAMES)  # pixels -> newest address
        self._closed = False
        self._devices = [_DeviceState() for _ in range(devices)]
        self._group_number = 0

    def __len__(self) -> int:
        """Return the number of jobs, in any stage."""
        return len(self._jobs)

    def __contains__(self, key: ImageKey) -> bool:
        return key.address in self._jobs

    def knows(self, key: ImageKey) -> bool:
        """Whether there is a job for the image, or the store holds its rows."""
        return key in self or self._store.contains(key.address)

    def snapshot(self) -> Snapshot:
        """Return the counts of the queue at this moment."""
        with self._turn:
            return self._scheduler.snapshot()

    def encode_s(self, patches: int) -> float:
        rate = self._scheduler.patches_per_s
        return patches * len(self._devices) / rate if rate else 0.0

    def check_room(self, holder: str, patches: int) -> None:
        """Raise `OverloadedError` or `ImageLimitError` if an image of this many patches would be refused now."""
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
        """Attach a claim to the job of an image, if there is one. The claim of a Fetch makes the job demanded.

        Raises `InvalidImageError` for an image known to be damaged, `OverloadedError` if there are too many claims.
        """
        self._failures.check(key)
        with self._turn:
            return self._join(key, claim)

    def wait(self, job: Job, claim: Claim) -> "asyncio.Future[Pin]":
        """Return a future of the rows of `job`, pinned. When the future is done or cancelled, `claim` ends."""
        waiter: asyncio.Future[Pin] = self._loop.create_future()

        def leave(waiter: "asyncio.Future[Pin]") -> None:
            job.waiters.discard(waiter)
            self.withdraw(claim)

        job.waiters.add(waiter)
        waiter.add_done_callback(leave)
        return waiter

    def withdraw(self, claim: Claim) -> None:
        """End a claim. A job without claims is dropped, unless its batch has started."""
        with self._turn:
            task = self._scheduler.withdraw(claim)
            if task is None:
                return
            self._task_left()
            job = self._jobs.pop(task.address, None)
        if job is not None:  # None: it ended when the queue was closed
            self._abandon(job)

    def fail_all(self, error: EncoderError) -> None:
        """End all jobs with `error`."""
        for job in list(self._jobs.values()):
            self._finish(job, error)

    # The workers' side: see `Work`

    def take_to_prepare(self, max_images: int, max_pixels: int, device: int = 0) -> list[Job]:
        def pick(scheduler: Scheduler, now: float) -> Sequence[Task]:
            most = 1 if self._devices[device].waits else max_images
            return scheduler.next_to_prepare(now, most, max_pixels, device)

        with self._turn:
            return self._take(pick, device)

    def take_single(self, max_pixels: int, device: int = 0) -> list[Job]:
        state = self._devices[device]

        def pick(scheduler: Scheduler, now: float) -> Sequence[Task]:
            pixels = [task.source_pixels for task in state.singles if not scheduler.is_large(task)]
            room = max_pixels - sum(pixels) if pixels else math.inf
            has_large = len(pixels) < len(state.singles)
            tasks = scheduler.next_single(now, room, large=not has_large, device=device)
            state.singles.update(tasks)
            return tasks

        with self._turn:
            return self._take(pick, device)

    def is_wanted(self, job: Job) -> bool:
        return not self._closed and job.task.state is not State.GONE

    def decoded(self, jobs: Sequence[Job], seconds: float) -> None:
        with self._turn:
            self._scheduler.decoded([job.task for job in jobs], seconds)

    def retry_single(self, job: Job) -> None:
        with self._turn:
            self._scheduler.retry_single(job.task, monotonic())
            self._turn.notify_all()

    def prepared(self, jobs: Sequence[tuple[Job, Inputs]], ready: "torch.cuda.Event | None") -> None:
        # Frames whose pixels were encoded before, in this video or another, get a copy of those rows.
        copies = [self._copy_of_equal(job) for job, _ in jobs]
        with self._turn:
            for (job, patches), copy in zip(jobs, copies, strict=True):
                if copy is not None:
                    self._scheduler.drop(job.task)
                    self._of_pixels[job.pixels] = job.key.address
                elif self._scheduler.prepared(job.task, monotonic()):
                    job.patches, job.patches_ready = patches, ready
                self._devices[job.task.device].singles.discard(job.task)
            self._task_left()
        for (job, _), copy in zip(jobs, copies, strict=True):
            if copy is not None:
                job.is_copied = True
                self._end(job, copy)

    def take_batch(self, budget_patches: int, device: int = 0) -> tuple[list[Job] | GroupEncode, float]:
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
        with self._turn:
            others = [each for number, each in enumerate(self._devices) if number != device]
            # An image whose encoding was interrupted is encoded by one device.
            if not others or job.task.interruptions or not all(each.is_free for each in others):
                return None
            group = GroupEncode(self._group_number, device, len(self._devices), job.grid)
            for each in others:
                each.group = job, group
            self._turn.notify_all()
            return group

    def group_failed(self) -> None:
        with self._turn:
            self._group_number += 1

    def take_overtaking(self, batch: Sequence[Job], most_patches: int, device: int = 0) -> list[Job]:
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
        with self._turn:
            self._drop_unwanted(jobs, self._scheduler.put_back([job.task for job in jobs]))

    def failed(self, jobs: Sequence[Job], error: Exception) -> None:
        with self._turn:
            ended = self._scheduler.failed([job.task for job in jobs])
            self._drop_unwanted(jobs if len(jobs) > 1 else (), ended)
        if len(jobs) == 1:
            self._end(jobs[0], self.known_error(error))

    def encoded(self, jobs: Sequence[Job], outcomes: Sequence[Pin | EncoderError], seconds: float) -> None:
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
        with self._turn:
            self._scheduler.drop(job.task)
            self._devices[job.task.device].singles.discard(job.task)
            self._task_left()
        self._end(job, error)

    def leave(self, device: int) -> None:
        """Hand out no more jobs to a device whose process has ended: its workers get an empty list."""
        with self._turn:
            self._devices[device].is_open = False
            self._group_number += 1
            self._turn.notify_all()

    def interrupted(self, device: int) -> None:
        """Requeue the jobs of a device that has left, once no thread works for it; then it may take jobs again.

        An image fails if this was the third end of a process that was encoding it.
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
        """End every job, and the process: it cannot encode any more."""
        log.critical("%s: ending the process", why, exc_info=error)
        self.close()
        self._loop.call_soon_threadsafe(self._abort, why)

    def close(self) -> None:
        """Refuse new images and hand out no more jobs: workers get an empty list. Callers may still join jobs."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def _end(self, job: Job, outcome: Pin | EncoderError) -> None:
        self._loop.call_soon_threadsafe(self._finish, job, outcome)

    def _copy_of_equal(self, job: Job) -> Pin | None:
        """Copy the rows of equal frames to this job's address; return a pin on the copy, None if there are none."""
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
            except EncoderError:  # no room, or the copy is damaged: encode these frames
                if copy is not None:
                    copy.abandon()
                return None

    # Internals that need the lock

    def _join(self, key: ImageKey, claim: Claim) -> Job | None:
        job = self._jobs.get(key.address)
        if job is not None and claim.task is None:
            self._scheduler.claim(claim, key.address, monotonic())
            if claim.demanded:
                self._turn.notify_all()  # as a demanded image it may be decoded now
        return job

    def _take(self, pick: Pick, device: int) -> list[Job]:
        state = self._devices[device]
        while state.is_open and not self._closed:
            tasks = pick(self._scheduler, monotonic())
            if tasks is None:
                break
            if tasks:
                self._turn.notify_all()  # the tasks may have made room in another stage
                return [self._jobs[task.address] for task in tasks]
            self._turn.wait()
        return []

    def _task_left(self) -> None:
        """Note that an image left without being encoded: if it was the last one, no waiting device is starved now."""
        if not self._scheduler.waiting_images:
            for device in self._devices:
                device.idle_since = None
        self._turn.notify_all()

    def _drop_unwanted(self, jobs: Sequence[Job], ended: Sequence[Task]) -> None:
        """Forget jobs that ended with their batch: a caller that submits one now must not get that failure."""
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

    # Internals on the event loop, without the lock

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def _abort(self, why: str) -> None:
        error = UnavailableError(f"{why}: use another server")
        self.fail_all(error)
        self._on_abort(error)

    def _abandon(self, job: Job) -> None:
        abandoned = AbandonedError("all callers of the image have left")
        if job.key not in self:  # if it is, it was submitted again
            self._on_end(job, abandoned)
        job.fail(abandoned)

    def _finish(self, job: Job, outcome: Pin | EncoderError) -> None:
        error = outcome if isinstance(outcome, EncoderError) else None
        with self._turn:
            forgotten = self._forget(job)
        if not forgotten and error is not None:
            return  # `on_end` was called when its last claim was withdrawn
        self._metrics.encoded(monotonic() - job.queued_at, job.stage_ms, error, is_copied=job.is_copied)
        if isinstance(outcome, EncoderError):
            self._failures.note(job.key, outcome)
            self._on_end(job, outcome)
            job.fail(outcome)
            return
        self._on_end(job, outcome)
        self._give(outcome, list(job.waiters))

    def _give(self, held: Pin, waiters: "list[asyncio.Future[Pin]]") -> None:
        """Give each waiter its own pin, a few in each pass of the event loop: thousands may wait."""
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
    """A bounded map from images to their errors; the oldest is evicted first. Used on the event loop.

    By source, not by address: a damaged file is damaged in all variants. But an image that is too large in one variant
    may fit in another, and a video may have other frames: those are kept by address.
    """

    def __init__(self) -> None:
        self._errors: FIFOCache[bytes, InvalidImageError] = FIFOCache(FAILURES)

    def note(self, key: ImageKey, error: EncoderError) -> None:
        """Remember `error` if it is the image's own fault; other failures may be temporary."""
        if isinstance(error, InvalidImageError):
            by_address = isinstance(error, ImageLimitError) or key.frames is not None
            self._errors[key.address if by_address else key.source_key] = error

    def check(self, key: ImageKey) -> None:
        """Raise the error remembered for the image, if there is one."""
        error = self._errors.get(key.source_key) or self._errors.get(key.address)
        if error is not None:
            raise type(error)(error.message)
