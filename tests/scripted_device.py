"""A device at the other end of the real socket that does what a test tells it: the test receives and sends messages."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from encoder_contract.errors import EncoderError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_contract.header import read_header
from encoder_service.config import Config
from encoder_service.devices import messages
from encoder_service.devices.device_link import Link
from encoder_service.devices.device_process import DeviceProcess
from encoder_service.devices.dispatcher import Dispatcher
from encoder_service.devices.job_queue import Job, JobQueue
from encoder_service.devices.model import Model, facts_of
from encoder_service.image.source import Source
from encoder_service.keys import ImageKey
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Claim, QueueLimits, Scheduler, State
from encoder_service.store import Pin, Store
from testing.photos import photo
from tests.waiting import PATIENCE_S, soon

Message = TypeVar("Message")
FILE = photo(64, 64, 1)
HEADER = read_header(FILE)
GRID = Grid(1, 4, 4)
BATCH = b"to be decoded in a batch"
NO_LIMITS = QueueLimits(images=10**6, patches=10**9, source_bytes=10**12, claims=10**6)


class ScriptedDevice(DeviceProcess):
    """The server's view of a device whose process a test plays."""

    def __init__(
        self, config: Config, model: Model, number: int = 0, processes: int = 1, **facts: Any
    ) -> None:
        self.sent: SimpleQueue[Any] = SimpleQueue()
        self.facts = replace(facts_of(model, config, processes), **facts)
        super().__init__(replace(config, devices=",".join(["cpu"] * processes)), number, processes)

    def start(self) -> None:
        """Open the socket; a thread reads what the server sends."""
        self.connection, self.theirs = socket.socketpair()
        self._counting = socket.socket()  # type: ignore[assignment]
        self.is_stuck = False
        self._stopped = threading.Event()
        reading = self.theirs, self.sent, self._stopped
        threading.Thread(target=self._read, args=reading, daemon=True).start()

    def load(self) -> None:
        """Do nothing: there is nothing to load."""

    def kill(self) -> None:
        """End as a killed process does."""
        with suppress(OSError):  # it has ended already
            self.theirs.shutdown(socket.SHUT_RDWR)

    def wait(self, within_s: float | None = None) -> int | None:
        """Return the status of a killed process."""
        return -9

    @staticmethod
    def _read(connection: socket.socket, sent: "SimpleQueue[Any]", stopped: threading.Event) -> None:
        try:
            while not stopped.is_set():
                sent.put((connection, messages.receive(connection)))
        except OSError:
            pass

    async def next(self, kind: type[Message]) -> Message:
        """Wait for the next message, which must be of this kind.

        Skip `Begin`. Skip `LeaveGroup` and form groups, unless the message is wanted.
        """
        while True:
            _, message = await asyncio.to_thread(self.sent.get, timeout=PATIENCE_S)
            if isinstance(message, kind):
                return message
            if isinstance(message, messages.FormGroup):
                self.tell(messages.LeftGroup(message.number, failed=False))
            else:
                assert isinstance(message, messages.Begin | messages.LeaveGroup), message

    async def forms_group(self, *, failed: bool = False) -> int:
        """Wait for the server to ask for a group, and report that it has formed, or failed; return its number."""
        number = (await self.next(messages.FormGroup)).number
        self.tell(messages.LeftGroup(number, failed))
        return number

    def tell(self, message: object) -> None:
        """Send a message to the server."""
        messages.send(self.theirs, message)

    def prepared(self, *numbers: int, pixels: Sequence[bytes] = ()) -> None:
        """Report images as decoded and cut."""
        self.tell(messages.Prepared(list(numbers), "pillow", 0.001, 0.0, 0.1, 0.1, 0.2, list(pixels)))

    def encoded(self, batch: messages.Encode, seconds: float = 0.1, errors: Sequence[Any] = ()) -> None:
        """Report a batch as encoded; the rows of its images are whatever the pages hold."""
        each = list(errors) or [None] * len(batch.images)
        devices = batch.group.devices if batch.group is not None else 1
        self.tell(messages.Encoded(batch.batch, each, seconds, devices, 0.0, 0.0, seconds, 0.0, 0.1))


@dataclass
class Floor:
    """A real queue, scheduler, store and dispatcher with scripted devices."""

    jobs: JobQueue
    store: Store
    engine: Dispatcher
    devices: list[ScriptedDevice]
    ended: list[tuple[Job, Any]]
    metrics: Metrics

    @property
    def links(self) -> list[Link]:
        """The links, by the number of their device."""
        return self.engine.links

    def submit(
        self, address: bytes, claim: Claim, *, grid: Grid = GRID, width: int = 64, batch: bool = False
    ) -> Job:
        """Queue an image that is decoded by itself, or in a `batch`."""
        source = Source(BATCH if batch else b"", FILE, replace(HEADER, width=width))
        job = self.jobs.submit(ImageKey(address.ljust(32), address.ljust(32)), source, grid, claim)
        assert job is not None
        return job

    async def prepare(self, job: Job, device: int = 0) -> None:
        """Decode an image that was queued."""
        sent = await self.devices[device].next(messages.Decode)
        assert [image.number for image in sent.images] == [job.number]
        self.devices[device].prepared(job.number)
        await soon(lambda: job.state in (State.PREPARED, State.ENCODING, State.SPLIT))

    async def waits(self, *jobs: Job) -> None:
        """Wait until images are decoded, and wait for the tower."""
        await soon(lambda: all(job.state is State.PREPARED for job in jobs))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the server has taken what the devices have sent."""
        await soon(holds)


@asynccontextmanager
async def floor(
    model: Model,
    devices: int = 1,
    *,
    store_bytes: int = 32 << 20,
    ahead_patches: int = 10**9,
    decode_pixels: int = 50_000_000,
    device: type[ScriptedDevice] = ScriptedDevice,
    forms_group: bool = True,
    **facts: Any,
) -> AsyncIterator[Floor]:
    """Run a queue and scripted devices of the class `device`; `facts` are those of the devices.

    If they work together, they have formed a group, unless the test does that.
    """
    loop, metrics = asyncio.get_running_loop(), Metrics()
    tower = model.tower
    store = Store(row_bytes=tower.width * tower.dtype.itemsize, host_bytes=store_bytes, wait_s=0.2)
    ended: list[tuple[Job, Any]] = []
    scheduler = Scheduler(
        NO_LIMITS,
        max_ahead_patches=ahead_patches,
        max_ahead_images=10**6,
        large_pixels=decode_pixels,
        devices=devices,
    )

    def on_end(job: Job, outcome: Pin | EncoderError) -> None:
        ended.append((job, outcome if isinstance(outcome, EncoderError) else outcome.address))

    def can_batch(source: Source) -> bool:
        return source.key == BATCH

    jobs = JobQueue(scheduler, can_batch, store, loop=loop, metrics=metrics, on_end=on_end, devices=devices)
    config = Config(model=Path("unused"), devices="cpu")
    scripted = [device(config, model, number, devices, **facts) for number in range(devices)]
    engine = Dispatcher(scripted, jobs, store, metrics, tower.geometry.tokens, decode_pixels=decode_pixels)
    engine.start()
    await soon(lambda: all(link.is_up for link in engine.links))
    if forms_group and facts.get("group_patches"):
        for each in scripted:
            await each.forms_group()
        await engine.formed()
    aborted: list[str] = []
    loop.set_exception_handler(lambda _, context: aborted.append(repr(context)))
    try:
        yield Floor(jobs, store, engine, scripted, ended, metrics)
        assert not jobs.is_closed, "the queue was aborted"
        assert not aborted, aborted
    finally:
        jobs.close()
        for each in scripted:
            each.kill()
        await engine.stop()
        jobs.fail_all(UnavailableError("it is over"))
        store.close()
