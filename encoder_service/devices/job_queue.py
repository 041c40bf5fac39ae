"""The job queue: one job per address, the callers that wait for it, and the scheduler that orders the jobs.

The event loop owns it, so it has no lock; only the rows of equal frames are copied on a thread. `Dispatcher` decides
when to push jobs; each `Link` sends them to its device, and reports how they ended. `FailureCache` remembers images
that can never be encoded, so that a broken file is decoded only once.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from cachetools import FIFOCache, LRUCache, TTLCache

from encoder_contract.errors import (
    AbandonedError,
    EncoderError,
    ImageLimitError,
    InternalError,
    InvalidImageError,
    UnavailableError,
)
from encoder_contract.geometry import Grid
from encoder_service.devices.faults import Faults
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from encoder_service.limits import AT_A_TIME
from encoder_service.metrics import Metrics
from encoder_service.scheduler import MOST_INTERRUPTIONS, Claim, Scheduler, State, Task
from encoder_service.store import Pin, Store

if TYPE_CHECKING:
    from encoder_service.devices.torch_device import Device

log = logging.getLogger(__name__)

# Work is pushed to the devices this long after a Submit, so that its answer is sent first, and its images go together.
ANSWER_FIRST_S = 0.001
# Pairs of frames whose rows can be found by their pixels, about 200 bytes each.
KNOWN_FRAMES = 65536

Waiter = Callable[[Pin | EncoderError], None]
"""What a caller that waits for a job passes to `JobQueue.watch`: called once, with a pin of its own or the error."""


@dataclass(eq=False, slots=True, kw_only=True)
class Job(Task):
    """One image to encode: a task of the scheduler with its image, and the callers that wait for its rows."""

    key: ImageKey
    source: Source
    grid: Grid
    queued_at: float
    number: int = 0  # its name in messages to the device that has it
    pixels: bytes = b""  # of frames: see `ImageKey.of_pixels`
    is_copied: bool = False  # its rows were copied from equal frames
    stage_ms: dict[str, float] = field(default_factory=dict)
    stage_began_s: dict[str, float] = field(default_factory=dict)  # on time.monotonic's clock
    waiters: dict[Waiter, None] = field(default_factory=dict)  # an ordered set

    def stage(self, name: str, began_s: float, ended_s: float) -> None:
        """Record when a stage of this image began and how long it took."""
        self.stage_began_s[name] = began_s
        self.stage_ms[name] = (ended_s - began_s) * 1000


class JobQueue:
    """Single flight: one job per address, any number of claims on it. Use from one event loop."""

    def __init__(
        self,
        scheduler: Scheduler[Job],
        can_batch: Callable[[Source], bool],
        store: Store,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics | None = None,
        on_end: Callable[[Job, Pin | EncoderError], None] = lambda _job, _outcome: None,
        device: "Device | None" = None,
        devices: int = 1,
        on_abort: Callable[[UnavailableError], None] = lambda _error: None,
    ) -> None:
        """Create a queue for this number of `devices`; `device` is the one that this process uses, if any.

        `can_batch` says whether an image is decoded in batches.

        `on_end` is called at the end of every job, `on_abort` when no job can succeed.
        """
        self.scheduler = scheduler
        self._can_batch = can_batch
        self._store = store
        self._metrics = metrics or Metrics()
        self._on_end = on_end
        self._on_abort = on_abort
        self._loop = loop
        self._failures = FailureCache()
        self._jobs: dict[bytes, Job] = {}
        self._of_pixels: LRUCache[bytes, bytes] = LRUCache(KNOWN_FRAMES)  # pixels -> newest address
        self._closed = False
        self._devices = devices
        self._dispatch_due = self._answer_due = False
        self._copying: set[asyncio.Task[None]] = set()
        self._faults = Faults(device, self.abort)
        self.dispatch: Callable[[], None] = lambda: None
        """Called soon after there may be more work for the devices. `Dispatcher` sets it."""
        self.on_gone: Callable[[Job], None] = lambda _job: None
        """Called when a job ends that a device may still have. `Dispatcher` sets it."""

    def __len__(self) -> int:
        """Return the number of jobs, in any stage."""
        return len(self._jobs)

    def __contains__(self, key: ImageKey) -> bool:
        return key.address in self._jobs

    @property
    def is_closed(self) -> bool:
        """Whether no more jobs are handed out."""
        return self._closed

    def knows(self, key: ImageKey) -> bool:
        """Whether there is a job for the image, or the store holds its rows."""
        return key in self or self._store.contains(key.address)

    def encode_s(self, patches: int) -> float:
        """Return the seconds that a device needs for `patches` at the measured rate; 0 before the first measurement."""
        rate = self.scheduler.patches_per_s
        return patches * self._devices / rate if rate else 0.0

    def check_room(self, key: ImageKey, patches: int, size_bytes: int, claim: Claim) -> None:
        """Raise `OverloadedError` or `ImageLimitError` if an image of this many patches would be refused now.

        If the claim `reserves`, the image gets its place in the queue, until it is submitted or the claim is withdrawn.
        0 is an unknown amount.
        """
        if claim.reserves:
            self.scheduler.reserve(claim, key.address, patches, size_bytes)
        elif patches:
            self.scheduler.check_room(claim, patches)

    def known_error(self, error: Exception) -> EncoderError:
        """Translate an error for callers that wait for rows; see `Faults`."""
        return self._faults.known_error(error)

    # The callers' side

    def submit(self, key: ImageKey, source: Source, grid: Grid, claim: Claim) -> Job | None:
        """Queue an image, or join its job; return None if its rows are held.

        Raises `OverloadedError` when the queue is full, `ImageLimitError` for an image that never fits, and
        `UnavailableError` when the queue is closed.
        """
        if self._store.contains(key.address):
            return None
        if (job := self._join(key, claim)) is not None:
            return job
        if self._closed:
            raise UnavailableError("the server is shutting down: use another server")
        now, pixels = monotonic(), source.header.pixels
        if key.frames is not None:
            pixels = 2 * max(pixels, math.prod(key.frames.bilinear or ()))
        job = Job(
            key.address,
            grid.patches,
            len(source.data),
            source_pixels=pixels,
            as_large=key.frames is not None,
            interruptions=self._failures.interruptions(key),
            key=key,
            source=source,
            grid=grid,
            queued_at=now,
        )
        self.scheduler.admit(claim, job, now, single=not self._can_batch(source))
        self._jobs[key.address] = job
        if not self._answer_due:
            self._answer_due = True
            self._loop.call_later(ANSWER_FIRST_S, self._answered)
        return job

    def join(self, key: ImageKey, claim: Claim) -> Job | None:
        """Attach a claim to the job of an image, if there is one. The claim of a Fetch makes the job demanded.

        Raises `InvalidImageError` for an image known to be damaged, `OverloadedError` if there are too many claims.
        """
        self._failures.check(key)
        return self._join(key, claim)

    def watch(self, job: Job, waiter: Waiter) -> None:
        """Have `waiter` called once at the end of `job`: with the error, or with a pin that the caller releases.

        It must not raise. Claims are separate: the caller withdraws its own.
        """
        job.waiters[waiter] = None

    def unwatch(self, job: Job, waiter: Waiter) -> None:
        """Undo `watch`. Does nothing if the waiter has been called."""
        job.waiters.pop(waiter, None)

    def wait(self, job: Job, claim: Claim) -> "asyncio.Future[Pin]":
        """Return a future of the rows of `job`, pinned. When the future is done or cancelled, `claim` ends."""
        future: asyncio.Future[Pin] = self._loop.create_future()

        def ended(outcome: Pin | EncoderError) -> None:
            if isinstance(outcome, EncoderError):
                if not future.done():
                    future.set_exception(outcome)
            elif future.done():  # it was cancelled in this pass of the event loop
                outcome.release()
            else:
                future.set_result(outcome)

        def leave(_: "asyncio.Future[Pin]") -> None:
            self.unwatch(job, ended)
            self.withdraw(claim)

        self.watch(job, ended)
        future.add_done_callback(leave)
        return future

    def withdraw(self, claim: Claim) -> None:
        """End a claim. A job without claims is dropped, unless its batch has started."""
        if (job := self.scheduler.withdraw(claim)) is not None:
            self.poke()
            if self._jobs.get(job.address) is job:
                self._abandon(job)

    def fail_all(self, error: EncoderError) -> None:
        """End all jobs with `error`."""
        for job in list(self._jobs.values()):
            self._end(job, error)

    # The devices' side. Each device has a number

    def poke(self) -> None:
        """Call `dispatch` once, after the other work of this pass of the event loop."""
        if not self._dispatch_due:
            self._dispatch_due = True
            self._loop.call_soon(self._dispatch)

    def prepared(self, job: Job) -> None:
        """Report that the patches of a job are ready.

        Frames whose pixels were encoded before, in this video or another, get a copy of those rows, if it can be made.
        """
        address = self._of_pixels.get(job.pixels) if job.pixels else None
        if address is not None and job.state is not State.GONE:
            copying = self._loop.create_task(self._copy(job, job.number, address), name="copy-of-frames")
            self._copying.add(copying)
            copying.add_done_callback(self._copying.discard)
        else:
            self.scheduler.prepared(job, monotonic())

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Return jobs of a batch to the queue, for a later batch. Jobs without claims end."""
        for job in self.scheduler.put_back(jobs):
            self._abandon(job)

    def failed(self, jobs: Sequence[Job], error: EncoderError) -> None:
        """Report that a batch failed: one image ends with `error`, several are retried in smaller batches."""
        for job in self.scheduler.failed(jobs):
            if len(jobs) > 1:
                self._abandon(job)
            else:
                self._end(job, error)

    def encoded(self, jobs: Sequence[Job], outcomes: Sequence[Pin | EncoderError], seconds: float) -> None:
        """Report the outcome of each job of a batch, and the seconds that the device was busy with the batch."""
        # The rate of admission is that of all devices together.
        self.scheduler.done(jobs, seconds / self._devices)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.pixels and isinstance(outcome, Pin):
                self._of_pixels[job.pixels] = outcome.address
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._end(job, outcome)

    def end(self, job: Job, outcome: Pin | EncoderError) -> None:
        """End a job before its batch is encoded: it failed, or its rows are held."""
        self.scheduler.drop(job)
        self._end(job, outcome)

    def interrupted(self, device: int, unwanted: Sequence[Job] = ()) -> bool:
        """Requeue the jobs of a device that is lost; `unwanted` are jobs that ended while it decoded their images.

        An image fails if this was the third loss of a device that was decoding or encoding it. Return whether the loss
        counts against the device: not if an earlier suspect was alone there and will be tried again.
        """
        suspect = self.scheduler.suspect(device)
        earlier = suspect.interruptions if suspect is not None else 0
        ended = self.scheduler.interrupted(device, monotonic())
        for job in unwanted:
            job.interruptions += 1
        for job in (*unwanted, *self._jobs.values()):
            self._failures.note_interruptions(job.key, job.interruptions)
        for job in ended:
            if self._jobs.get(job.address) is not job:  # all jobs were failed
                continue
            if job.interruptions >= MOST_INTERRUPTIONS:
                self._end(job, InternalError(ENDS_DEVICES))
            else:
                self._abandon(job)
        self.poke()
        return suspect is None or suspect in ended or suspect.interruptions == earlier

    def abort(self, why: str, error: BaseException) -> None:
        """End every job, and the process: it cannot encode any more. Call it on any thread."""
        log.critical("%s: ending the process", why, exc_info=error)
        self._closed = True
        self._loop.call_soon_threadsafe(self._abort, why)

    def close(self) -> None:
        """Refuse new images and hand out no more jobs. Callers may still join jobs."""
        self._closed = True

    # Internals

    def _join(self, key: ImageKey, claim: Claim) -> Job | None:
        job = self._jobs.get(key.address)
        if job is not None and claim.task is None:
            self.scheduler.claim(claim, key.address, monotonic())
            if claim.demanded:
                self.poke()  # as a demanded image it may be decoded now
        return job

    def _answered(self) -> None:
        self._answer_due = False
        self._dispatch()

    def _dispatch(self) -> None:
        self._dispatch_due = False
        if self._closed:
            return
        try:
            self.dispatch()
        except BaseException as error:  # noqa: BLE001 - a queue that hands out nothing would look like an idle server
            self.abort("handing out work failed", error)

    async def _copy(self, job: Job, number: int, address: bytes) -> None:
        """Copy the rows of equal frames to this job's address and end it; without them, the job waits for a batch."""
        try:
            copy = await asyncio.to_thread(self._copy_of_equal, job, address)
        except BaseException as error:
            self.abort("copying the rows of equal frames failed", error)
            raise
        is_waiting = job.number == number and job.state is State.PREPARING_SINGLE
        if copy is None:
            if is_waiting:
                self.scheduler.prepared(job, monotonic())
                self.poke()
        elif is_waiting:
            self._of_pixels[job.pixels] = job.key.address
            job.is_copied = True
            self.end(job, copy)
        else:  # it was withdrawn, or is decoded again
            copy.release()

    def _copy_of_equal(self, job: Job, address: bytes) -> Pin | None:
        """Return a pin on a copy of these rows; None if they are gone or it has no room. On a worker thread."""
        if (held := self._store.pin(address, again=True)) is None:
            return None
        with held:
            return self._store.copy(held, job.key.address, job.holder)

    def _abort(self, why: str) -> None:
        error = UnavailableError(f"{why}: use another server")
        self.fail_all(error)
        self._on_abort(error)

    def _abandon(self, job: Job) -> None:
        """End a job without claims. It is no failure: it is not counted."""
        del self._jobs[job.key.address]
        self.on_gone(job)
        abandoned = AbandonedError("all callers of the image have left")
        self._on_end(job, abandoned)
        self._fail(job, abandoned)

    def _end(self, job: Job, outcome: Pin | EncoderError) -> None:
        """End a job with its outcome, unless its last claim was withdrawn, or all jobs were failed."""
        error = outcome if isinstance(outcome, EncoderError) else None
        is_open = self._jobs.get(job.key.address) is job
        if is_open:
            del self._jobs[job.key.address]
        elif error is not None:
            return
        self.on_gone(job)
        self.poke()
        self._metrics.encoded(monotonic() - job.queued_at, job.stage_ms, error, is_copied=job.is_copied)
        if isinstance(outcome, EncoderError):
            self._failures.note(job.key, outcome)
            self._on_end(job, outcome)
            self._fail(job, outcome)
            return
        if job.interruptions:
            self._failures.acquit(job.key)
        self._on_end(job, outcome)
        self._give(outcome, job.waiters)

    def _fail(self, job: Job, error: EncoderError) -> None:
        waiters = list(job.waiters)
        job.waiters.clear()
        for waiter in waiters:
            waiter(error)

    def _give(self, held: Pin, waiters: dict[Waiter, None]) -> None:
        """Give each waiter its own pin, a few in each pass of the event loop: thousands may wait."""
        for _ in range(min(len(waiters), AT_A_TIME)):
            waiter, _ = waiters.popitem()
            pin = self._store.pin(held.address)
            assert pin is not None, "a pinned entry is held"
            waiter(pin)
        if waiters:
            self._loop.call_soon(self._give, held, waiters)
        else:
            held.release()


FAILURES = 4096  # a few hundred bytes each
# How long an image is suspected after a device's process ended on it: another cause may have ended it.
SUSPECTED_S = 3600.0
ENDS_DEVICES = f"a device's process ended {MOST_INTERRUPTIONS} times on this image"


class FailureCache:
    """A bounded map from images to their errors; the oldest is evicted first. Used on the event loop.

    By source, not by address: a damaged file is damaged in all variants. But an image that is too large in one variant
    may fit in another, and a video may have other frames: those are kept by address.
    """

    def __init__(self) -> None:
        self._errors: FIFOCache[bytes, InvalidImageError] = FIFOCache(FAILURES)
        self._interruptions: TTLCache[bytes, int] = TTLCache(FAILURES, SUSPECTED_S, monotonic)

    def note(self, key: ImageKey, error: EncoderError) -> None:
        """Remember `error` if it is the image's own fault; other failures may be temporary."""
        if isinstance(error, InvalidImageError):
            self._errors[key.address if isinstance(error, ImageLimitError) else _file(key)] = error

    def note_interruptions(self, key: ImageKey, interruptions: int) -> None:
        """Remember on how many works on the image a device's process ended. Callers who leave do not reset it."""
        if interruptions > self.interruptions(key):
            self._interruptions[_file(key)] = interruptions

    def interruptions(self, key: ImageKey) -> int:
        """Return what was noted."""
        return self._interruptions.get(_file(key), 0)

    def acquit(self, key: ImageKey) -> None:
        """Forget the interruptions of an image that was encoded."""
        self._interruptions.pop(_file(key), None)

    def check(self, key: ImageKey) -> None:
        """Raise the error remembered for the image, if there is one."""
        error = self._errors.get(key.source_key) or self._errors.get(key.address)
        if error is not None:
            raise type(error)(error.message)
        if self.interruptions(key) >= MOST_INTERRUPTIONS:
            raise InternalError(ENDS_DEVICES)


def _file(key: ImageKey) -> bytes:
    """Return the key of the file of an image; of frames, their address."""
    return key.source_key if key.frames is None else key.address
