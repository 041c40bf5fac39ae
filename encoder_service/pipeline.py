"""The pipeline: decode, preprocess, ViT and copy-out, each on its own thread, at work on different images.

The event loop hands images in and awaits their rows; it never runs a stage. The scheduler decides the order and
is guarded by one lock, held for microseconds. A stage that fails fails its images and goes on; a device that is
lost ends the process.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Queue
from time import monotonic
from uuid import uuid4

import torch
from torch import Tensor

from encoder_contract.errors import (
    AbandonedError,
    EncoderError,
    InternalError,
    InvalidImageError,
    UnavailableError,
)
from encoder_contract.geometry import Grid
from encoder_service.lanes import Lane
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Claim, Scheduler, Snapshot, Work
from encoder_service.store import Pin

log = logging.getLogger(__name__)

# Batches between the ViT and the copy-out: one being copied and one waiting keep the device from ever waiting for a
# copy; more would only hold rows in device memory.
COPY_OUT_DEPTH = 1
# Images decoded at a time once the device has work: nvJPEG is much faster on several, and what demand changes
# meanwhile can wait these few milliseconds.
PREPARE_IMAGES = 8


@dataclass(frozen=True, slots=True)
class Stages:
    """What the pipeline strings together; each function runs on a thread of the pipeline's own.

    `decode` takes image files and returns uint8 pixels [H, W, 3] or an error for each. `to_patches` takes pixels and
    grids and returns uint8 patches. `encode` takes patches and grids and returns rows [tokens, width]. `put` keeps
    the rows of an address and returns them pinned; `pin` (any thread) pins them again.
    """

    decode: Callable[[Sequence[bytes]], list[Tensor | EncoderError]]
    to_patches: Callable[[Sequence[Tensor], Sequence[Grid]], list[Tensor]]
    encode: Callable[[Sequence[Tensor], Sequence[Grid]], list[Tensor]]
    put: Callable[[bytes, Tensor, Grid], Pin]
    pin: Callable[[bytes], Pin | None]


@dataclass(eq=False, slots=True)
class Job:
    """One image on its way to its rows, and who awaits them."""

    address: bytes
    image: bytes
    size: tuple[int, int]  # width and height, upright, as the header has them
    grid: Grid
    work: Work
    queued_at: float
    patches: Tensor | None = None
    patches_ready: "torch.cuda.Event | None" = None
    stage_ms: dict[str, float] = field(default_factory=dict)
    waiters: "set[asyncio.Future[Pin]]" = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the ViT hands to the copy-out. On CUDA the rows are still being computed until `end` passes."""

    jobs: list[Job]
    works: list[Work]
    rows: list[Tensor]
    began_at: float
    ended_at: float
    begin: "torch.cuda.Event | None"
    end: "torch.cuda.Event | None"


class Pipeline:
    """Jobs by address (single flight), their scheduler, and the threads of the stages.

    `submit`, `join`, `wait`, `withdraw` and `stop` belong to the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stages: Stages,
        *,
        loop: asyncio.AbstractEventLoop,
        batch_patches: int,
        device: str = "cpu",
        metrics: Metrics | None = None,
        on_end: Callable[[bytes, EncoderError | None], None] = lambda _address, _error: None,
        on_lost_device: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler = scheduler
        self._stages = stages
        self._loop = loop
        self._batch_patches = batch_patches
        self._device = device
        self._metrics = metrics or Metrics()
        self._on_end = on_end
        self._on_lost_device = on_lost_device
        self._turn = threading.Condition()
        self._jobs: dict[bytes, Job] = {}
        self._stopping = False
        self._copy_out: Queue[_Batch | None] = Queue(COPY_OUT_DEPTH)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (
                ("prepare", self._prepare_all),
                ("vit", self._encode_all),
                ("copy-out", self._keep_all),
            )
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the stages finish what they are at, end the threads, and fail what is still queued."""
        with self._turn:
            self._stopping = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()
        for job in list(self._jobs.values()):
            self._finish(job, UnavailableError("the server is shutting down: use another one"))

    @property
    def queued_images(self) -> int:
        """Images on their way, in whatever stage."""
        return len(self._jobs)

    def snapshot(self) -> Snapshot:
        """Return the counts of the queue at this moment; any thread may ask."""
        with self._turn:
            return self._scheduler.snapshot()

    # The event loop's side

    def has(self, address: bytes) -> bool:
        """Whether `address` is on its way."""
        return address in self._jobs

    def encode_s(self, patches: int) -> float:
        """Return how long so many patches take the device, seconds, by what was measured; 0 before that."""
        rate = self._scheduler.patches_per_s
        return patches / rate if rate else 0.0

    def submit(self, address: bytes, image: bytes, size: tuple[int, int], grid: Grid, claim: Claim) -> Job:
        """Queue an image, or join its job. Raises `OverloadedError` when the queue is full."""
        now = monotonic()
        with self._turn:
            if (job := self._jobs.get(address)) is not None:
                if claim.work is None:
                    self._scheduler.claim(claim, address, now)
                return job
            if self._stopping:
                raise UnavailableError("the server is shutting down: use another one")
            self._scheduler.admit(claim, address, grid.patches, len(image), now, shape=grid)
            assert claim.work is not None
            job = self._jobs[address] = Job(address, image, size, grid, claim.work, now)
            self._turn.notify_all()
        return job

    def join(self, address: bytes, claim: Claim) -> Job | None:
        """Join the job of `address`, if there is one: a Fetch thereby makes it demanded."""
        with self._turn:
            job = self._jobs.get(address)
            if job is not None and claim.work is None:
                self._scheduler.claim(claim, address, monotonic())
        return job

    async def wait(self, job: Job, claim: Claim) -> Pin:
        """Return the rows of `job`, pinned, or raise its error. Cancelling withdraws `claim`."""
        waiter: asyncio.Future[Pin] = self._loop.create_future()
        job.waiters.add(waiter)
        try:
            return await waiter
        finally:
            job.waiters.discard(waiter)
            self.withdraw(claim)

    def withdraw(self, claim: Claim) -> None:
        """End a claim. Work that nobody wants any more and that is in no batch yet is dropped."""
        with self._turn:
            work = self._scheduler.withdraw(claim)
            if work is None:
                return
            job = self._jobs.pop(work.address)
            self._turn.notify_all()
        abandoned = AbandonedError("everyone who wanted the image has left")
        self._on_end(job.address, abandoned)
        self._fail_waiters(job, abandoned)

    def _finish(self, job: Job, outcome: Pin | EncoderError) -> None:
        with self._turn:
            if self._jobs.get(job.address) is job:
                del self._jobs[job.address]
        error = outcome if isinstance(outcome, EncoderError) else None
        self._metrics.encoded(monotonic() - job.queued_at, job.stage_ms, error)
        self._on_end(job.address, error)
        if isinstance(outcome, EncoderError):
            self._fail_waiters(job, outcome)
            return
        with outcome:  # held until everyone who waits has a hold of its own
            for waiter in job.waiters:
                pin = self._stages.pin(job.address)
                assert pin is not None, "a pinned entry is held"
                if waiter.done():
                    pin.release()
                else:
                    waiter.set_result(pin)

    def _fail_waiters(self, job: Job, error: EncoderError) -> None:
        for waiter in job.waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # The threads' side

    def _prepare_all(self) -> None:
        lane = Lane(self._device)
        while jobs := self._take(self._next_to_prepare):
            with lane.use():
                self._prepare(jobs, lane)

    def _next_to_prepare(self, now: float) -> list[Work]:
        return self._scheduler.next_to_prepare(now, self._batch_patches, PREPARE_IMAGES)

    def _encode_all(self) -> None:
        lane = Lane(self._device)
        while jobs := self._take(lambda now: self._scheduler.next_batch(now, self._batch_patches)):
            with lane.use():
                self._encode(jobs, lane)
        self._copy_out.put(None)

    def _keep_all(self) -> None:
        lane = Lane(self._device)
        while (batch := self._copy_out.get()) is not None:
            with lane.use():
                self._keep(batch, lane)

    def _take(self, pick: Callable[[float], list[Work]]) -> list[Job]:
        """Wait until `pick` gives works and return their jobs; none when the pipeline stops."""
        with self._turn:
            while not self._stopping:
                works = pick(monotonic())
                if works:
                    self._turn.notify_all()  # what moved may have made room for another stage
                    return [self._jobs[work.address] for work in works]
                self._turn.wait()
        return []

    def _prepare(self, jobs: list[Job], lane: Lane) -> None:
        began = monotonic()
        for job in jobs:
            job.stage_ms["queue"] = (began - job.queued_at) * 1000
            self._metrics.queued(began - job.queued_at, demanded=job.work.demanded)
        try:
            decoded = self._stages.decode([job.image for job in jobs])
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            decoded = [_internal(error)] * len(jobs)
        decoded_at = monotonic()
        good: list[tuple[Job, Tensor]] = []
        for job, pixels in zip(jobs, decoded, strict=True):
            job.stage_ms["decode"] = (decoded_at - began) * 1000
            if isinstance(pixels, EncoderError):
                self._drop(job, pixels)
            elif (pixels.shape[1], pixels.shape[0]) != job.size:
                sizes = (
                    f"{pixels.shape[1]}x{pixels.shape[0]} pixels, its header says {job.size[0]}x{job.size[1]}"
                )
                self._drop(job, InvalidImageError(f"the image decodes to {sizes}"))
            else:
                good.append((job, pixels))
        try:
            patches = self._stages.to_patches([p for _, p in good], [job.grid for job, _ in good])
        except Exception as error:  # noqa: BLE001 - as above
            for job, _ in good:
                self._drop(job, _internal(error))
            return
        ready = lane.mark()
        ended = monotonic()
        with self._turn:
            for (job, _), image_patches in zip(good, patches, strict=True):
                job.stage_ms["preprocess"] = (ended - decoded_at) * 1000
                if self._scheduler.prepared(job.work, ended):
                    job.patches, job.patches_ready = image_patches, ready
            self._turn.notify_all()

    def _encode(self, jobs: list[Job], lane: Lane) -> None:
        patches = [job.patches for job in jobs if job.patches is not None]
        assert len(patches) == len(jobs)
        for job in jobs:
            lane.receive(job.patches_ready, patches)
        began, begin = monotonic(), lane.mark()
        try:
            rows = self._stages.encode(patches, [job.grid for job in jobs])
        except Exception as error:  # noqa: BLE001 - as above
            self._encode_failed(jobs, error)
            return
        for job in jobs:
            job.patches = None
        works = [job.work for job in jobs]
        self._copy_out.put(_Batch(jobs, works, rows, began, monotonic(), begin, lane.mark()))

    def _encode_failed(self, jobs: list[Job], error: Exception) -> None:
        if _is_lost_device(error):
            log.critical("the device is lost: ending the process", exc_info=error)
            for job in jobs:
                self._drop(job, UnavailableError("the server lost its device: use another one"))
            self._loop.call_soon_threadsafe(self._on_lost_device)
            return
        log.warning("a batch of %d images failed; smaller ones follow", len(jobs), exc_info=error)
        with self._turn:
            blamed = {work.address for work in self._scheduler.failed([job.work for job in jobs])}
            self._turn.notify_all()
        for job in jobs:
            if job.address in blamed:
                self._outcome(job, _internal(error))

    def _keep(self, batch: _Batch, lane: Lane) -> None:
        seconds = batch.ended_at - batch.began_at
        if batch.begin is not None and batch.end is not None:
            batch.end.synchronize()
            seconds = batch.begin.elapsed_time(batch.end) / 1000
            lane.receive(batch.end, batch.rows)
        with self._turn:
            self._scheduler.done(batch.works, seconds)
            self._turn.notify_all()
        self._metrics.batch([job.grid for job in batch.jobs], seconds)
        for job, rows in zip(batch.jobs, batch.rows, strict=True):
            began = monotonic()
            job.stage_ms["vit"] = seconds * 1000
            try:
                outcome: Pin | EncoderError = self._stages.put(job.address, rows, job.grid)
            except EncoderError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - as above
                outcome = _internal(error)
            job.stage_ms["copy_out"] = (monotonic() - began) * 1000
            self._outcome(job, outcome)

    def _drop(self, job: Job, error: EncoderError) -> None:
        with self._turn:
            self._scheduler.drop(job.work)
            self._turn.notify_all()
        self._outcome(job, error)

    def _outcome(self, job: Job, outcome: Pin | EncoderError) -> None:
        self._loop.call_soon_threadsafe(self._finish, job, outcome)


def _internal(error: Exception) -> InternalError:
    incident = uuid4().hex[:12]
    log.error("internal error %s", incident, exc_info=error)
    return InternalError(f"internal error {incident}; the server's log has the details")


def _is_lost_device(error: Exception) -> bool:
    """Whether no further work can succeed in this process; running out of memory is not that."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
