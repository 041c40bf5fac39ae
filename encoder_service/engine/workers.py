"""The workers: they prepare images, take batches through the ViT, and copy the rows out to the store.

Each runs on threads of its own. What fails ends its own image, and the worker goes on; a lost device ends the process.
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
from encoder_service.observability.incidents import known_error
from encoder_service.observability.metrics import Metrics
from encoder_service.scheduler import Task
from encoder_service.store import Pin, Store
from encoder_service.vision import flops

log = logging.getLogger(__name__)

# Images decoded at a time once the device has work: nvJPEG is much faster on several, and what demand changes
# meanwhile can wait these few milliseconds.
PREPARE_IMAGES = 8
# Batches between the ViT and the copy-out: one being copied and one waiting keep the device from ever waiting for a
# copy; more would only hold rows in device memory.
COPY_OUT_DEPTH = 1


class Prepare:
    """`run` on one thread; `run_apart` on several. An image that fails is dropped with its error, and work goes on."""

    def __init__(
        self, jobs: JobQueue, model: Model, metrics: Metrics, *, max_patches: int, max_pixels: int
    ) -> None:
        """Set the bounds: of a batch that is decoded, and (pixels of sources) of all that is decoded one by one."""
        self._jobs = jobs
        self._decoder = model.decoder
        self._geometry = model.processor.geometry
        self._device = model.device
        self._metrics = metrics
        self._max_patches = max_patches
        self._max_pixels = max_pixels

    def run(self) -> None:
        """Decode in batches until the queue is closed."""
        stream = CudaStream(self._device)
        while jobs := self._jobs.take_to_prepare(self._max_patches, PREPARE_IMAGES, self._max_pixels):
            with stream.use():
                self._prepare(jobs, stream)
            del jobs  # a thread that sleeps holds no image

    def run_apart(self) -> None:
        """Decode one by one what has a cost of its own, while batches go on: nobody waits for a slow image."""
        stream = CudaStream(self._device)
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
        except Exception:
            log.exception("a batch of %d images was not decoded; they follow one by one", len(jobs))
            decoded = [None] * len(jobs)
        good: list[tuple[Job, Tensor]] = []
        for job, pixels in zip(jobs, decoded, strict=True):
            if pixels is None:
                self._jobs.put_apart(job)
            elif self._decoded(job, pixels, began):
                good.append((job, pixels))
        self._cut(good, stream)

    def _prepare_apart(self, job: Job, stream: CudaStream) -> None:
        began = monotonic()
        try:
            pixels = self._decoder.decode_one(job.source)
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            pixels = known_error(error)
        if self._decoded(job, pixels, began) and not isinstance(pixels, EncoderError):
            self._cut([(job, pixels)], stream)

    def _decoded(self, job: Job, pixels: Tensor | EncoderError, began: float) -> bool:
        """Note how long a job's decoding took; drop one whose pixels are an error, or not what its header says."""
        job.stage("queue", job.queued_at, began)
        self._metrics.queued(began - job.queued_at, demanded=job.work.demanded)
        job.stage("decode", began, monotonic())
        wrong = pixels if isinstance(pixels, EncoderError) else wrong_size(pixels, job.source.header.upright)
        if wrong is not None:
            self._jobs.drop(job, wrong)
        return wrong is None

    def _cut(self, good: list[tuple[Job, Tensor]], stream: CudaStream) -> None:
        """Cut the patches of decoded images; if that fails, image by image, so that each fails by itself."""
        if not good:
            return
        began = monotonic()
        try:
            patches = to_patches([p for _, p in good], [job.grid for job, _ in good], self._geometry)
        except Exception as error:
            if len(good) == 1:
                self._jobs.drop(good[0][0], known_error(error))
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
    works: list[Task]
    rows: list[Tensor]
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


class Vit:
    """`run` on one thread, which alone uses the tower. A batch that fails is tried again in smaller ones."""

    def __init__(
        self,
        jobs: JobQueue,
        model: Model,
        store: Store,
        metrics: Metrics,
        copy_out: "CopyOut",
        *,
        batch_patches: int,
    ) -> None:
        self._jobs = jobs
        self._tower = model.tower
        self._tokens = model.processor.geometry.tokens
        self._device = model.device
        self._store = store
        self._metrics = metrics
        self._copy_out = copy_out
        self._batch_patches = batch_patches

    def run(self) -> None:
        """Encode until the queue is closed."""
        stream = CudaStream(self._device)
        while True:
            jobs, starved_s = self._jobs.take_batch(self._batch_patches)
            if not jobs:
                break
            self._metrics.starved(starved_s)
            if jobs := self._with_room(jobs):
                with stream.use():
                    self._encode(jobs, stream)
            del jobs  # a thread that sleeps holds no image
        self._copy_out.put(None)

    def _with_room(self, jobs: list[Job]) -> list[Job]:
        """Return those of a batch whose rows the store has room for: the tower does not work for nothing.

        The others wait for another batch; an image for which no room comes in time is refused.
        """
        try:
            count = self._store.set_aside([self._tokens(job.grid) for job in jobs])
        except EncoderError as error:
            self._jobs.drop(jobs.pop(0), error)
            count = 0
        self._jobs.put_back(jobs[count:])
        return jobs[:count]

    def _encode(self, jobs: list[Job], stream: CudaStream) -> None:
        patches = [job.patches for job in jobs if job.patches is not None]
        assert len(patches) == len(jobs)
        for job, image_patches in zip(jobs, patches, strict=True):
            stream.receive(job.patches_ready, [image_patches])
        began, begin = monotonic(), stream.mark()
        try:
            rows = self._tower.encode(patches, [job.grid for job in jobs])
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            self._failed(jobs, error)
            return
        for job in jobs:
            job.patches = None
        works = [job.work for job in jobs]
        self._copy_out.put(Batch(jobs, works, rows, began, monotonic(), begin, stream.mark()))

    def _failed(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self._store.give_back(self._tokens(job.grid))
        if is_lost_device(error):
            log.critical("the device is lost: ending the process", exc_info=error)
            self._jobs.lose_device(jobs)
            return
        log.warning("a batch of %d images failed; smaller ones follow", len(jobs), exc_info=error)
        self._jobs.failed(jobs, error)


class CopyOut:
    """Batches are put in by the ViT's thread, which waits while too many are here; `run` is this worker's own."""

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
        """Keep the rows of batches until there are no more."""
        stream = CudaStream(self._device)
        while (batch := self._batches.get()) is not None:
            with stream.use():
                self._keep(batch, stream)
            del batch

    def _keep(self, batch: Batch, stream: CudaStream) -> None:
        try:
            seconds = batch.device_s()
        except Exception as error:
            log.critical(
                "the device is lost: ending the process", exc_info=error
            )  # what a kernel did wrong shows here
            self._jobs.lose_device(batch.jobs)
            return
        stream.receive(batch.end, batch.rows)
        self._jobs.encoded(batch.works, seconds)
        grids = [job.grid for job in batch.jobs]
        self._metrics.batch(grids, seconds, sum(flops(self._spec, grid) for grid in grids))
        for job, rows in zip(batch.jobs, batch.rows, strict=True):
            began = monotonic()
            job.stage("vit", batch.began_at, batch.began_at + seconds)
            try:
                outcome: Pin | EncoderError = self._store.put(job.key.address, rows, job.grid)
            except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
                outcome = known_error(error)
            self._store.give_back(self._tokens(job.grid))
            job.stage("copy_out", began, monotonic())
            self._jobs.end(job, outcome)


def wrong_size(pixels: Tensor, size: tuple[int, int]) -> InvalidImageError | None:
    """Return the error of pixels that are not what their header says: the grid was computed from that."""
    height, width, _ = pixels.shape
    if (width, height) == size:
        return None
    return InvalidImageError(f"it decodes to {width}x{height} pixels, its header says {size[0]}x{size[1]}")


def is_lost_device(error: Exception) -> bool:
    """Whether no further work can succeed in this process; running out of memory is not that."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
