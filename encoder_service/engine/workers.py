"""The workers before and after the ViT: they prepare images, and copy rows out to the store.

Each runs on threads of its own. A failure ends the image that caused it, and the worker goes on; a lost device ends the
process.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Queue
from time import monotonic

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_service.engine.cuda_stream import CudaStream
from encoder_service.engine.job_queue import Job, JobQueue
from encoder_service.engine.model import Model
from encoder_service.image.patches import to_patches
from encoder_service.observability.metrics import Metrics
from encoder_service.scheduler import Task
from encoder_service.store import Pin, Store
from encoder_service.vision import flops

log = logging.getLogger(__name__)

# Images decoded at a time once the device has work. nvJPEG is much faster on several; a change of demand waits for the
# whole batch, which is a few milliseconds there, and a few for each image on the CPU.
PREPARE_IMAGES = {"cuda": 32, "cpu": 2}
# Batches between the ViT and the copy-out: one being copied and one waiting keep the device from ever waiting for a
# copy; more would only hold rows in device memory.
COPY_OUT_DEPTH = 1


class Prepare:
    """Decodes images and cuts them into patches: `run` on one thread, `run_apart` on several."""

    def __init__(
        self, jobs: JobQueue, model: Model, metrics: Metrics, *, max_patches: int, max_pixels: int
    ) -> None:
        """`max_patches` and `max_pixels` (of sources) bound a batch; the latter also what is decoded one by one."""
        self._jobs = jobs
        self._decoder = model.decoder
        self._resize = model.resize
        self._tower = model.tower
        self._device = model.device
        self._metrics = metrics
        self._max_images = PREPARE_IMAGES[model.device.kind]
        self._max_patches = max_patches
        self._max_pixels = max_pixels

    def run(self) -> None:
        """Decode in batches until the queue is closed."""
        stream = self._device.stream()
        while jobs := self._jobs.take_to_prepare(self._max_patches, self._max_images, self._max_pixels):
            with stream.use():
                self._prepare(jobs, stream)
            del jobs  # a thread that sleeps holds no image

    def run_apart(self) -> None:
        """Decode images one by one, beside the batches, so that no other image waits for a slow one."""
        stream = self._device.stream()
        while jobs := self._jobs.take_apart(self._max_pixels):
            with stream.use():
                self._prepare_apart(jobs[0], stream)
            self._jobs.taken_apart(jobs[0])
            del jobs

    def _prepare(self, jobs: list[Job], stream: CudaStream) -> None:
        began = monotonic()
        decoded: Sequence[Tensor | None]
        try:
            decoded = self._decoder.decode_batch([job.source for job in jobs])
        except Exception as error:
            if self._jobs.lost_device(error):
                return
            log.warning("%d images were not decoded; they follow one by one", len(jobs), exc_info=error)
            decoded = [None] * len(jobs)
        self._jobs.decoded(jobs, monotonic() - began)
        good: list[tuple[Job, Tensor]] = []
        for job, pixels in zip(jobs, decoded, strict=True):
            if pixels is None:
                self._jobs.put_apart(job)
            elif self._decoded(job, pixels, began):
                self._metrics.decoded("dali")
                good.append((job, pixels))
        self._cut(good, stream)

    def _prepare_apart(self, job: Job, stream: CudaStream) -> None:
        began = monotonic()
        try:
            pixels = self._decoder.decode_one(job.source)
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            pixels = self._jobs.known_error(error)
        self._jobs.decoded([job], monotonic() - began)
        if self._decoded(job, pixels, began) and not isinstance(pixels, EncoderError):
            self._metrics.decoded("pillow")
            self._cut([(job, pixels)], stream)

    def _decoded(self, job: Job, pixels: Tensor | EncoderError, began: float) -> bool:
        """Note how long decoding took; drop a job whose pixels are an error or not of the size in its header."""
        job.stage("queue", job.queued_at, began)
        self._metrics.queued(began - job.queued_at, demanded=job.task.demanded)
        job.stage("decode", began, monotonic())
        wrong = pixels if isinstance(pixels, EncoderError) else wrong_size(pixels, job.source.header.upright)
        if wrong is not None:
            self._jobs.drop(job, wrong)
        return wrong is None

    def _cut(self, good: list[tuple[Job, Tensor]], stream: CudaStream) -> None:
        """Cut decoded images into patches; if that fails, one image at a time, so that each fails by itself."""
        if not good:
            return
        began = monotonic()
        try:
            patches = to_patches([p for _, p in good], [job.grid for job, _ in good], self._resize)
            for grid in {job.grid for job, _ in good}:
                self._tower.prepare(grid)
        except Exception as error:
            if len(good) == 1:
                self._jobs.drop(good[0][0], self._jobs.known_error(error))
                return
            if self._jobs.lost_device(error):
                return
            log.warning("patches of %d images failed; they follow one by one", len(good), exc_info=error)
            for one in good:
                self._cut([one], stream)
            return
        ended = monotonic()
        for job, _ in good:
            job.stage("preprocess", began, ended)
        self._jobs.prepared([(job, p) for (job, _), p in zip(good, patches, strict=True)], stream.mark())


@dataclass(frozen=True, slots=True)
class Batch:
    """What the ViT hands to the copy-out. On CUDA the rows are still being computed until `end` passes."""

    jobs: list[Job]
    tasks: list[Task]
    rows: list[Tensor]
    finite: Tensor  # see `are_finite`
    began_at: float
    ended_at: float
    begin: "torch.cuda.Event | None"
    end: "torch.cuda.Event | None"

    def device_s(self) -> float:
        """Return how long the device was busy with the batch, seconds; on CUDA, wait until it is through."""
        if self.begin is None or self.end is None:
            return self.ended_at - self.began_at
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1000


class CopyOut:
    """Stores rows. The ViT's thread calls `put`, which waits while too many batches are pending; `run` has its own."""

    def __init__(self, jobs: JobQueue, model: Model, store: Store, metrics: Metrics) -> None:
        self._jobs = jobs
        self._tokens = model.processor.geometry.tokens
        self._spec = model.tower.spec
        self._device = model.device
        self._store = store
        self._metrics = metrics
        self._batches: Queue[Batch | None] = Queue(COPY_OUT_DEPTH)

    def put(self, batch: Batch | None) -> None:
        """Hand a batch over; None: there will be no more."""
        self._batches.put(batch)

    def run(self) -> None:
        """Store the rows of batches until there are no more."""
        stream = self._device.stream()
        while (batch := self._batches.get()) is not None:
            with stream.use():
                self._keep(batch, stream)
            del batch

    def drop(self) -> None:
        """Drop batches until there are no more: for a thread that died, or the ViT's would wait for it for ever."""
        while self._batches.get() is not None:
            pass

    def _keep(self, batch: Batch, stream: CudaStream) -> None:
        try:
            seconds = batch.device_s()
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            self._failed(batch, error)
            return
        stream.receive(batch.end, batch.rows)
        self._jobs.encoded(batch.tasks, seconds)
        grids = [job.grid for job in batch.jobs]
        self._metrics.batch(grids, seconds, sum(flops(self._spec, grid) for grid in grids))
        for job, rows, is_finite in zip(batch.jobs, batch.rows, batch.finite.tolist(), strict=True):
            began = monotonic()
            job.stage("vit", batch.began_at, batch.began_at + seconds)
            try:
                if not is_finite:  # kept, they would be served again and again
                    raise ArithmeticError("the tower's rows contain a NaN or an infinity")
                outcome: Pin | EncoderError = self._store.put(
                    job.key.address, rows, job.grid, is_set_aside=True
                )
            except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
                outcome = self._jobs.known_error(error)
            self._store.give_back(self._tokens(job.grid))
            job.stage("copy_out", began, monotonic())
            self._jobs.end(job, outcome)

    def _failed(self, batch: Batch, error: Exception) -> None:
        """End a batch whose rows never came to be: what a kernel did wrong shows where it is waited for."""
        known = self._jobs.known_error(error)
        for job in batch.jobs:
            self._store.give_back(self._tokens(job.grid))
            self._jobs.drop(job, known)


def wrong_size(pixels: Tensor, size: tuple[int, int]) -> InvalidImageError | None:
    """Return the error of pixels that are not what their header says: the grid was computed from that."""
    height, width, _ = pixels.shape
    if (width, height) == size:
        return None
    return InvalidImageError(f"it decodes to {width}x{height} pixels, its header says {size[0]}x{size[1]}")


def are_finite(rows: Sequence[Tensor]) -> Tensor:
    """Return whether each image's rows are finite: bool [images], on the host once an event after this has passed."""
    flags = [torch.stack(each.aminmax()).isfinite().all() for each in rows]  # either is NaN if any element is
    return torch.stack(flags).to("cpu", non_blocking=True)
