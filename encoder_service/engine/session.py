"""The server's side of its devices: their processes take jobs from the server's queue and put rows into its store.

`Devices` takes the place of an `Engine` in this process. A `Session` answers one process until it ends; then the jobs
that the process had begun go back to the queue.
"""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_service.config import Config, ConfigError, flag
from encoder_service.engine.device import Device
from encoder_service.engine.devices import DeviceProcess
from encoder_service.engine.job_queue import GroupEncode, Job, JobQueue
from encoder_service.engine.model import Model, files_decoder
from encoder_service.engine.process import TOWER_COUNTS, Loaded, SharedStore, TakenJob
from encoder_service.families.model import CountedRows, VisionModel
from encoder_service.image.dali import DaliJpegs
from encoder_service.image.decoder import Decoder, FileDecoder
from encoder_service.image.decoder_pool import DecoderStartError
from encoder_service.image.source import Source, VideoFile
from encoder_service.metrics import Metrics
from encoder_service.scheduler import State
from encoder_service.store import Pin, Store, arena
from encoder_service.vision.ulysses import start_rendezvous

log = logging.getLogger(__name__)

# The server ends once the processes of every device have ended this often in a row, without a completed batch.
MOST_FAILURES = 5
# Seconds before a process is restarted, by the number of consecutive failures.
_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0)
_LONG_PAUSE_S = 30.0

Stages = tuple[dict[str, float], dict[str, float]]
"""Durations (ms) and start times (s) of a job's stages, by name."""


class Devices:
    """Serves the processes of all devices from one queue and one store, and restarts processes that end."""

    def __init__(
        self, devices: Sequence[DeviceProcess], jobs: JobQueue, store: Store, metrics: Metrics
    ) -> None:
        self._devices = devices
        self._jobs = jobs
        self._store = store
        self._metrics = metrics
        self._closed = threading.Event()
        self._rendezvous = start_rendezvous() if len(devices) > 1 else None
        # `stop` does not wait for it: it ends when the store is closed.
        self._migrator = self.thread("tier-migrator", store.keep_moving)
        self._threads = [self.thread(f"device-{device.number}", self._serve, device) for device in devices]

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._threads, self._migrator):
            thread.start()

    async def stop(self) -> None:
        """Wait until the processes have finished their current jobs. Close the queue first."""
        self._closed.set()
        for device in self._devices:
            if not device.is_up:
                device.process.kill()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def thread(self, name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        """Return a new thread, not started. An error that `work` does not handle ends the server."""

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - a thread never ends silently
                self._jobs.abort(f"the server's thread {name} died", error)

        return threading.Thread(target=run, name=name, daemon=True)

    def _serve(self, device: DeviceProcess) -> None:
        while True:
            port = self._rendezvous.port if self._rendezvous is not None else 0
            share = 1 / len(self._devices)
            Session(device, self._jobs, self._store, self._metrics, share, port).run(self.thread)
            if self._closed.is_set():
                device.end()
                return
            log.error("the process of %s ended (%s): starting another", device.name, why := device.ended())
            while not self._start(device, why):
                if self._closed.is_set():
                    return

    def _start(self, device: DeviceProcess, why: str) -> bool:
        """Start a process after a pause. Return whether it has loaded. Ends the server if all devices keep failing."""
        device.failures += 1
        if all(each.failures >= MOST_FAILURES for each in self._devices):
            self._jobs.abort("the server lost its devices", RuntimeError(f"the last process ended ({why})"))
            self._closed.set()
        pause_s = _PAUSES_S[device.failures - 1] if device.failures <= len(_PAUSES_S) else _LONG_PAUSE_S
        if self._closed.wait(pause_s):
            return False
        try:
            device.start()
            if self._closed.is_set():  # `stop` killed the previous process, not this one
                device.end()
                return False
            device.loaded()
        except (ConfigError, OSError) as error:
            log.error("the process of %s does not start: %s", device.name, error)
            return False
        return True


class Session:
    """Serves one process of a device until it ends. The process's threads call the public methods.

    Both sides name jobs by numbers, which are not reused, so that a dropped job is never confused with a later one at
    its address.
    """

    def __init__(
        self,
        device: DeviceProcess,
        jobs: JobQueue,
        store: Store,
        metrics: Metrics,
        share: float,
        port: int = 0,
    ) -> None:
        """`share` is 1 / the number of devices; `port` is where processes meet for group encodes, 0 for one device."""
        self._process = device
        self._device = device.number
        self._queue = jobs
        self._store = store
        self._metrics = metrics
        self._share = share
        self._port = port
        self._numbers = count()
        self._jobs: dict[int, Job] = {}
        self._files: dict[int, VideoFile] = {}  # of videos being decoded: the process opens their descriptors
        self._waiting: set[int] = set()  # for a batch
        self._lock = threading.Lock()
        self._reserved: Counter[int] = Counter()
        self._writing: dict[bytes, arena.Entry] = {}
        self._pins: dict[bytes, Pin] = {}

    def run(self, thread: Callable[..., threading.Thread]) -> None:
        """Serve the process until it ends for any reason; then undo its unfinished work."""
        segment, process = self._store.segment, self._process
        handlers = [
            thread(f"device-{self._device}-{n}", self._answer, connection)
            for n, connection in enumerate(process.connections)
        ]
        try:
            process.control.send(SharedStore(segment.path, segment.data_offset, self._store.device_memory))
            process.control.send(self._port)
            process.is_up = True
            for handler in handlers:
                handler.start()
            while True:
                process.state = process.control.recv()
        except (EOFError, OSError):
            pass
        self._queue.leave(self._device)
        for handler in handlers:
            if handler.ident is not None:
                handler.join()
        for entry in self._writing.values():
            self._store.abandon(entry)
        for tokens in self._reserved.elements():
            self._store.release(tokens)
        for pin in self._pins.values():
            pin.release()
        self._queue.interrupted(self._device)

    def _answer(self, connection: Connection) -> None:
        try:
            while True:
                call, arguments, wants_answer = connection.recv()
                try:
                    answer = getattr(self, call)(*arguments)
                except EncoderError as error:
                    answer = error
                if wants_answer:
                    connection.send(answer)
        except (EOFError, OSError):
            pass
        except BaseException:
            self._process.process.kill()  # its thread would wait for the answer forever
            raise

    # The queue: see `Work`

    def take_to_prepare(self, max_images: int, max_pixels: int) -> tuple[list[TakenJob], list[int]]:
        return self._send(self._queue.take_to_prepare(max_images, max_pixels, self._device))

    def take_single(self, max_pixels: int) -> tuple[list[TakenJob], list[int]]:
        return self._send(self._queue.take_single(max_pixels, self._device))

    def is_wanted(self, number: int) -> bool:
        return self._queue.is_wanted(self._jobs[number])

    def decoded(self, numbers: Sequence[int], seconds: float) -> None:
        for number in numbers:
            self._files.pop(number, None)
        self._queue.decoded(self._by_number(numbers), seconds)

    def retry_single(self, number: int) -> None:
        self._queue.retry_single(self._jobs.pop(number))

    def prepared(self, numbers: Sequence[int], pixels: Sequence[bytes]) -> None:
        jobs = self._by_number(numbers)
        for job, digest in zip(jobs, pixels, strict=True):
            job.pixels = digest
        self._waiting.update(numbers)  # first: another thread may take the jobs at once
        self._queue.prepared([(job, {}) for job in jobs], None)

    def take_batch(self, budget_patches: int) -> tuple[list[int] | GroupEncode, float, float, list[int]]:
        jobs, starved_s = self._queue.take_batch(budget_patches, self._device)
        taken = jobs if isinstance(jobs, GroupEncode) else self._take_numbers(jobs)
        return taken, starved_s, self._queue.encode_s(1), self._pop_gone()

    def take_overtaking(self, batch: Sequence[int], most_patches: int) -> list[int]:
        return self._take_numbers(
            self._queue.take_overtaking(self._by_number(batch), most_patches, self._device)
        )

    def form_group(self, number: int) -> GroupEncode | None:
        return self._queue.form_group(self._jobs[number], self._device)

    def group_failed(self) -> None:
        self._queue.group_failed()

    def put_back(self, numbers: Sequence[int]) -> None:
        self._queue.put_back(self._by_number(numbers))
        self._waiting.update(numbers)

    def failed(self, numbers: Sequence[int], error: EncoderError) -> None:
        jobs = self._by_number(numbers)
        if len(jobs) == 1:
            del self._jobs[numbers[0]]
        self._queue.failed(jobs, error)
        self._waiting.update(numbers if len(jobs) > 1 else ())

    def encoded(
        self,
        numbers: Sequence[int],
        errors: Sequence[EncoderError | None],
        stages: Sequence[Stages],
        seconds: float,
    ) -> None:
        self._process.failures = 0
        jobs = [self._pop(*each) for each in zip(numbers, stages, strict=True)]
        pins = [error or self._pins.pop(job.key.address) for job, error in zip(jobs, errors, strict=True)]
        self._queue.encoded(jobs, pins, seconds)

    def drop(self, number: int, error: EncoderError, stages: Stages) -> None:
        self._queue.drop(self._pop(number, stages), error)

    # The store: see `RowStore`

    def put(
        self, address: bytes, tokens: int, grid: Grid, holder: str, is_reserved: bool
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """Return the tier and the extents to write the rows to, before `commit` or `abandon`; None if they are held."""
        entry, is_new = self._store.begin_put(
            address, tokens, grid, holder, is_reserved=is_reserved, is_shared=True
        )
        if not is_new:
            self._pins[address] = Pin(self._store, entry)
            return None
        self._writing[address] = entry
        return entry.tier.name, list(entry.extents(0, tokens))

    def commit(self, address: bytes) -> None:
        entry = self._writing.pop(address)
        self._store.commit(entry)
        self._pins[address] = Pin(self._store, entry)

    def abandon(self, address: bytes) -> None:
        self._store.abandon(self._writing.pop(address))

    def reserve(self, tokens: Sequence[int], wait: bool) -> int:
        fit = self._store.reserve(tokens, wait=wait)
        with self._lock:
            self._reserved.update(tokens[:fit])
        return fit

    def release(self, tokens: int) -> None:
        with self._lock:
            self._reserved[tokens] -= 1
        self._store.release(tokens)

    def measured(self, method: str, values: Sequence[Any], labels: Mapping[str, Any]) -> None:
        """Call a method of `Metrics`; seconds of one device count as its share of the server's time."""
        if method == "starved":
            values = [values[0] * self._share]
        elif method == "batch":
            values = [values[0], values[1] * self._share, values[2]]
        getattr(self._metrics, method)(*values, **labels)

    # Jobs by number

    def _pop(self, number: int, stages: Stages) -> Job:
        job = self._jobs.pop(number)
        job.stage_ms, job.stage_began_s = stages
        return job

    def _send(self, jobs: Sequence[Job]) -> tuple[list[TakenJob], list[int]]:
        sent = []
        for job in jobs:
            job.number = next(self._numbers)
            self._jobs[job.number] = job
            task, source, video = job.task, job.source, None
            if source.file is not None:
                if (file := source.file()) is not None:
                    self._files[job.number] = file
                    video = f"/proc/{os.getpid()}/fd/{file.descriptor}", file.size
                source = replace(source, file=None)
            sent.append(
                TakenJob(
                    *(job.number, job.key, source, job.grid, job.queued_at),
                    patches=task.patches,
                    holder=task.holder,
                    demanded=task.demanded,
                    video=video,
                )
            )
        return sent, self._pop_gone()

    def _by_number(self, numbers: Sequence[int]) -> list[Job]:
        return [self._jobs[number] for number in numbers]

    def _take_numbers(self, jobs: Sequence[Job]) -> list[int]:
        numbers = [job.number for job in jobs]
        self._waiting.difference_update(numbers)
        return numbers

    def _pop_gone(self) -> list[int]:
        """Forget jobs that were dropped while they waited for a batch; return them, for the process to forget too."""
        with self._lock:
            gone = [n for n in list(self._waiting) if self._jobs[n].task.state is State.GONE]
            for number in gone:
                self._waiting.discard(number)
                del self._jobs[number]
            return gone


class ServedRows(CountedRows):
    """A geometry rule that asks a device process for the rows of each size."""

    def __init__(self, devices: Sequence[DeviceProcess], max_rows: int) -> None:
        super().__init__(lambda *_: Grid(1, 0, 1), max_rows)  # not called: `counted` is overridden
        self._devices = devices

    def counted(self, width: int, height: int) -> Grid | str:
        """Ask the first device that is up."""
        return min(self._devices, key=lambda device: not device.is_up).counted(width, height)


class ServedTower:
    """The devices' tower, for the server: implements the part of `VisionModel` that the server needs."""

    def __init__(self, loaded: Loaded, devices: Sequence[DeviceProcess]) -> None:
        self._loaded = loaded
        self._devices = devices
        self.geometry = loaded.rule or ServedRows(devices, loaded.max_tokens)

    def __getattr__(self, name: str) -> Any:
        if name in TOWER_COUNTS:
            return sum(device.counts[name] for device in self._devices)
        return getattr(self._loaded, name)


class ServedDecoder(Decoder):
    """The devices' decoder, for the server: reads headers here; the device processes decode."""

    def __init__(self, files: FileDecoder, loaded: Loaded, devices: Sequence[DeviceProcess]) -> None:
        super().__init__(torch.device("cpu"), files)
        self._loaded = loaded
        self._devices = devices

    @property
    def name(self) -> str:
        return self._loaded.decoder

    @property
    def deaths(self) -> Mapping[str, int]:
        return {
            reason: local + sum(device.counts[reason] for device in self._devices)
            for reason, local in self._files.deaths.items()
        }

    @property
    def messages(self) -> int:
        return self._files.messages + sum(device.counts["messages"] for device in self._devices)

    def can_batch(self, source: Source) -> bool:
        return self._loaded.jpegs and source.video is None and DaliJpegs.takes(source)


def served_model(config: Config, devices: Sequence[DeviceProcess]) -> Model:
    """Wait until all devices have loaded; return the server's view of their model.

    Raises `ConfigError` naming what a device cannot load.
    """
    files = files_decoder(config, threads=1)  # for headers
    try:
        all_loaded = [device.loaded() for device in devices]
        for each in all_loaded:
            each.plan.check()
        files.start()
    except BaseException as error:
        for device in devices:
            device.end()
        files.close()
        if isinstance(error, DecoderStartError | OSError):
            raise ConfigError(f"{flag('model')} {config.model}: {error}") from error
        raise
    for device, each in zip(devices, all_loaded, strict=True):
        device.name, device.plan = each.device, each.plan
    loaded = all_loaded[0]
    return Model(
        cast(VisionModel, ServedTower(loaded, devices)),
        loaded.recipe,
        ServedDecoder(files, loaded, devices),
        Device(loaded.device),
        loaded.videos,
        loaded.no_videos,
    )
