"""The server's end of one device: pushes images to it, counts what it has, and takes its reports.

Credit limits what a device has at a time: two decode batches, an image for each decode thread, and 25 ms of work for
the tower (`tower_credit.py`). A device never asks for work, and never waits for an answer. It reports once on each
image to decode and once on each batch, which returns the credit: see `messages`. Use from one event loop.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from time import monotonic
from typing import Any, ClassVar, cast

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_service.devices import messages
from encoder_service.devices.device_process import DeviceProcess
from encoder_service.devices.job_queue import Job, JobQueue
from encoder_service.devices.messages import Group
from encoder_service.devices.tower_credit import GroupShare, SentBatch, TowerCredit
from encoder_service.devices.watchdog import DECODE_S, FRAME_S, HUNG_FACTOR
from encoder_service.image.decoder import BATCH_IMAGES
from encoder_service.image.source import VideoFile
from encoder_service.metrics import Metrics
from encoder_service.store import Pin, Store
from encoder_service.store.tier import Entry

log = logging.getLogger(__name__)

DECODE_BATCHES = 2
"""Batches that a device decodes at a time: one is decoded, one waits."""
IDLE_PIXELS = 2_000_000
"""Pixels in the first decode batch of an idle device: few, so that its tower can soon begin.

It also has at most half of the images that wait: the tower encodes them while the device decodes the others, and
callers send their next images meanwhile.
"""
IDLE_IMAGES = 4
"""Images that it may have in any case: batches of fewer would cost more than they gain."""
UNSENT_BYTES = 1 << 20
"""Files that a device has not read yet. Above this it gets no more: they stay in the queue, which counts them."""
QUIET_TICKS = 5
"""A device that has not reported for this many ticks of the watchdog does not answer: see `messages.Report`."""
SILENT_TICKS = 20
"""After this many, its process is killed."""
CREDIT_TICKS = 600
"""A device that has an image for this many ticks of the watchdog, or for many times its predicted time, has lost it."""


@dataclass(eq=False, slots=True)
class Decoding:
    """Images that a device decodes together, or one by itself: the credit for one of them."""

    images: set[int]
    ticks_left: float


@dataclass(eq=False, slots=True)
class StoreWait:
    """Since when rows have found no space in the store. Later images wait no longer than the first, on any device."""

    since: float | None = None
    tokens: int = 0
    _timer: asyncio.TimerHandle | None = None

    def left_s(self, tokens: int, wait_s: float) -> float:
        """Note that space for an image is missing now. Return how long it may still wait; 0 if that time is over."""
        now = monotonic()
        if self.since is None or tokens < self.tokens:
            self.since, self.tokens = now, tokens
        return max(0.0, self.since + wait_s - now)

    def call_after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` called when the time is over. One call is pending at a time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)


@dataclass(eq=False, slots=True, kw_only=True)
class Shared:
    """What the links of all devices share."""

    queue: JobQueue
    store: Store
    metrics: Metrics
    tokens: Callable[[Grid], int]
    devices: int
    on_lost_group: Callable[[int], None]
    """Called with the number of a group that one of its devices has left because of an error."""
    decode_pixels: int
    """Source pixels that a device decodes in a batch, and as many again one by one."""
    store_wait: StoreWait = field(default_factory=StoreWait)
    group_failures: int = 0
    """How many groups have failed in a row without an image that one has encoded."""


class Link(asyncio.Protocol):
    """One device: the images that it has, by number, and its credit."""

    def __init__(self, device: DeviceProcess, shared: Shared) -> None:
        self.device = device
        self.lost = asyncio.Event()
        """Set when the process has closed its end."""
        self.is_up = False
        self._shared = shared
        self._queue, self._scheduler = shared.queue, shared.queue.scheduler
        self._store, self._metrics = shared.store, shared.metrics
        self._numbers = count(1)
        self._numbers_of_batches = count(1)
        self._forget_all()

    def _forget_all(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._decoding: dict[int, Decoding] = {}  # by image: those that are being decoded
        self._decode_batches: list[Decoding] = []
        self._singles: dict[int, Decoding] = {}
        self._files: dict[int, VideoFile] = {}  # of videos being decoded: the process opens their descriptors
        self._prepared: set[int] = set()
        self._unwanted: set[int] = set()  # being decoded, and gone
        self._gone: list[int] = []  # to be sent
        self.tower = TowerCredit()
        self.patches = 0  # of all its images: its load
        self.silent_ticks = 0
        self.idle_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unpacker = messages.Unpacker()

    # The connection

    async def connect(self, rendezvous: int) -> None:
        """Take over a process that has loaded."""
        self._forget_all()
        self.lost.clear()
        loop, segment = asyncio.get_running_loop(), self._store.segment
        await loop.create_connection(lambda: self, sock=self.device.connection)
        self._send(messages.Begin(segment.path, segment.data_offset, self._store.device_memory, rendezvous))
        self.is_up = self.device.is_up = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See `asyncio.Protocol`."""
        self.is_up = self.device.is_up = False
        if self._timer is not None:
            self._timer.cancel()
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. An error here is ours, and ends the server: a device would wait forever."""
        try:
            for message in self._unpacker.add(data):
                self._handlers[type(message)](self, message)
        except BaseException as error:  # noqa: BLE001
            self._queue.abort(f"taking the reports of {self.device.name} failed", error)
        self._queue.poke()  # even if only time has passed: an image that was ahead of need may overtake now

    def close(self) -> None:
        """Let the process finish its batches and end."""
        if self.is_up:
            self._send(messages.Close())
        else:
            self.device.kill()

    def disown(self) -> list[Entry]:
        """Give up what a lost process had; return the pages to free once it has ended, as it may still write them."""
        entries = [entry for batch in self.tower.batches.values() for entry in batch.entries]
        unwanted = [self._jobs[number] for number in self._unwanted]
        if self._queue.interrupted(self.device.number, unwanted):
            self.device.failures += 1
        self._forget_all()
        return entries

    def tick(self) -> str:
        """Count a tick of the watchdog; return why the process must be killed, or an empty string.

        Ticks are counted, not seconds: if this process is stopped for a minute, no device has been silent.
        """
        self.silent_ticks += 1
        if self.silent_ticks >= SILENT_TICKS:
            return "it does not answer"
        credit: list[SentBatch | Decoding] = [
            *self.tower.batches.values(),
            *self._decode_batches,
            *self._singles.values(),
        ]
        for each in credit:
            each.ticks_left -= 1
            if each.ticks_left <= 0:
                return f"it has not returned {'a batch' if isinstance(each, SentBatch) else 'an image to decode'}"
        return ""

    @property
    def answers(self) -> bool:
        """Whether the process runs and has reported lately."""
        return self.is_up and self.silent_ticks < QUIET_TICKS

    def _send(self, message: object) -> None:
        if self._transport.is_closing():  # the process has ended: `connection_lost` comes next
            return
        for piece in messages.packed(message):
            self._transport.write(piece)

    # Pushing work

    def push_batches(self, others: Sequence["Link"], group_number: int | None) -> None:
        """Send batches within the credit, and then images that may overtake them.

        A large image is encoded with the `others` if all devices are idle, and have formed the group of this number.
        """
        device, may_encode = self.device.number, self._scheduler.may_encode
        tower, overtakes, wait_s = self.tower, self.device.facts.overtakes, 0.0
        is_free = self.is_up and tower.share is None and tower.forming is None
        while is_free and may_encode(device) and not (wait_s := tower.wait_s(overtakes=overtakes)):
            if not self._push_batch(others, group_number):
                break
        if 0 < wait_s < inf:
            self._call_again(wait_s)
        if may_encode(device):
            self._push_urgent()
        if self._gone:
            self._flush_gone()

    def push_decode_batch(self) -> bool:
        """Send images to decode in one batch; return whether there were any, and credit for them."""
        if len(self._decode_batches) >= DECODE_BATCHES or not self._can_send:
            return False
        is_idle = self.tower.is_idle and not self._prepared and not self._decoding
        images, pixels = BATCH_IMAGES, self._shared.decode_pixels
        if is_idle:
            half = (self._scheduler.waiting_images + 1) // 2
            images, pixels = min(images, max(IDLE_IMAGES, half)), min(pixels, IDLE_PIXELS)
        jobs = self._scheduler.next_to_prepare(monotonic(), images, pixels, self.device.number)
        if jobs:
            self._decode_batches.append(self._decode(jobs, single=False))
        return bool(jobs)

    def push_single(self) -> bool:
        """Send one image to decode by itself; return whether there was one, and credit for it."""
        if len(self._singles) >= self.device.facts.decode_threads or not self._can_send:
            return False
        beside = [self._jobs[number] for number in self._singles]
        jobs = self._scheduler.next_single(
            monotonic(), self._shared.decode_pixels, beside=beside, device=self.device.number
        )
        for job in jobs:
            decoding = self._decode([job], single=True)
            self._singles[job.number] = decoding
        return bool(jobs)

    def note_idle(self, *, is_starved: bool) -> None:
        """Measure the time in which the tower has nothing to do although images are queued."""
        if not self.is_up or not self.tower.is_idle or not is_starved:
            self._end_idle()
        elif self.idle_since is None:
            self.idle_since = monotonic()

    def _end_idle(self) -> None:
        if self.idle_since is not None:
            # Seconds of one device count as its share of the server's time.
            self._metrics.starved((monotonic() - self.idle_since) / self._shared.devices)
            self.idle_since = None

    def gone(self, job: Job) -> None:
        """Note that a job has ended: the process forgets its image, unless that is in a batch."""
        number = job.number
        if self._jobs.get(number) is not job:
            return
        if number in self._prepared:
            self._prepared.discard(number)
            self._forget(number)
        elif number in self._decoding and number not in self._unwanted:
            self._unwanted.add(number)
        else:
            return
        self._gone.append(number)
        self._queue.poke()

    def form_group(self, number: int) -> None:
        """Have the device form a group with the others. Until it has, its tower gets no batch."""
        self.tower.forming = number
        self._end_idle()
        self._send(messages.FormGroup(number))

    def join(self, group: Group, job: Job) -> None:
        """Have the device encode its share of another device's image."""
        patches = group.grid.patches // group.devices
        self.tower.share = GroupShare(group, job, patches, patches)
        self._end_idle()
        self._send(messages.JoinGroup(group, self._queue.encode_s(group.grid.patches)))

    def leave_group(self, number: int) -> None:
        """Tell the device that another one of its group has failed."""
        if self.is_up:
            self._send(messages.LeaveGroup(number))

    @property
    def _can_send(self) -> bool:
        return self.is_up and self._transport.get_write_buffer_size() < UNSENT_BYTES

    def _push_batch(self, others: Sequence["Link"], group_number: int | None) -> bool:
        """Form a batch, reserve pages for its rows, and send it. Return whether one was sent."""
        budget = self.device.facts.batch_patches
        batch: SentBatch | None = None
        while batch is None and (jobs := self._scheduler.next_batch(monotonic(), budget, self.device.number)):
            placed, more = self._placed(jobs)
            if placed:
                group = self._group(placed, others, group_number)
                batch = self._encode(placed, group=group)
                if group is not None:
                    for link in others:
                        link.join(group, batch.jobs[0])
            if not more:
                break
        return batch is not None

    def _push_urgent(self) -> None:
        """Send images that may overtake: the batch that the tower encodes, if it can be interrupted, and all others.

        So a newly demanded image does not wait for batches that were sent before it.
        """
        overtaken = self.tower.overtaken(overtakes=self.device.facts.overtakes)
        while self.is_up and overtaken:
            most = min(each.room for each in overtaken) // 2
            smaller = min(each.patches for each in overtaken) // 2
            jobs = self._scheduler.next_overtaking(
                [job for each in overtaken for job in each.jobs],
                monotonic(),
                most,
                self.device.number,
                most_of=partial(self._most_of, smaller),
            )
            if not jobs:
                return
            placed, _ = self._placed(jobs, is_urgent=True)
            if not placed:
                return
            self._encode(placed, urgent=True)
            for each in overtaken:
                each.room = max(0, each.room - sum(job.grid.patches for job, _ in placed))

    def _most_of(self, patches: int, holder: str) -> int:
        """Return `patches` if it is the turn of a holder to overtake, else 0: then `dispatch` is called when it is."""
        if wait_s := self.tower.turn_in_s(holder):
            self._call_again(wait_s)
            return 0
        return patches

    def _call_again(self, seconds: float) -> None:
        """Have `dispatch` called after this time, or earlier. One call is pending at a time."""
        loop = asyncio.get_running_loop()
        if self._timer is not None and loop.time() < self._timer.when() <= loop.time() + seconds:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._queue.poke)

    def _placed(
        self, jobs: Sequence[Job], *, is_urgent: bool = False
    ) -> tuple[list[tuple[Job, Entry]], bool]:
        """Reserve pages for a batch; return the jobs that got them, and whether the store may have more.

        Jobs end if their rows are held already, or if the store has had no space for too long. The rest returns to the
        queue.
        """
        placed: list[tuple[Job, Entry]] = []
        shared, wait = self._shared, self._shared.store_wait
        for at, job in enumerate(jobs):
            tokens = shared.tokens(job.grid)
            try:
                found = self._store.reserve(job.key.address, tokens, job.grid, job.holder)
            except EncoderError as error:
                self._queue.end(job, error)
                continue
            if isinstance(found, Pin):
                self._queue.end(job, found)
            elif isinstance(found, Entry):
                placed.append((job, found))
                wait.since = None
            elif placed or is_urgent:
                self._queue.put_back(jobs[at:])
                return placed, False
            elif left_s := wait.left_s(tokens, self._store.wait_s):
                wait.call_after(left_s, self._queue.poke)
                self._queue.put_back(jobs[at:])
                return placed, False
            else:
                self._queue.end(job, self._store.full_error())
        return placed, True

    def _group(
        self, placed: list[tuple[Job, Entry]], others: Sequence["Link"], number: int | None
    ) -> Group | None:
        """Return the group that encodes a batch, if it is one large image, all devices are idle, and have formed it."""
        [(job, _), *more] = placed
        least = self.device.facts.group_patches
        if number is None or more or not least or job.key.frames or job.grid.patches < least:
            return None
        # An image whose encoding was interrupted is encoded by one device.
        if (
            job.interruptions
            or self.tower.batches
            or not all(link.is_up and link.tower.is_idle for link in others)
        ):
            return None
        return Group(number, self.device.number, self._shared.devices, job.grid)

    def _encode(
        self, placed: list[tuple[Job, Entry]], *, urgent: bool = False, group: Group | None = None
    ) -> SentBatch:
        self._flush_gone()
        self._end_idle()
        jobs = [job for job, _ in placed]
        patches = sum(job.grid.patches for job in jobs)
        seconds = self._queue.encode_s(patches)
        batch = SentBatch(
            next(self._numbers_of_batches),
            jobs,
            [entry for _, entry in placed],
            seconds,
            patches,
            patches,
            urgent,
            _ticks(seconds),
        )
        self.tower.add(batch)
        self._prepared.difference_update(job.number for job in jobs)
        places: list[messages.Place] = [
            (entry.tier.name, list(entry.extents(0, entry.tokens))) for entry in batch.entries
        ]
        numbers = [job.number for job in jobs]
        self._send(messages.Encode(batch.number, numbers, places, seconds, urgent, group))
        return batch

    def _decode(self, jobs: Sequence[Job], *, single: bool) -> Decoding:
        self._flush_gone()
        files, predicted_s = [], DECODE_S
        decoding = Decoding(set(), 0.0)
        for job in jobs:
            number = job.number = next(self._numbers)
            self._jobs[number] = job
            self._decoding[number] = decoding
            decoding.images.add(number)
            self.patches += job.grid.patches
            video, frames = None, job.key.frames
            if frames is not None:
                predicted_s += FRAME_S * frames.second
                if job.source.file is not None and (file := job.source.file()) is not None:
                    self._files[number] = file
                    video = f"/proc/{os.getpid()}/fd/{file.descriptor}", file.size
            files.append(
                messages.ImageFile(
                    number,
                    messages.beside(job.source.data),
                    job.source.header,
                    job.grid,
                    job.key if frames is not None else None,
                    video,
                )
            )
        decoding.ticks_left = _ticks(predicted_s)
        self._send(messages.Decode(files, single))
        return decoding

    def _flush_gone(self) -> None:
        if self._gone and self.is_up:
            self._send(messages.Gone(self._gone))
            self._gone = []

    # Reports

    def _on_prepared(self, message: messages.Prepared) -> None:
        jobs = [self._left_decoding(number) for number in message.images]
        wanted = [job for job in jobs if job.number not in self._unwanted]
        for job in jobs:
            job.stage("queue", job.queued_at, message.decode_began)
            job.stage("decode", message.decode_began, message.decode_ended)
            job.stage("preprocess", message.cut_began, message.cut_ended)
            self._metrics.queued(message.decode_began - job.queued_at, demanded=job.demanded)
        self._metrics.decoded(message.decoder, len(jobs))
        self._scheduler.decoded(jobs, message.seconds)
        for job, pixels in zip(jobs, message.pixels or [b""] * len(jobs), strict=True):
            job.pixels = pixels
            if job.number in self._unwanted:
                self._unwanted.discard(job.number)
                self._forget(job.number)
        for job in wanted:
            self._prepared.add(job.number)
            self._queue.prepared(job)

    def _on_retry(self, message: messages.Retry) -> None:
        jobs = [self._left_decoding(number) for number in message.images]
        self._scheduler.decoded(jobs, message.seconds)
        for job in jobs:
            self._forget(job.number)
            if job.number in self._unwanted:
                self._unwanted.discard(job.number)
            else:
                self._scheduler.retry_single(job, monotonic())

    def _on_dropped(self, message: messages.Dropped) -> None:
        job = self._left_decoding(message.image)
        self._forget(job.number)
        self._scheduler.decoded([job], message.seconds)
        job.stage("queue", job.queued_at, message.began)
        job.stage("decode", message.began, message.began + message.seconds)
        self._metrics.queued(message.began - job.queued_at, demanded=job.demanded)
        if job.number in self._unwanted:
            self._unwanted.discard(job.number)
        else:
            self._queue.end(job, message.error)

    def _on_encoded(self, message: messages.Encoded) -> None:
        self.device.failures = 0
        if message.devices > 1:
            self._shared.group_failures = 0
        batch = self.tower.end(message.batch, message.seconds)
        grids = [job.grid for job in batch.jobs]
        for job in batch.jobs:
            self._forget(job.number)
            job.stage("vit", message.vit_began, message.vit_began + message.vit_s)
            job.stage("copy_out", message.copy_began, message.copy_ended)
        self._metrics.batch(
            grids, message.seconds / self._shared.devices, message.flops, devices=message.devices
        )
        written = []
        for entry, error in zip(batch.entries, message.errors, strict=True):
            if error is None:
                written.append(entry)
            else:
                self._store.abandon(entry)
        pins = iter(self._store.commit(written))
        outcomes = [error or next(pins) for error in message.errors]
        self._queue.encoded(batch.jobs, outcomes, message.seconds)

    def _on_failed(self, message: messages.Failed) -> None:
        batch = self.tower.end(message.batch)
        for entry in batch.entries:
            self._store.abandon(entry)
        if len(batch.jobs) == 1:
            self._forget(batch.jobs[0].number)
        else:
            self._prepared.update(job.number for job in batch.jobs)
        self._queue.failed(batch.jobs, message.error)

    def _on_left_group(self, message: messages.LeftGroup) -> None:
        tower = self.tower
        if tower.share is not None and tower.share.group.number == message.number:
            tower.share = None
        if tower.forming == message.number:
            tower.forming = None
        if message.failed:
            self._shared.on_lost_group(message.number)

    def _on_report(self, message: messages.Report) -> None:
        self.silent_ticks = 0
        if message.state is not None:
            self.device.state = message.state

    _handlers: ClassVar[dict[type, Callable[["Link", Any], None]]] = {
        messages.Prepared: _on_prepared,
        messages.Retry: _on_retry,
        messages.Dropped: _on_dropped,
        messages.Encoded: _on_encoded,
        messages.Failed: _on_failed,
        messages.LeftGroup: _on_left_group,
        messages.Report: _on_report,
    }

    def _left_decoding(self, number: int) -> Job:
        """Give back the credit of an image that was decoded, and return its job."""
        decoding = self._decoding.pop(number)
        decoding.images.remove(number)
        self._files.pop(number, None)
        if self._singles.pop(number, None) is None and not decoding.images:
            self._decode_batches.remove(decoding)
        return self._jobs[number]

    def _forget(self, number: int) -> None:
        self.patches -= self._jobs.pop(number).grid.patches
        assert self.patches >= 0


def _ticks(predicted_s: float) -> float:
    return max(CREDIT_TICKS, HUNG_FACTOR * predicted_s)
