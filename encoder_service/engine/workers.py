"""The engine: the threads that turn queued images into rows in the store.

`Prepare` decodes images and cuts them into patches, `Vit` takes batches from the queue and encodes them, and `CopyOut`
copies their rows to the store. A failure fails the image that caused it, and the worker continues. A device that is
lost or hangs ends the process, and so does a worker thread that dies.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Queue
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InvalidImageError
from encoder_contract.geometry import Grid
from encoder_service.engine.device import DECODE_S, FRAME_S, CudaStream, Watchdog
from encoder_service.engine.job_queue import DEVICE_LOST, GroupEncode, Job, Work
from encoder_service.engine.model import Model
from encoder_service.families.model import tensors_of
from encoder_service.image.decoder import BATCH_IMAGES, DECODE_PIXELS
from encoder_service.image.resize import resize_bilinear
from encoder_service.metrics import Metrics
from encoder_service.store import Pin
from encoder_service.vision.ulysses import MIN_PATCHES

log = logging.getLogger(__name__)


GroupEncoder = Callable[[int, int, Grid, Any, Callable[[], None]], list[Tensor]]
"""`Tower.encode_in_group` with its `Group`; the first argument is the number of the group."""


class RowStore(Protocol):
    """The workers' side of a `Store`, which documents these."""

    def put(
        self, address: bytes, rows: Tensor, grid: Grid, *, holder: str = "", is_reserved: bool = False
    ) -> Pin: ...
    def reserve(self, tokens: Sequence[int], *, wait: bool = True) -> int: ...
    def release(self, tokens: int) -> None: ...
    def keep_moving(self) -> None: ...


class Engine:
    """Starts the worker threads, which work on different images of one queue: decode, ViT, copy-out."""

    def __init__(
        self,
        jobs: Work,
        model: Model,
        store: RowStore,
        metrics: Metrics,
        *,
        batch_patches: int,
        decode_threads: int = 2,
        decode_pixels: int = DECODE_PIXELS,
        group_encoder: GroupEncoder | None = None,
    ) -> None:
        """Create the workers.

        At most `decode_pixels` of sources are decoded in a batch, and as many again one by one. Give the scheduler
        the same number as `large_pixels`: one image of more pixels is decoded beside these. `group_encoder` encodes a
        large image with the processes of the other devices.
        """
        self._watchdog = Watchdog(partial(jobs.abort, DEVICE_LOST))
        prepare = Prepare(jobs, model, metrics, self._watchdog, max_pixels=decode_pixels)
        copy_out = CopyOut(jobs, model, store, metrics, self._watchdog)
        vit = Vit(
            jobs, model, store, metrics, copy_out, self._watchdog, group_encoder, batch_patches=batch_patches
        )
        self._jobs = jobs
        # `stop` does not wait for these: the migrator ends when the store is closed, the watchdog after `join`.
        self._unwaited = [self._thread("tier-migrator", store.keep_moving)]
        if model.device.can_hang:
            self._unwaited.append(self._thread("watchdog", self._watchdog.run))
        self._threads = [
            self._thread("prepare", prepare.run),
            *(self._thread("prepare-single", prepare.run_singles) for _ in range(decode_threads)),
            self._thread("vit", vit.run),
            self._thread("copy-out", copy_out.run, copy_out.drop),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._threads, *self._unwaited):
            thread.start()

    async def stop(self) -> None:
        """Wait until the workers have finished their current jobs. Close the queue first."""
        await asyncio.to_thread(self.join)

    def join(self) -> None:
        """Wait as `stop` does, but in this thread."""
        for thread in self._threads:
            thread.join()
        self._watchdog.close()

    def _thread(self, name: str, *work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run, args=work, name=name, daemon=True)

    def _run(self, work: Callable[[], None], after_death: Callable[[], None] = lambda: None) -> None:
        """Run a worker. An error that it does not handle aborts the queue, so that no stage stops silently."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a worker that dies ends the process
            self._jobs.abort(f"the server's thread {threading.current_thread().name} died", error)
            after_death()


# Batches that wait between the ViT and the copy-out. With one being copied and one waiting, the device never waits for
# a copy; more would only hold rows in device memory.
COPY_OUT_DEPTH = 1


class Prepare:
    """Decodes images and cuts them into patches: `run` on one thread, `run_singles` on several."""

    def __init__(
        self,
        jobs: Work,
        model: Model,
        metrics: Metrics,
        watchdog: Watchdog,
        *,
        max_pixels: int,
    ) -> None:
        """`max_pixels` of sources bounds a batch, and separately the images decoded one by one."""
        self._jobs = jobs
        self._decoder = model.decoder
        self._tower = model.tower
        self._device = model.device
        self._metrics = metrics
        self._watchdog = watchdog
        self._max_pixels = max_pixels

    def run(self) -> None:
        """Decode in batches until the queue is closed."""
        stream = self._device.stream()
        while jobs := self._jobs.take_to_prepare(BATCH_IMAGES, self._max_pixels):
            with stream.use(), self._watchdog.watching("decoding a batch"):
                self._prepare(jobs, stream)
            del jobs  # a waiting thread must not keep images alive

    def run_singles(self) -> None:
        """Decode images one by one, beside the batches, so that a slow image does not delay others."""
        stream = self._device.stream()
        while jobs := self._jobs.take_single(self._max_pixels):
            frames = jobs[0].key.frames
            predicted_s = DECODE_S + FRAME_S * (frames.second if frames else 0)
            with stream.use(), self._watchdog.watching("decoding an image", predicted_s):
                self._prepare_single(jobs[0], stream)
            del jobs

    def _prepare(self, jobs: list[Job], stream: CudaStream) -> None:
        began = monotonic()
        decoded: Sequence[Tensor | None]
        try:
            decoded = self._decoder.decode_batch([job.source for job in jobs])
        except Exception as error:
            if self._jobs.lost_device(error):
                return
            log.warning(
                "decoding a batch of %d images failed; decoding them one by one", len(jobs), exc_info=error
            )
            decoded = [None] * len(jobs)
        self._jobs.decoded(jobs, monotonic() - began)
        good: list[tuple[Job, Tensor]] = []
        for job, pixels in zip(jobs, decoded, strict=True):
            if pixels is None:
                self._jobs.retry_single(job)
            elif self._decoded(job, pixels, began):
                self._metrics.decoded("dali")
                good.append((job, pixels))
        self._cut(good, stream)

    def _prepare_single(self, job: Job, stream: CudaStream) -> None:
        began, frames = monotonic(), job.key.frames
        try:
            if frames is None:
                pixels = self._decoder.decode(job.source)
            else:
                pixels = self._decoder.decode_frames(job.source, frames, partial(self._jobs.is_wanted, job))
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            pixels = self._jobs.known_error(error)
        self._jobs.decoded([job], monotonic() - began)
        if self._decoded(job, pixels, began) and not isinstance(pixels, EncoderError):
            self._metrics.decoded("opencv" if frames else "pillow")
            if frames:
                job.pixels = job.key.of_pixels(pixels.cpu().numpy())
            good = [(job, pixels)]
            del pixels  # see `_cut`
            self._cut(good, stream)

    def _decoded(self, job: Job, pixels: Tensor | EncoderError, began: float) -> bool:
        """Record how long decoding took. Return whether the pixels are good; if not, drop the job."""
        job.stage("queue", job.queued_at, began)
        self._metrics.queued(began - job.queued_at, demanded=job.task.demanded)
        job.stage("decode", began, monotonic())
        error = pixels if isinstance(pixels, EncoderError) else wrong_size(pixels, job.source.header.upright)
        if error is not None:
            self._jobs.drop(job, error)
        return error is None

    def _cut(self, good: list[tuple[Job, Tensor]], stream: CudaStream) -> None:
        """Cut decoded images into patches. If that fails, cut one image at a time, so that each fails by itself.

        On success it empties `good`. The pixels of a single image must be free when it is reported as prepared, because
        the queue then hands out another one, and a decoder process whose buffer is still in use copies its next image.
        """
        if not good:
            return
        began = monotonic()
        try:
            pixels = [resize_bilinear(pixels, job.key.frames) for job, pixels in good]
            patches = self._tower.inputs(pixels, [job.grid for job, _ in good])
            for grid in {job.grid for job, _ in good}:
                self._tower.prepare(grid)
        except Exception as error:
            if len(good) == 1:
                self._jobs.drop(good[0][0], self._jobs.known_error(error))
                return
            if self._jobs.lost_device(error):
                return
            log.warning(
                "cutting %d images into patches failed; cutting them one by one", len(good), exc_info=error
            )
            for one in good:
                self._cut([one], stream)
            return
        ended = monotonic()
        jobs = [job for job, _ in good]
        for job in jobs:
            job.stage("preprocess", began, ended)
        del pixels
        good.clear()
        self._jobs.prepared(list(zip(jobs, patches, strict=True)), stream.mark())


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch on its way from the ViT to the copy-out. On CUDA its rows are complete once `end` has passed."""

    jobs: list[Job]
    rows: list[Tensor]
    finite: Tensor  # see `are_finite`
    devices: int  # how many encoded it
    began_at: float
    ended_at: float
    begin: "torch.cuda.Event | None"
    end: "torch.cuda.Event | None"

    def device_s(self) -> float:
        """Return the seconds that the device was busy with the batch. On CUDA, wait until it is done."""
        if self.begin is None or self.end is None:
            return self.ended_at - self.began_at
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1000


class CopyOut:
    """Stores rows, on its own thread. The ViT's thread calls `put`, which waits while too many batches are pending."""

    def __init__(
        self, jobs: Work, model: Model, store: RowStore, metrics: Metrics, watchdog: Watchdog
    ) -> None:
        self._jobs = jobs
        self._watchdog = watchdog
        self._tokens = model.tower.geometry.tokens
        self._tower = model.tower
        self._device = model.device
        self._store = store
        self._metrics = metrics
        self._batches: Queue[Batch | None] = Queue(COPY_OUT_DEPTH)

    def put(self, batch: Batch | None) -> None:
        """Add a batch; None ends `run`."""
        self._batches.put(batch)

    def run(self) -> None:
        """Store the rows of batches until `put` is called with None."""
        stream = self._device.stream()
        while (batch := self._batches.get()) is not None:
            with stream.use():
                self._copy_out(batch, stream)
            del batch

    def drop(self) -> None:
        """Discard batches until None, after `run` died: the ViT's thread must not block."""
        while self._batches.get() is not None:
            pass

    def _copy_out(self, batch: Batch, stream: CudaStream) -> None:
        grids = [job.grid for job in batch.jobs]
        predicted_s = self._jobs.encode_s(sum(grid.patches for grid in grids))
        try:
            with self._watchdog.watching("a batch", predicted_s):
                seconds = batch.device_s()
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            self._failed(batch, error)
            return
        stream.receive(batch.end, batch.rows)
        outcomes = []
        for job, rows, is_finite in zip(batch.jobs, batch.rows, batch.finite.tolist(), strict=True):
            job.stage("vit", batch.began_at, batch.began_at + seconds)
            outcomes.append(self._put(job, rows, is_finite=is_finite))
        busy_s = seconds * batch.devices
        self._metrics.batch(grids, busy_s, sum(map(self._tower.flops, grids)), devices=batch.devices)
        self._jobs.encoded(batch.jobs, outcomes, busy_s)

    def _put(self, job: Job, rows: Tensor, *, is_finite: bool) -> Pin | EncoderError:
        began = monotonic()
        try:
            if not is_finite:  # stored, these rows would be served again and again
                raise ArithmeticError("the tower's rows contain a NaN or an infinity")
            with self._watchdog.watching("copying rows out"):
                return self._store.put(
                    job.key.address, rows, job.grid, holder=job.task.holder, is_reserved=True
                )
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            return self._jobs.known_error(error)
        finally:
            self._store.release(self._tokens(job.grid))
            job.stage("copy_out", began, monotonic())

    def _failed(self, batch: Batch, error: Exception) -> None:
        """Fail a batch that the device did not complete: errors of CUDA kernels show at the wait, not at the launch."""
        known = self._jobs.known_error(error)
        for job in batch.jobs:
            self._store.release(self._tokens(job.grid))
            self._jobs.drop(job, known)


def wrong_size(pixels: Tensor, size: tuple[int, int]) -> InvalidImageError | None:
    """Return an error unless the pixels have the size in their header: the grid was computed from it."""
    *_, height, width, _ = pixels.shape
    if (width, height) == size:
        return None
    return InvalidImageError(
        f"the image decodes to {width}x{height} pixels, but its header says {size[0]}x{size[1]}"
    )


def are_finite(rows: Sequence[Tensor]) -> Tensor:
    """Return whether each image's rows are finite: bool [images], on the host once an event after this has passed."""
    flags = [
        torch.stack(each.aminmax()).isfinite().all() for each in rows
    ]  # min and max are NaN if any element is
    return torch.stack(flags).to("cpu", non_blocking=True)


class Overtaking:
    """The tower calls this between the blocks of a batch, to encode smaller images that have become demanded.

    Otherwise they would wait for the whole batch, on the CPU for seconds. Together they are less work than the batch,
    so it takes at most twice as long.
    """

    def __init__(
        self, batch: Sequence[Job], patches: int, jobs: Work, encode: Callable[[list[Job]], None]
    ) -> None:
        self._batch = batch
        self._room = patches
        self._jobs = jobs
        self._encode = encode
        self.seconds = 0.0
        """Time spent on overtaking images, to be subtracted from the batch's."""

    def __call__(self) -> None:
        """Encode the images that may overtake the batch now."""
        began = monotonic()
        while self._room and (others := self._jobs.take_overtaking(self._batch, self._room // 2)):
            self._room -= sum(job.grid.patches for job in others)
            self._encode(others)
            self.seconds += monotonic() - began
            began = monotonic()


class Vit:
    """Encodes batches. Call `run` on one thread, the only one to use the tower. A failed batch is retried in halves."""

    def __init__(
        self,
        jobs: Work,
        model: Model,
        store: RowStore,
        metrics: Metrics,
        copy_out: CopyOut,
        watchdog: Watchdog,
        group_encoder: GroupEncoder | None,
        *,
        batch_patches: int,
    ) -> None:
        self._group_encoder = group_encoder
        self._jobs = jobs
        self._watchdog = watchdog
        self._tower = model.tower
        self._tokens = model.tower.geometry.tokens
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
                with stream.use():
                    if isinstance(taken[0], GroupEncode):
                        self._join_group(taken[0], stream)
                    else:
                        self._encode_all(taken[0], stream)
                del taken  # a waiting thread must not keep images alive
        finally:  # also after an error: the copy-out must not wait for more
            self._copy_out.put(None)

    def _encode_all(self, jobs: list[Job], stream: CudaStream) -> None:
        if jobs := self._with_room(jobs):
            patches = sum(job.grid.patches for job in jobs)
            self._encode(jobs, stream, self._overtaking(jobs, patches, stream))

    def _with_room(self, jobs: list[Job]) -> list[Job]:
        """Reserve store space for a batch, and return the jobs that got it, so that no rows are computed in vain.

        The others go back to the queue. If the store has no room in time for the first image, that image fails.
        """
        try:
            count = self._store.reserve([self._tokens(job.grid) for job in jobs])
        except EncoderError as error:
            self._jobs.drop(jobs.pop(0), error)
            count = 0
        self._jobs.put_back(jobs[count:])
        return jobs[:count]

    def _with_room_now(self, jobs: list[Job]) -> list[Job]:
        """As `_with_room`, but without waiting, in the middle of a batch. Jobs without room go back to the queue."""
        try:
            count = self._store.reserve([self._tokens(job.grid) for job in jobs], wait=False)
        except EncoderError:
            count = 0
        self._jobs.put_back(jobs[count:])
        return jobs[:count]

    def _overtaking(self, jobs: list[Job], patches: int, stream: CudaStream) -> Overtaking:
        def encode(others: list[Job]) -> None:
            if others := self._with_room_now(others):
                self._encode(others, stream, Overtaking(others, 0, self._jobs, encode))

        return Overtaking(jobs, patches, self._jobs, encode)

    def _join_group(self, group: GroupEncode, stream: CudaStream) -> None:
        """Encode this device's share of another device's image."""
        assert self._group_encoder is not None
        overtaking = self._overtaking([], group.grid.patches // group.devices, stream)
        try:
            with self._watchdog.watching("a group encode", self._jobs.encode_s(group.grid.patches)):
                self._group_encoder(group.number, group.leader, group.grid, None, overtaking)
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            self._group_failed(error)

    def _encode_in_group(self, jobs: list[Job], overtaking: Overtaking) -> tuple[list[Tensor], int]:
        """Encode a large image with all devices; return its rows, and the number of devices.

        Return no rows if the image is not large, another device is busy, or the group fails.
        """
        [job, *others] = jobs
        if self._group_encoder is None or others or job.key.frames or job.grid.patches < MIN_PATCHES:
            return [], 1
        if (group := self._jobs.form_group(job)) is None:
            return [], 1
        began = monotonic()
        try:
            rows = self._group_encoder(group.number, group.leader, group.grid, job.patches, overtaking)
            return rows, group.devices
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            self._group_failed(error)
            overtaking.seconds = monotonic() - began
            return [], 1

    def _group_failed(self, error: Exception) -> None:
        self._jobs.lost_device(error)
        log.warning("the devices did not encode an image together; one device encodes it", exc_info=error)
        self._jobs.group_failed()

    def _encode(self, jobs: list[Job], stream: CudaStream, overtaking: Overtaking) -> None:
        patches = [job.patches for job in jobs if job.patches is not None]
        assert len(patches) == len(jobs)
        for job, image_patches in zip(jobs, patches, strict=True):
            stream.receive(job.patches_ready, tensors_of(image_patches))
        began, begin = monotonic(), stream.mark()
        grids = [job.grid for job in jobs]
        try:
            with self._watchdog.watching("a batch", self._jobs.encode_s(sum(grid.patches for grid in grids))):
                rows, devices = self._encode_in_group(jobs, overtaking)
                rows = rows or self._tower.encode(patches, grids, overtaking)
                finite = are_finite(rows)
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            self._failed(jobs, error)
            return
        for job in jobs:
            job.patches = None
        ended = monotonic() - overtaking.seconds
        self._copy_out.put(Batch(jobs, rows, finite, devices, began, ended, begin, stream.mark()))

    def _failed(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self._store.release(self._tokens(job.grid))
        if self._jobs.lost_device(error):
            return
        log.warning(
            "a batch of %d images failed; several images are retried in smaller batches",
            len(jobs),
            exc_info=error,
        )
        self._jobs.failed(jobs, error)
