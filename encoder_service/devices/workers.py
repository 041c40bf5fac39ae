"""The threads of a device that turn files into rows in the store.

`Prepare` decodes images and cuts them into patches, `Vit` encodes batches of them, and `CopyOut` copies their rows to
the store's memory. What they do next is in the `Inbox`. A failure fails the image that caused it, and the worker
continues. A device that is lost or hangs ends the process, and so does a worker thread that dies.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Queue
from time import monotonic
from typing import Any, cast

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, InternalError, InvalidImageError
from encoder_contract.extents import views
from encoder_service.devices import messages
from encoder_service.devices.device_inbox import DeviceImage, Inbox
from encoder_service.devices.faults import DEVICE_LOST, Faults
from encoder_service.devices.model import Model
from encoder_service.devices.torch_device import CudaStream
from encoder_service.devices.watchdog import DECODE_S, FORM_S, FRAME_S, Watchdog
from encoder_service.families.model import Inputs, tensors_of
from encoder_service.image.resize import resize_bilinear
from encoder_service.store.tensors import copy_tensors, flat
from encoder_service.vision import Tower
from encoder_service.vision.ulysses import UlyssesGroup

log = logging.getLogger(__name__)

Memory = dict[str, Tensor]
"""The memory of each tier of the store, by its name: uint8 [bytes]."""


class DeviceWorkers:
    """Starts the worker threads, which work on different images: decode, ViT, copy-out."""

    def __init__(
        self,
        inbox: Inbox,
        model: Model,
        memory: Memory,
        *,
        decode_threads: int = 2,
        group: UlyssesGroup | None = None,
    ) -> None:
        """Create the workers.

        `memory` is where rows are written. `group` encodes large images: this process and those of the other devices.
        """
        faults = Faults(model.device, inbox.abort)
        self._watchdog = Watchdog(partial(inbox.abort, DEVICE_LOST))
        prepare = Prepare(inbox, model, faults, self._watchdog)
        copy_out = CopyOut(inbox, model, memory, faults, self._watchdog)
        vit = Vit(inbox, model, copy_out, faults, self._watchdog, group)
        self._inbox = inbox
        self._device = model.device
        # `join` does not wait for it.
        self._watching = [self._thread("watchdog", self._watchdog.run)] if model.device.can_hang else []
        self._threads = [
            self._thread("prepare", prepare.run),
            *(self._thread("prepare-single", prepare.run_singles) for _ in range(decode_threads)),
            self._thread("vit", vit.run),
            self._thread("copy-out", copy_out.run, copy_out.drop),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._threads, *self._watching):
            thread.start()

    def join(self) -> None:
        """Wait until the workers have finished what they have. Close the inbox first."""
        for thread in self._threads:
            thread.join()
        self._watchdog.close()

    def _thread(self, name: str, *work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run, args=work, name=name, daemon=True)

    def _run(self, work: Callable[[], None], after_death: Callable[[], None] = lambda: None) -> None:
        """Run a worker. An error that it does not handle ends the process, so that no stage stops silently."""
        try:
            self._device.make_current()
            work()
        except BaseException as error:
            try:
                if isinstance(error, Exception):  # if not, something has ended the process already
                    self._inbox.abort(f"the device's thread {threading.current_thread().name} died", error)
            finally:
                after_death()
            raise


# Batches that wait between the ViT and the copy-out. With one being copied and one waiting, the device never waits for
# a copy; more would only hold rows in device memory.
COPY_OUT_DEPTH = 1


class Prepare:
    """Decodes images and cuts them into patches: `run` on one thread, `run_singles` on several."""

    def __init__(self, inbox: Inbox, model: Model, faults: Faults, watchdog: Watchdog) -> None:
        self._inbox = inbox
        self._decoder = model.decoder
        self._tower = model.tower
        self._device = model.device
        self._faults = faults
        self._watchdog = watchdog
        # One for all threads: torch keeps freed memory by stream, and in time each would get the largest images.
        self._singles = model.device.stream()

    def run(self) -> None:
        """Decode in batches until the inbox is closed."""
        stream = self._device.stream()
        while (images := self._inbox.to_decode.get()) and not self._inbox.is_closed:
            with stream.use(), self._watchdog.watching("decoding a batch"):
                self._prepare(images, stream)
            del images  # a waiting thread must not keep images alive

    def run_singles(self) -> None:
        """Decode images one by one, beside the batches, so that a slow image does not delay others."""
        stream = self._singles
        while (image := self._inbox.to_decode_single.get()) is not None and not self._inbox.is_closed:
            second = image.key.frames.second if image.key is not None and image.key.frames is not None else 0
            with (
                stream.use(),
                self._watchdog.watching("decoding an image", DECODE_S + FRAME_S * second),
            ):
                self._prepare_single(image, stream)
            del image

    def _prepare(self, images: list[DeviceImage], stream: CudaStream) -> None:
        began = monotonic()
        decoded: Sequence[Tensor | None]
        try:
            decoded = self._decoder.decode_batch([image.source for image in images])
        except Exception as error:
            if self._faults.is_loss(error):
                return
            log.warning(
                "decoding a batch of %d images failed; decoding them one by one", len(images), exc_info=error
            )
            decoded = [None] * len(images)
        ended = monotonic()
        timing = Timing("dali", began, ended, sum(image.source.header.pixels for image in images))
        good: list[tuple[DeviceImage, Tensor]] = []
        refused: list[DeviceImage] = []
        for image, pixels in zip(images, decoded, strict=True):
            if pixels is None:
                refused.append(image)
            elif (wrong := wrong_size(pixels, image.source.header.upright)) is not None:
                self._inbox.drop(image, wrong, began, timing.seconds_of([image]))
            else:
                good.append((image, pixels))
        if refused:
            self._inbox.retry(refused, timing.seconds_of(refused))
        self._cut(good, stream, timing)

    def _prepare_single(self, image: DeviceImage, stream: CudaStream) -> None:
        began = monotonic()
        try:
            pixels = self._decoded(image)
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            pixels = self._faults.known_error(error)
        ended = monotonic()
        if not isinstance(pixels, EncoderError):
            pixels = wrong_size(pixels, image.source.header.upright) or pixels
        if isinstance(pixels, EncoderError):
            self._inbox.drop(image, pixels, began, ended - began)
            return
        good = [(image, pixels)]
        del pixels  # see `_cut`
        decoder = "pillow" if image.key is None else "ffmpeg"
        self._cut(good, stream, Timing(decoder, began, ended, image.source.header.pixels))

    def _decoded(self, image: DeviceImage) -> Tensor | EncoderError:
        """Return the pixels of an image or of two frames, on the device, or their error. Note the digest of frames."""
        if image.key is None or image.key.frames is None:
            return self._decoder.decode(image.source)
        is_wanted = partial(self._inbox.is_wanted, image)
        frames = self._decoder.decode_frames(image.source, image.key.frames, is_wanted)
        if isinstance(frames, EncoderError):
            return frames
        image.pixels = image.key.of_pixels(frames)
        return self._decoder.on_device(frames)

    def _cut(self, good: list[tuple[DeviceImage, Tensor]], stream: CudaStream, timing: "Timing") -> None:
        """Cut decoded images into patches. If that fails, cut one image at a time, so that each fails by itself.

        On success it empties `good`. The pixels of a single image must be free when it is reported as prepared, because
        the server then sends another one, and a decoder process whose buffer is still in use copies its next image.
        """
        if not good:
            return
        began = monotonic()
        images = [image for image, _ in good]
        try:
            pixels = [
                resize_bilinear(pixels, image.key.frames if image.key is not None else None)
                for image, pixels in good
            ]
            patches = self._tower.inputs(pixels, [image.grid for image in images])
            for grid in {image.grid for image in images}:
                self._tower.prepare(grid)
        except Exception as error:
            if len(good) == 1:
                known = self._faults.known_error(error)
                self._inbox.drop(images[0], known, timing.began, timing.seconds_of(images))
                return
            if self._faults.is_loss(error):
                return
            log.warning(
                "cutting %d images into patches failed; cutting them one by one", len(good), exc_info=error
            )
            for one in good:
                self._cut([one], stream, timing)
            return
        del pixels
        good.clear()
        report = messages.Prepared(
            [image.number for image in images],
            timing.decoder,
            timing.seconds_of(images),
            timing.began,
            timing.ended,
            began,
            monotonic(),
            [image.pixels for image in images],
        )
        self._inbox.prepared(list(zip(images, patches, strict=True)), stream.mark(), report)


@dataclass(frozen=True, slots=True)
class Timing:
    """What decoded some images together, when, and how many pixels."""

    decoder: str
    began: float
    ended: float
    pixels: int

    def seconds_of(self, images: Sequence[DeviceImage]) -> float:
        """Return the share of some of the images in the time."""
        share = sum(image.source.header.pixels for image in images) / self.pixels if self.pixels else 1.0
        return (self.ended - self.began) * share


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch on its way from the ViT to the copy-out. On CUDA its rows are complete once `end` has passed."""

    sent: messages.Encode
    images: list[DeviceImage]
    rows: list[Tensor]
    largest: Tensor  # see `largest_values`
    devices: int  # how many encoded it
    began_at: float
    ended_at: float
    overtaken_s: float  # of that time, what images that overtook it took
    begin: "torch.cuda.Event | None"
    end: "torch.cuda.Event | None"

    def device_s(self) -> float:
        """Return the seconds from the begin of the batch to its end on the device. On CUDA, wait until it is done."""
        if self.begin is None or self.end is None:
            return self.ended_at - self.began_at
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1000


class CopyOut:
    """Stores rows, on its own thread. The ViT's thread calls `put`, which waits while too many batches are pending."""

    def __init__(
        self, inbox: Inbox, model: Model, memory: Memory, faults: Faults, watchdog: Watchdog
    ) -> None:
        self._inbox = inbox
        self._faults = faults
        self._watchdog = watchdog
        self._tower = model.tower
        self._device = model.device
        self._memory = memory
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
        try:
            with self._watchdog.watching("a batch", batch.sent.seconds):
                seconds = batch.device_s()
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            seconds, began = 0.0, monotonic()
            errors: list[EncoderError | None] = [self._faults.known_error(error)] * len(batch.images)
        else:
            stream.receive(batch.end, batch.rows)
            began = monotonic()
            errors = self._write(batch)
        report = messages.Encoded(
            batch.sent.batch,
            errors,
            max(0.0, seconds - batch.overtaken_s) * batch.devices,
            batch.devices,
            sum(self._tower.flops(image.grid) for image in batch.images),
            batch.began_at,
            seconds,
            began,
            monotonic(),
        )
        self._inbox.encoded(batch.images, report)

    def _write(self, batch: Batch) -> list[EncoderError | None]:
        """Write the rows of a batch to their places; return the error of each image. One copy, and one wait for it.

        If that fails, the images are written one by one, so that each fails by itself.
        """
        errors: list[EncoderError | None] = [None] * len(batch.images)
        good = []
        for at, is_finite in enumerate(batch.largest.isfinite().tolist()):
            if is_finite:
                good.append(at)
            else:  # stored, these rows would be served again and again
                broken = ArithmeticError("the tower's rows contain a NaN or an infinity")
                errors[at] = self._faults.known_error(broken)
        try:
            self._copy(batch, good)
        except Exception as error:
            if self._faults.is_loss(error):
                return [self._faults.known_error(error)] * len(errors)
            log.warning("copying %d images out failed; copying them one by one", len(good), exc_info=error)
            for at in good:
                try:
                    self._copy(batch, [at])
                except Exception as failure:  # noqa: BLE001 - this thread must survive any failure of a library
                    errors[at] = self._faults.known_error(failure)
        return errors

    def _copy(self, batch: Batch, images: Sequence[int]) -> None:
        targets = []
        for at in images:
            tier, extents = batch.sent.places[at]
            targets += views(self._memory[tier], extents)
        if targets:
            with self._watchdog.watching("copying rows out"):
                copy_tensors(targets, (flat(batch.rows[at]) for at in images))


def wrong_size(pixels: Tensor, size: tuple[int, int]) -> InvalidImageError | None:
    """Return an error unless the pixels have the size in their header: the grid was computed from it."""
    *_, height, width, _ = pixels.shape
    if (width, height) == size:
        return None
    return InvalidImageError(
        f"the image decodes to {width}x{height} pixels, but its header says {size[0]}x{size[1]}"
    )


def largest_values(rows: Sequence[Tensor]) -> Tensor:
    """Return the largest size of a value in each image's rows, NaN if one is: [images].

    It is on the host; on CUDA, once an event after this has passed.
    """
    if rows[0].is_cuda:  # four launches for all images, not seven for each
        return torch.stack(torch._foreach_norm(list(rows), math.inf)).to("cpu", non_blocking=True)
    return torch.stack([torch.stack(each.aminmax()).abs().amax() for each in rows])


class Overtaking:
    """The tower calls this between the blocks of a batch, to encode smaller images that have become demanded.

    Otherwise they would wait for the whole batch, on the CPU for seconds. The server decides which: see `Link`.
    """

    def __init__(self, inbox: Inbox, encode: Callable[[messages.Encode], None]) -> None:
        self._inbox = inbox
        self._encode = encode
        self.seconds = 0.0
        """Time spent on overtaking images, to be subtracted from the batch's."""

    def __call__(self) -> None:
        """Encode the images that overtake the batch now."""
        while (batch := self._inbox.batches.take_urgent()) is not None:
            began = monotonic()
            self._encode(batch)
            self.seconds += monotonic() - began


class Vit:
    """Encodes batches. Call `run` on one thread, the only one to use the tower."""

    def __init__(
        self,
        inbox: Inbox,
        model: Model,
        copy_out: CopyOut,
        faults: Faults,
        watchdog: Watchdog,
        group: UlyssesGroup | None,
    ) -> None:
        self._inbox = inbox
        self._faults = faults
        self._group = group
        self._watchdog = watchdog
        self._tower = model.tower
        self._device = model.device
        self._copy_out = copy_out

    def run(self) -> None:
        """Encode until the inbox is closed."""
        stream = self._device.stream()
        try:
            while (batch := self._inbox.batches.take()) is not None:
                with stream.use():
                    if isinstance(batch, messages.Encode):
                        self._encode(batch, stream, self._overtaking(stream))
                    else:
                        self._join_group(batch, stream)
                del batch  # a waiting thread must not keep images alive
        finally:  # also after an error: the copy-out must not wait for more
            self._copy_out.put(None)

    def _overtaking(self, stream: CudaStream) -> Overtaking:
        return Overtaking(self._inbox, lambda batch: self._encode(batch, stream, None))

    def _join_group(self, sent: messages.JoinGroup | messages.FormGroup, stream: CudaStream) -> None:
        """Encode this device's share of another device's image, or form the group that will encode the next one."""
        number = sent.number if isinstance(sent, messages.FormGroup) else sent.group.number
        try:
            if isinstance(sent, messages.FormGroup):
                assert self._group is not None
                with self._watchdog.watching("forming a group", FORM_S):
                    self._group.form(number)
            else:
                with self._watchdog.watching("a group encode", sent.seconds):
                    self._in_group(sent.group, None, self._overtaking(stream))
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            self._group_failed(number, error)
        else:
            self._inbox.tell(messages.LeftGroup(number, failed=False))

    def _in_group(self, group: messages.Group, patches: Any, overtaking: Overtaking) -> list[Tensor]:
        assert self._group is not None
        tower = cast(Tower, self._tower)  # no other kind of tower forms a group
        return tower.encode_in_group(self._group, group.number, group.leader, group.grid, patches, overtaking)

    def _encode_in_group(
        self, group: messages.Group, patches: Inputs, overtaking: Overtaking
    ) -> list[Tensor]:
        """Encode a large image with all devices; return no rows if the group fails."""
        began = monotonic()
        try:
            return self._in_group(group, patches, overtaking)
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            self._group_failed(group.number, error)
            overtaking.seconds = monotonic() - began
            return []

    def _group_failed(self, number: int, error: Exception) -> None:
        self._faults.is_loss(error)
        log.warning("the devices do not work together; one device encodes a large image", exc_info=error)
        self._inbox.tell(messages.LeftGroup(number, failed=True))

    def _encode(self, sent: messages.Encode, stream: CudaStream, overtaking: Overtaking | None) -> None:
        """Encode a batch; `overtaking` is None for one that itself overtakes."""
        images = self._inbox.images_of(sent)
        patches = [image.patches for image in images if image.patches is not None]
        assert len(patches) == len(images)
        for image, inputs in zip(images, patches, strict=True):
            stream.receive(image.patches_ready, tensors_of(inputs))
        began, begin = monotonic(), stream.mark()
        grids, rows, devices = [image.grid for image in images], list[Tensor](), 1
        try:
            with self._watchdog.watching("a batch", sent.seconds):
                if sent.group is not None and overtaking is not None:
                    rows = self._encode_in_group(sent.group, patches[0], overtaking)
                    devices = sent.group.devices if rows else 1
                rows = rows or self._tower.encode(patches, grids, overtaking or (lambda: None))
                largest = largest_values(rows)
        except Exception as error:  # noqa: BLE001 - this thread must survive any failure of a library
            self._failed(sent, images, error)
            return
        for image in images:
            image.patches = None
        ended, overtaken_s = monotonic(), overtaking.seconds if overtaking is not None else 0.0
        encoded = Batch(sent, images, rows, largest, devices, began, ended, overtaken_s, begin, stream.mark())
        self._copy_out.put(encoded)

    def _failed(self, sent: messages.Encode, images: list[DeviceImage], error: Exception) -> None:
        if self._faults.is_loss(error):
            return
        log.warning(
            "a batch of %d images failed; several images are retried in smaller batches",
            len(images),
            exc_info=error,
        )
        if len(images) > 1:
            self._inbox.failed(sent.batch, images, InternalError("several images failed together"))
        else:
            self._inbox.failed(sent.batch, images, self._faults.known_error(error))
