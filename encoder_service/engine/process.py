"""A device process: runs the tower and the engine's threads, and takes jobs from the server's queue.

Each thread has a connection to the server, where a `Session` answers. `RemoteWork` and `RemoteStore` are this process's
side of the queue and the store. Rows are written directly into the store's memory, which is mapped. An error that
makes the device unusable ends the process, and the server starts another.
"""

import logging
import mmap
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from encoder_contract.device_memory import open_memory
from encoder_contract.errors import EncoderError, InternalError
from encoder_contract.geometry import Grid, GridRule
from encoder_contract.settings import ConfigError, flag
from encoder_service.config import Config
from encoder_service.engine import EXIT_LOST, EXIT_STUCK
from encoder_service.engine.allocator import keep_freed_memory, out_of_collections
from encoder_service.engine.device import Device, DeviceMemory, HungDeviceError
from encoder_service.engine.job_queue import DEVICE_LOST, GroupEncode, Job, Work
from encoder_service.engine.model import MemoryPlan, Model, decode_threads, load_model
from encoder_service.engine.workers import Engine, GroupEncoder
from encoder_service.families.model import CountedRows, Inputs, VisionModel
from encoder_service.image.decoder_process import end_with_parent
from encoder_service.image.source import Source, VideoFile
from encoder_service.keys import ImageKey, Recipe
from encoder_service.logs import known_error, set_up_logging
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Task
from encoder_service.signals import leave_to_the_server
from encoder_service.store import Pin
from encoder_service.store.segment import register_memory
from encoder_service.store.store import copy_bytes, flat, tensor_over
from encoder_service.vision import Tower
from encoder_service.vision.ulysses import Group

log = logging.getLogger(__name__)

REPORT_S = 0.25
TOWER_COUNTS = ("graph_batches", "eager_batches", "padding_patches")
# How often the tower asks, in the middle of a batch, for images that may overtake it. An answer takes 0.1 ms.
ASK_S = 0.02


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a process reports once it has loaded. `rule` is None if only the device process can compute it."""

    model_type: str
    hidden: int
    levels: int
    width: int
    dtype: torch.dtype
    recipe: Recipe
    videos: str
    no_videos: str
    attention: str
    ahead_patches: int
    batch_patches: int
    rule: GridRule | None
    max_tokens: int
    device: str
    decoder: str
    jpegs: bool
    plan: MemoryPlan

    @classmethod
    def of(cls, model: Model, config: Config) -> "Loaded":
        tower = model.tower
        return cls(
            model_type=tower.model_type,
            hidden=tower.hidden,
            levels=tower.levels,
            width=tower.width,
            dtype=tower.dtype,
            recipe=model.recipe,
            videos=model.videos,
            no_videos=model.no_videos,
            attention=tower.attention,
            ahead_patches=tower.ahead_patches,
            batch_patches=tower.batch_patches,
            rule=None if isinstance(tower.geometry, CountedRows) else tower.geometry,
            max_tokens=tower.geometry.max_tokens,
            device=model.device.name,
            decoder=model.decoder.name,
            jpegs=model.decoder.decodes_batches,
            plan=MemoryPlan.of(model, model.device.memory(), config),
        )


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What a process reports regularly: memory and counters.

    The counters are those of `VisionModel` and the decoder's `messages`, by those names, and decoder deaths by reason.
    """

    memory: DeviceMemory
    counts: Counter[str]

    @classmethod
    def of(cls, model: Model) -> "DeviceState":
        counts = Counter({name: getattr(model.tower, name) for name in TOWER_COUNTS})
        return cls(
            model.device.memory(),
            counts + Counter({**model.decoder.deaths, "messages": model.decoder.messages}),
        )


@dataclass(frozen=True, slots=True)
class SharedStore:
    """Where a process writes rows: the segment's file, and the name and size of the device tier, if there is one."""

    path: Path
    data_offset: int
    tier: tuple[bytes, int] | None


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job as the server sends it; both sides then name it by `number`.

    The server holds the file of a video: `video` is the path at which to open it, and its size.
    """

    number: int
    key: ImageKey
    source: Source
    grid: Grid
    queued_at: float
    patches: int
    holder: str
    demanded: bool
    video: tuple[str, int] | None

    def file(self) -> VideoFile | None:
        """Open the file of a video; None if the job has none, or it is closed already."""
        if self.video is None:
            return None
        path, size = self.video
        try:
            return VideoFile.of(os.open(path, os.O_RDONLY | os.O_CLOEXEC), size)
        except OSError:
            return None

    def job(self, file: VideoFile | None) -> Job:
        """Return the job for the workers of this process. Its source refers weakly to `file`: hold that."""
        source = replace(self.source, file=weakref.ref(file)) if file is not None else self.source
        size, pixels = len(self.source.data), self.source.header.pixels
        task = Task(self.key.address, self.patches, size, self.holder, pixels, demands=int(self.demanded))
        return Job(self.key, source, self.grid, task, self.queued_at, number=self.number)


class Wire:
    """The connections to the server. Each thread takes one with its first call, and keeps it."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._free = list(connections)
        self._local = threading.local()

    def tell(self, call: str, *arguments: Any) -> None:
        """Call a method of the `Session` without waiting for it."""
        try:
            self._connection.send((call, arguments, False))
        except OSError:
            _end(0)  # the server has gone

    def ask(self, call: str, *arguments: Any) -> Any:
        """Call a method of the `Session` and return its result. Raises the `EncoderError` that it raised."""
        try:
            self._connection.send((call, arguments, True))
            answer = self._connection.recv()
        except (EOFError, OSError):
            _end(0)
        if isinstance(answer, EncoderError):
            raise answer
        return answer

    @property
    def _connection(self) -> Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = self._free.pop()
        connection: Connection = self._local.connection
        return connection


class RemoteWork(Work):
    """The server's `JobQueue`, for the workers of this process. Jobs travel by number."""

    def __init__(self, wire: Wire, device: Device) -> None:
        super().__init__(device)
        self._wire = wire
        self._jobs: dict[int, Job] = {}
        self._videos: dict[int, VideoFile] = {}
        self._waiting: set[int] = set()  # for a batch
        self._ask_at = 0.0
        self._patch_s = 0.0

    def encode_s(self, patches: int) -> float:
        return patches * self._patch_s

    def take_to_prepare(self, max_images: int, max_pixels: int) -> list[Job]:
        return self._take("take_to_prepare", max_images, max_pixels)

    def take_single(self, max_pixels: int) -> list[Job]:
        return self._take("take_single", max_pixels)

    def is_wanted(self, job: Job) -> bool:
        wanted: bool = self._wire.ask("is_wanted", job.number)
        return wanted

    def decoded(self, jobs: Sequence[Job], seconds: float) -> None:
        self._wire.tell("decoded", self._numbers(jobs), seconds)

    def retry_single(self, job: Job) -> None:
        self._wire.tell("retry_single", self._forget(job))

    def prepared(self, jobs: Sequence[tuple[Job, Inputs]], ready: "torch.cuda.Event | None") -> None:
        for job, patches in jobs:
            job.patches, job.patches_ready = patches, ready
        numbers = self._numbers([job for job, _ in jobs])
        self._waiting.update(numbers)
        self._wire.tell("prepared", numbers, [job.pixels for job, _ in jobs])

    def take_batch(self, budget_patches: int) -> tuple[list[Job] | GroupEncode, float]:
        numbers, starved_s, self._patch_s, gone = self._wire.ask("take_batch", budget_patches)
        self._forget_gone(gone)
        if isinstance(numbers, GroupEncode):
            return numbers, starved_s
        self._waiting.difference_update(numbers)
        return [self._jobs[number] for number in numbers], starved_s

    def take_overtaking(self, batch: Sequence[Job], most_patches: int) -> list[Job]:
        if not self._waiting or monotonic() < self._ask_at:
            return []
        numbers = self._wire.ask("take_overtaking", self._numbers(batch), most_patches)
        self._ask_at = monotonic() + ASK_S
        self._waiting.difference_update(numbers)
        return [self._jobs[number] for number in numbers]

    def form_group(self, job: Job) -> GroupEncode | None:
        group: GroupEncode | None = self._wire.ask("form_group", job.number)
        return group

    def group_failed(self) -> None:
        self._wire.tell("group_failed")

    def put_back(self, jobs: Sequence[Job]) -> None:
        if numbers := self._numbers(jobs):
            self._waiting.update(numbers)
            self._wire.tell("put_back", numbers)

    def failed(self, jobs: Sequence[Job], error: Exception) -> None:
        if len(jobs) == 1:
            self._wire.tell("failed", [self._forget(jobs[0])], self.known_error(error))
            return
        numbers = self._numbers(jobs)
        self._waiting.update(numbers)
        self._wire.tell("failed", numbers, InternalError("several images failed together"))

    def encoded(self, jobs: Sequence[Job], outcomes: Sequence[Pin | EncoderError], seconds: float) -> None:
        # `Session` has the pins of the rows already.
        errors = [each if isinstance(each, EncoderError) else None for each in outcomes]
        stages = [(job.stage_ms, job.stage_began_s) for job in jobs]
        self._wire.tell("encoded", [self._forget(job) for job in jobs], errors, stages, seconds)

    def drop(self, job: Job, error: EncoderError) -> None:
        self._wire.tell("drop", self._forget(job), error, (job.stage_ms, job.stage_began_s))

    def abort(self, why: str, error: BaseException) -> None:
        log.critical("%s: ending its process", why, exc_info=error)
        _end(EXIT_STUCK if isinstance(error, HungDeviceError) else EXIT_LOST if why == DEVICE_LOST else 1)

    def _take(self, call: str, *bounds: int) -> list[Job]:
        taken, gone = self._wire.ask(call, *bounds)
        self._forget_gone(gone)
        jobs = []
        for each in taken:
            if (file := each.file()) is not None:
                self._videos[each.number] = file
            jobs.append(job := each.job(file))
            self._jobs[job.number] = job
        return jobs

    def _numbers(self, jobs: Sequence[Job]) -> list[int]:
        return [job.number for job in jobs]

    def _forget(self, job: Job) -> int:
        del self._jobs[job.number]
        self._videos.pop(job.number, None)
        self._waiting.discard(job.number)
        return job.number

    def _forget_gone(self, numbers: Sequence[int]) -> None:
        """Forget jobs whose claims were all withdrawn while they waited for a batch."""
        for number in numbers:
            self._forget(self._jobs[number])


class RemoteStore:
    """The server's `Store`, for the workers of this process."""

    def __init__(self, wire: Wire, shared: SharedStore, device: Device) -> None:
        self._wire = wire
        with shared.path.open("r+b") as file:
            segment = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        self._memory = {"host": segment[shared.data_offset :]}
        if device.kind == "cuda":  # copies to registered memory run at full speed, beside the tower
            register_memory(segment, device.name)
        if shared.tier is not None:
            gpu = int(device.name.partition(":")[2] or 0)
            self._memory["device"] = tensor_over(open_memory(*shared.tier, gpu, writes=True), device.name)

    def put(
        self, address: bytes, rows: Tensor, grid: Grid, *, holder: str = "", is_reserved: bool = False
    ) -> Pin:
        """See `Store.put`. The `Session` keeps the pin, for the callers that wait."""
        place = self._wire.ask("put", address, len(rows), grid, holder, is_reserved)
        if place is not None:
            memory, extents = self._memory[place[0]], place[1]
            try:
                copy_bytes([memory[begin : begin + size] for begin, size in extents], [flat(rows)])
            except BaseException:
                self._wire.tell("abandon", address)
                raise
            self._wire.tell("commit", address)
        return cast(Pin, None)

    def reserve(self, tokens: Sequence[int], *, wait: bool = True) -> int:
        count: int = self._wire.ask("reserve", list(tokens), wait)
        return count

    def release(self, tokens: int) -> None:
        self._wire.tell("release", tokens)

    def keep_moving(self) -> None:
        """Do nothing: the server moves entries between tiers."""


class RemoteMetrics:
    """The server's `Metrics`, for the workers of this process."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *values, **labels: self._wire.tell("measured", method, values, labels)


def main(descriptors: Sequence[int], *, parent: int) -> None:
    """Load the server's model, report it, and work until the queue closes. `parent` is the server's pid."""
    leave_to_the_server()  # it drains, then closes its queue
    end_with_parent("engine", parent)
    keep_freed_memory()
    ends = [Connection(descriptor) for descriptor in descriptors]
    control, counting, *connections = ends
    try:
        config, number, processes = control.recv()
        set_up_logging(config.log_level, config.log_format)
        cores = len(os.sched_getaffinity(0))
        if config.devices == "cpu" and processes * torch.get_num_threads() > cores:
            torch.set_num_threads(max(1, cores // processes))
        model = _load(config, processes)
        if isinstance(model, ConfigError):
            control.send(model)
            _end(0)
        control.send(Loaded.of(model, config))
        shared, port = control.recv(), control.recv()
    except (EOFError, OSError):
        _end(0)  # the server has gone
    wire = Wire(connections)
    engine = Engine(
        RemoteWork(wire, model.device),
        model,
        RemoteStore(wire, shared, model.device),
        cast(Metrics, RemoteMetrics(wire)),
        batch_patches=model.tower.batch_patches,
        decode_threads=decode_threads(config, model.device),
        group_encoder=_group_encoder(model.tower, port, number, processes),
    )
    for work, connection in ((_report, control), (_count_rows, counting)):
        threading.Thread(target=work, args=(model, connection), daemon=True).start()
    with out_of_collections():
        engine.start()
        engine.join()
    model.decoder.close()
    _end(0)


def _load(config: Config, processes: int) -> Model | ConfigError:
    try:
        return load_model(config, processes)
    except ConfigError as error:
        return error
    except Exception as error:  # noqa: BLE001 - from libraries; the server reports it in one line
        return ConfigError(f"{flag('model')} {config.model}: {type(error).__name__}: {error}")


def _group_encoder(tower: VisionModel, port: int, number: int, processes: int) -> GroupEncoder | None:
    """Return the tower's group encode, if there are other processes and the tower can encode in a group."""
    if processes == 1 or not isinstance(tower, Tower) or not tower.can_encode_in_group(processes):
        return None
    return partial(tower.encode_in_group, Group(tower.device, port, number, processes))


def _report(model: Model, control: Connection) -> None:
    sent = None
    while True:
        if (state := DeviceState.of(model)) != sent:
            control.send(sent := state)
        time.sleep(REPORT_S)


def _count_rows(model: Model, counting: Connection) -> None:
    rule = cast(CountedRows, model.tower.geometry)
    while True:
        size = counting.recv()
        try:
            answer: Grid | str | EncoderError = rule.counted(*size)
        except Exception as error:  # noqa: BLE001 - this thread must outlive any failure of a library
            answer = known_error(error)
        counting.send(answer)


def _end(status: int) -> NoReturn:
    """End the process at once: an orderly exit of the interpreter may hang or crash on a lost device."""
    logging.shutdown()
    os._exit(status)
