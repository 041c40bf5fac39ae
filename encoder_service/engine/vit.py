"""The ViT's thread: it takes batches from the queue, encodes them, and hands their rows to the copy-out."""

import logging
from collections.abc import Callable, Sequence
from time import monotonic

from encoder_contract.errors import EncoderError
from encoder_service.engine.cuda_stream import CudaStream
from encoder_service.engine.job_queue import Job, JobQueue
from encoder_service.engine.model import Model
from encoder_service.engine.workers import Batch, CopyOut, are_finite
from encoder_service.observability.metrics import Metrics
from encoder_service.store import Store

log = logging.getLogger(__name__)


class Overtaking:
    """What the tower calls between the blocks of a batch: encodes smaller images first that are demanded by now.

    They would else wait for the whole batch, on the CPU for seconds. They add up to less work than its own, so it takes
    at most twice as long.
    """

    def __init__(
        self, batch: Sequence[Job], patches: int, jobs: JobQueue, encode: Callable[[list[Job]], None]
    ) -> None:
        self._batch = batch
        self._room = patches
        self._jobs = jobs
        self._encode = encode
        self.seconds = 0.0
        """How long it took, which is no time of the batch."""

    def __call__(self) -> None:
        """Encode what may overtake the batch now."""
        began = monotonic()
        while self._room and (others := self._jobs.take_overtaking(self._batch, self._room // 2)):
            self._room -= sum(job.grid.patches for job in others)
            self._encode(others)
            self.seconds += monotonic() - began
            began = monotonic()


class Vit:
    """`run` on one thread, which alone uses the tower. A batch that fails is tried again in smaller ones."""

    def __init__(
        self,
        jobs: JobQueue,
        model: Model,
        store: Store,
        metrics: Metrics,
        copy_out: CopyOut,
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
        stream = self._device.stream()
        try:
            while (taken := self._jobs.take_batch(self._batch_patches))[0]:
                self._metrics.starved(taken[1])
                if jobs := self._with_room(taken[0]):
                    with stream.use():
                        self._encode(jobs, stream, self._overtaking(jobs, stream))
                del taken, jobs  # a thread that sleeps holds no image
        finally:  # however it ends, the copy-out is not to wait for more
            self._copy_out.put(None)

    def _with_room(self, jobs: list[Job]) -> list[Job]:
        """Return those of a batch whose rows the store has room for, so that no rows are computed in vain.

        The others wait for another batch; if the store has no room in time for the first image, that image fails.
        """
        try:
            count = self._store.set_aside([self._tokens(job.grid) for job in jobs])
        except EncoderError as error:
            self._jobs.drop(jobs.pop(0), error)
            count = 0
        self._jobs.put_back(jobs[count:])
        return jobs[:count]

    def _with_room_now(self, jobs: list[Job]) -> list[Job]:
        """Likewise in the middle of a batch, which is not to wait: what has no room now comes after it."""
        try:
            count = self._store.set_aside([self._tokens(job.grid) for job in jobs], wait=False)
        except EncoderError:
            count = 0
        self._jobs.put_back(jobs[count:])
        return jobs[:count]

    def _overtaking(self, jobs: list[Job], stream: CudaStream) -> Overtaking:
        def encode(others: list[Job]) -> None:
            if others := self._with_room_now(others):
                self._encode(others, stream, Overtaking(others, 0, self._jobs, encode))

        return Overtaking(jobs, sum(job.grid.patches for job in jobs), self._jobs, encode)

    def _encode(self, jobs: list[Job], stream: CudaStream, overtaking: Overtaking) -> None:
        patches = [job.patches for job in jobs if job.patches is not None]
        assert len(patches) == len(jobs)
        for job, image_patches in zip(jobs, patches, strict=True):
            stream.receive(job.patches_ready, [image_patches])
        began, begin = monotonic(), stream.mark()
        try:
            rows = self._tower.encode(patches, [job.grid for job in jobs], overtaking)
            finite = are_finite(rows)
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            self._failed(jobs, error)
            return
        for job in jobs:
            job.patches = None
        tasks = [job.task for job in jobs]
        ended = monotonic() - overtaking.seconds
        self._copy_out.put(Batch(jobs, tasks, rows, finite, began, ended, begin, stream.mark()))

    def _failed(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self._store.give_back(self._tokens(job.grid))
        if self._jobs.lost_device(error):
            return
        log.warning("a batch of %d images failed; smaller ones follow", len(jobs), exc_info=error)
        self._jobs.failed(jobs, error)
