"""The pipeline: decode, preprocess, ViT and copy-out, each on its own thread, at work on different images.

The event loop hands images in and awaits their rows; it never runs a stage. A stage that fails fails its images and
goes on; a device that is lost ends the process.
"""

# Over 300 lines because the threads and what passes between them are judged together.

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from queue import Queue
from time import monotonic

from torch import Tensor

from encoder_contract.errors import AbandonedError, EncoderError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.engine.cuda_stream import CudaStream
from encoder_service.engine.job_queue import Job, JobQueue
from encoder_service.engine.stages import Batch, Stages, device_s, is_lost_device, wrong_size
from encoder_service.image.source import Source
from encoder_service.observability.incidents import known_error
from encoder_service.observability.metrics import Metrics
from encoder_service.scheduler import Claim, Scheduler, Snapshot
from encoder_service.store import Pin

log = logging.getLogger(__name__)

# Batches between the ViT and the copy-out: one being copied and one waiting keep the device from ever waiting for a
# copy; more would only hold rows in device memory.
COPY_OUT_DEPTH = 1
# Images decoded at a time once the device has work: nvJPEG is much faster on several, and what demand changes
# meanwhile can wait these few milliseconds.
PREPARE_IMAGES = 8
# The answer to a Submit goes out before stages that slept are woken: they would contend with it for cores and
# interpreter, and it would come milliseconds later. Stages at work do not wait for this.
ANSWER_FIRST_S = 0.001


class Pipeline:
    """`submit`, `join`, `wait`, `withdraw` and `has` belong to the event loop; the stages run on threads."""

    def __init__(
        self,
        scheduler: Scheduler,
        stages: Stages,
        *,
        loop: asyncio.AbstractEventLoop,
        batch_patches: int,
        decode_threads: int = 2,
        decode_pixels: int = 50_000_000,
        device: str = "cpu",
        metrics: Metrics | None = None,
        on_end: Callable[[Job, Pin | EncoderError], None] = lambda _job, _outcome: None,
        on_lost_device: Callable[[], None] = lambda: None,
    ) -> None:
        """Set the bounds: `decode_pixels` of sources in a batch that is decoded, and as many decoded one by one.

        `on_end` is told, on the event loop, the end of every job; `on_lost_device` that no other will succeed.
        """
        self._jobs = JobQueue(scheduler)
        self._stages = stages
        self._loop = loop
        self._batch_patches = batch_patches
        self._decode_pixels = decode_pixels
        self._device = device
        self._metrics = metrics or Metrics()
        self._on_end = on_end
        self._on_lost_device = on_lost_device
        self._copy_out: Queue[Batch | None] = Queue(COPY_OUT_DEPTH)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (
                ("prepare", self._prepare_all),
                *[("prepare-apart", self._prepare_apart)] * decode_threads,
                ("vit", self._encode_all),
                ("copy-out", self._keep_all),
            )
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Let the stages finish what they are at, end the threads, and fail what is still queued."""
        self._jobs.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        for job in self._jobs.jobs():
            self._finish(job, UnavailableError("the server is shutting down: use another one"))

    @property
    def queued_images(self) -> int:
        """Images on their way, in whatever stage."""
        return len(self._jobs)

    def snapshot(self) -> Snapshot:
        """Return the counts of the queue at this moment; any thread may ask."""
        return self._jobs.snapshot()

    # The event loop's side

    def has(self, address: bytes) -> bool:
        """Whether `address` is on its way."""
        return address in self._jobs

    def encode_s(self, patches: int) -> float:
        """Return how long so many patches take the device, seconds, by what was measured; 0 before that."""
        rate = self._jobs.patches_per_s
        return patches / rate if rate else 0.0

    def check_room(self, client_id: str, patches: int) -> None:
        """Raise `OverloadedError` if an image of so many patches would be refused now: no need for its bytes then."""
        self._jobs.check_room(client_id, patches)

    def submit(self, key: ImageKey, source: Source, grid: Grid, claim: Claim) -> Job:
        """Queue an image, or join its job. Raises `OverloadedError` if the queue is full."""
        job = self._jobs.submit(key, source, grid, claim, apart=not self._stages.batches(source))
        self._loop.call_later(ANSWER_FIRST_S, self._jobs.wake)
        return job

    def join(self, address: bytes, claim: Claim) -> Job | None:
        """Join the job of `address`, if there is one: a Fetch thereby makes it demanded."""
        return self._jobs.join(address, claim)

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
        job = self._jobs.withdraw(claim)
        if job is not None:
            self._abandon(job)

    def _abandon(self, job: Job) -> None:
        abandoned = AbandonedError("everyone who wanted the image has left")
        if not self.has(job.address):  # else someone has come for it since, and it has begun anew
            self._on_end(job, abandoned)
        _fail_waiters(job, abandoned)

    def _finish(self, job: Job, outcome: Pin | EncoderError) -> None:
        error = outcome if isinstance(outcome, EncoderError) else None
        if not self._jobs.finish(job) and error is not None:
            return  # its end was told when its last caller left
        self._metrics.encoded(monotonic() - job.queued_at, job.stage_ms, error)
        self._on_end(job, outcome)
        if isinstance(outcome, EncoderError):
            _fail_waiters(job, outcome)
            return
        with outcome:  # held until everyone who waits has a hold of its own
            for waiter in job.waiters:
                pin = self._stages.pin(job.address)
                assert pin is not None, "a pinned entry is held"
                if waiter.done():
                    pin.release()
                else:
                    waiter.set_result(pin)

    # The threads' side

    def _prepare_all(self) -> None:
        lane = CudaStream(self._device)
        while jobs := self._jobs.take_to_prepare(self._batch_patches, PREPARE_IMAGES, self._decode_pixels):
            with lane.use():
                self._prepare(jobs, lane)
            del jobs  # a thread that sleeps holds no image

    def _prepare_apart(self) -> None:
        """Decode one by one what has a cost of its own, while batches go on: nobody waits for a slow one."""
        lane = CudaStream(self._device)
        while jobs := self._jobs.take_apart(self._decode_pixels):
            with lane.use():
                self._prepare_one(jobs[0], lane)
            self._jobs.taken_apart(jobs[0])
            del jobs

    def _encode_all(self) -> None:
        lane = CudaStream(self._device)
        while True:
            jobs, starved_s = self._jobs.take_batch(self._batch_patches)
            if not jobs:
                break
            self._metrics.starved(starved_s)
            if jobs := self._with_room(jobs):
                with lane.use():
                    self._encode(jobs, lane)
            del jobs
        self._copy_out.put(None)

    def _keep_all(self) -> None:
        lane = CudaStream(self._device)
        while (batch := self._copy_out.get()) is not None:
            with lane.use():
                self._keep(batch, lane)
            del batch

    def _prepare(self, jobs: list[Job], lane: CudaStream) -> None:
        began = monotonic()
        decoded: Sequence[Tensor | None]
        try:
            decoded = self._stages.decode_batch([job.source for job in jobs])
        except Exception:
            log.exception("a batch of %d images was not decoded; they follow one by one", len(jobs))
            decoded = [None] * len(jobs)
        good: list[tuple[Job, Tensor]] = []
        for job, pixels in zip(jobs, decoded, strict=True):
            if pixels is None:
                self._jobs.put_apart(job)
            elif self._decoded(job, pixels, began):
                good.append((job, pixels))
        self._cut(good, lane)

    def _prepare_one(self, job: Job, lane: CudaStream) -> None:
        began = monotonic()
        try:
            pixels = self._stages.decode_one(job.source)
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            pixels = known_error(error)
        if self._decoded(job, pixels, began) and not isinstance(pixels, EncoderError):
            self._cut([(job, pixels)], lane)

    def _decoded(self, job: Job, pixels: Tensor | EncoderError, began: float) -> bool:
        """Note how long a job's decoding took; drop one whose pixels are an error, or not what its header says."""
        job.stage("queue", job.queued_at, began)
        self._metrics.queued(began - job.queued_at, demanded=job.work.demanded)
        job.stage("decode", began, monotonic())
        wrong = pixels if isinstance(pixels, EncoderError) else wrong_size(pixels, job.source.header.upright)
        if wrong is not None:
            self._drop(job, wrong)
        return wrong is None

    def _cut(self, good: list[tuple[Job, Tensor]], lane: CudaStream) -> None:
        """Cut the patches of decoded images; if that fails, image by image, so that each fails by itself."""
        if not good:
            return
        began = monotonic()
        try:
            patches = self._stages.to_patches([p for _, p in good], [job.grid for job, _ in good])
        except Exception as error:
            if len(good) == 1:
                self._drop(good[0][0], known_error(error))
                return
            log.warning("patches of %d images failed; they follow one by one", len(good), exc_info=error)
            for one in good:
                self._cut([one], lane)
            return
        ended = monotonic()
        for job, _ in good:
            job.stage("preprocess", began, ended)
        self._jobs.prepared([(job, p) for (job, _), p in zip(good, patches, strict=True)], lane.mark())

    def _with_room(self, jobs: list[Job]) -> list[Job]:
        """Return those of a batch whose rows the store has room for: the tower does not work for nothing.

        The others wait for another batch; an image for which no room comes in time is refused.
        """
        try:
            count = self._stages.set_aside([job.grid for job in jobs])
        except EncoderError as error:
            self._drop(jobs.pop(0), error)
            count = 0
        for job in self._jobs.put_back(jobs[count:]):
            self._loop.call_soon_threadsafe(self._abandon, job)
        return jobs[:count]

    def _encode(self, jobs: list[Job], lane: CudaStream) -> None:
        patches = [job.patches for job in jobs if job.patches is not None]
        assert len(patches) == len(jobs)
        for job, image_patches in zip(jobs, patches, strict=True):
            lane.receive(job.patches_ready, [image_patches])
        began, begin = monotonic(), lane.mark()
        try:
            rows = self._stages.encode(patches, [job.grid for job in jobs])
        except Exception as error:  # noqa: BLE001 - as above
            self._encode_failed(jobs, error)
            return
        for job in jobs:
            job.patches = None
        works = [job.work for job in jobs]
        self._copy_out.put(Batch(jobs, works, rows, began, monotonic(), begin, lane.mark()))

    def _encode_failed(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self._stages.give_back(job.grid)
        if is_lost_device(error):
            self._lose_device(jobs, error)
            return
        log.warning("a batch of %d images failed; smaller ones follow", len(jobs), exc_info=error)
        blamed, abandoned = self._jobs.failed(jobs)
        for job in blamed:
            self._outcome(job, known_error(error))
        for job in abandoned:
            self._loop.call_soon_threadsafe(self._abandon, job)

    def _keep(self, batch: Batch, lane: CudaStream) -> None:
        try:
            seconds = device_s(batch)
        except Exception as error:  # noqa: BLE001 - what a kernel did wrong shows here
            self._lose_device(batch.jobs, error)
            return
        lane.receive(batch.end, batch.rows)
        self._jobs.encoded(batch.works, seconds)
        self._metrics.batch([job.grid for job in batch.jobs], seconds)
        for job, rows in zip(batch.jobs, batch.rows, strict=True):
            began = monotonic()
            job.stage("vit", batch.began_at, batch.began_at + seconds)
            try:
                outcome: Pin | EncoderError = self._stages.put(job.address, rows, job.grid)
            except Exception as error:  # noqa: BLE001 - as above
                outcome = known_error(error)
            self._stages.give_back(job.grid)
            job.stage("copy_out", began, monotonic())
            self._outcome(job, outcome)

    def _lose_device(self, jobs: list[Job], error: Exception) -> None:
        log.critical("the device is lost: ending the process", exc_info=error)
        for job in jobs:
            self._drop(job, UnavailableError("the server lost its device: use another one"))
        self._loop.call_soon_threadsafe(self._on_lost_device)

    def _drop(self, job: Job, error: EncoderError) -> None:
        self._jobs.drop(job)
        self._outcome(job, error)

    def _outcome(self, job: Job, outcome: Pin | EncoderError) -> None:
        self._loop.call_soon_threadsafe(self._finish, job, outcome)


def _fail_waiters(job: Job, error: EncoderError) -> None:
    for waiter in job.waiters:
        if not waiter.done():
            waiter.set_exception(error)
