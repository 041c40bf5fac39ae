"""Small images on a fast device, in virtual time: its tower is busy while callers wait, whatever a decode batch has."""

import asyncio
import itertools
import pickle
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any, ClassVar

import pytest

from encoder_contract.geometry import Grid
from encoder_service.devices import device_link as linking
from encoder_service.devices import job_queue, messages, tower_credit
from encoder_service.devices.model import Model
from encoder_service.scheduler import Claim, Scheduler
from encoder_service.store import Pin
from encoder_service.vision.load import BATCH_PATCHES
from tests.scripted_device import Floor, ScriptedDevice, floor
from tests.virtual_time import VirtualTimeLoop

SMALL = Grid(1, 16, 16)  # 256×256
SMALL_PIXELS = 256 * 256
BUDGET = BATCH_PATCHES["cuda"]
IMAGES = 400
WARM_UP = 150


@dataclass
class Pace:
    """How long a device works, in seconds: for a batch, and for each image in it."""

    decode_batch_s: float
    decode_image_s: float
    tower_batch_s: float
    tower_image_s: float


# nvJPEG, and the tower of Qwen3-VL-8B on an H200, as `python -m bench.gpu_parts.predicted` prints it.
H200 = Pace(0.0015, 0.00015, 0.0014, 0.00036)
MOST = BUDGET // SMALL.patches  # images in a batch
FULL_S = H200.tower_batch_s + MOST * H200.tower_image_s


class PacedDevice(ScriptedDevice):
    """A device that decodes and encodes at a pace, on the event loop: one batch of each kind at a time."""

    pace: ClassVar[Pace]

    def start(self) -> None:
        """Open the socket, and begin to work."""
        self.connection, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self._counting = socket.socket()  # type: ignore[assignment]
        self.is_stuck = False
        self.busy_s = 0.0
        self._decodes: asyncio.Queue[messages.Decode] = asyncio.Queue()
        self._batches: asyncio.Queue[messages.Encode] = asyncio.Queue()
        work = (self._listen(), self._decode_all(), self._encode_all())
        self._tasks = [asyncio.get_running_loop().create_task(each) for each in work]

    async def _listen(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self.theirs)
        while True:
            try:
                message = await _received(self._reader)
            except (asyncio.IncompleteReadError, OSError):  # the link has gone, perhaps with messages unread
                break
            if isinstance(message, messages.Decode):
                self._decodes.put_nowait(message)
            elif isinstance(message, messages.Encode):
                self._batches.put_nowait(message)
        for task in self._tasks[1:]:
            task.cancel()

    async def _decode_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch, began = await self._decodes.get(), loop.time()
            await asyncio.sleep(self.pace.decode_batch_s + self.pace.decode_image_s * len(batch.images))
            numbers, now = [image.number for image in batch.images], loop.time()
            self.tell(messages.Prepared(numbers, "nvjpeg", now - began, began, now, now, now, []))

    async def _encode_all(self) -> None:
        while True:
            batch = await self._batches.get()
            seconds = self.pace.tower_batch_s + self.pace.tower_image_s * len(batch.images)
            await asyncio.sleep(seconds)
            self.busy_s += seconds
            self.encoded(batch, seconds)

    def tell(self, message: object) -> None:
        """Send a message to the server."""
        self._writer.writelines(messages.packed(message))


async def _received(reader: asyncio.StreamReader) -> Any:
    size, files = messages._HEAD.unpack(await reader.readexactly(messages._HEAD.size))
    sizes = [messages._SIZE.unpack(await reader.readexactly(messages._SIZE.size))[0] for _ in range(files)]
    body = await reader.readexactly(size)
    return pickle.loads(body, buffers=[await reader.readexactly(each) for each in sizes])


@dataclass
class Outcome:
    """What a closed loop of callers measured, after the warm-up."""

    images_per_s: float
    busy: float
    """The share of the time in which the tower worked."""


@asynccontextmanager
async def _paced(model: Model, pace: Pace) -> AsyncIterator[tuple[Floor, PacedDevice]]:
    PacedDevice.pace = pace
    async with floor(model, device=PacedDevice, overtakes=False, batch_patches=BUDGET) as at:
        [device] = at.devices
        assert isinstance(device, PacedDevice)
        yield at, device


async def _closed_loop(model: Model, callers: int, pace: Pace) -> Outcome:
    """Let `callers` ask for one new image after another."""
    loop, numbers = asyncio.get_running_loop(), itertools.count()
    async with _paced(model, pace) as (at, device):
        marks: list[tuple[float, float, int]] = []

        async def caller(name: int) -> None:
            while (number := next(numbers)) <= WARM_UP + IMAGES:
                if number in (WARM_UP, WARM_UP + IMAGES):
                    marks.append((loop.time(), device.busy_s, len(at.ended)))
                await _encoded(at, number, f"caller {name}")

        await asyncio.gather(*(caller(n) for n in range(callers)))
        (began, busy, before), (ended, busy_then, after) = marks
        spent = ended - began
        return Outcome((after - before) / spent, (busy_then - busy) / spent)


async def _open_loop(model: Model, callers: int, pace: Pace, images_per_s: float) -> float:
    """Let images come at random, of one caller or another; return how long they wait on average, seconds."""
    loop, random = asyncio.get_running_loop(), Random(1)
    async with _paced(model, pace) as (at, _):
        waits: list[float] = []

        async def one(number: int) -> None:
            began = loop.time()
            await _encoded(at, number, f"caller {number % callers}")
            waits.append(loop.time() - began)

        images, due = [], loop.time()
        for number in range(WARM_UP + IMAGES):
            due += random.expovariate(images_per_s)
            await asyncio.sleep(due - loop.time())
            images.append(loop.create_task(one(number)))
        await asyncio.gather(*images)
        return fmean(waits[WARM_UP:])


async def _encoded(at: Floor, number: int, holder: str) -> None:
    claim = Claim(f"request {number}", holder, demanded=True)
    job = at.submit(number.to_bytes(4), claim, grid=SMALL, width=SMALL_PIXELS // 64, batch=True)
    pin = await at.jobs.wait(job, claim)
    assert isinstance(pin, Pin)
    pin.release()


@pytest.fixture
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a coroutine in virtual time, which the queue and the links use too."""

    def run(measured: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            clock = runner.get_loop().time
            for module in (linking, job_queue, tower_credit):
                monkeypatch.setattr(module, "monotonic", clock)
            return runner.run(measured)

    return run


@pytest.mark.parametrize("callers", [8, 16, 48])
def test_the_small_first_batch_of_an_idle_device_slows_no_small_images(
    model: Model, in_virtual_time: Any, monkeypatch: pytest.MonkeyPatch, callers: int
) -> None:
    """It has few pixels and half of what waits, so that the tower begins soon. That must not keep batches small."""
    with_rule = in_virtual_time(_closed_loop(model, callers, H200))
    monkeypatch.setattr(linking, "IDLE_PIXELS", 10**9)
    monkeypatch.setattr(Scheduler, "waiting_images", 10**6)
    without = in_virtual_time(_closed_loop(model, callers, H200))
    assert with_rule.images_per_s >= 0.95 * without.images_per_s
    if callers <= 16:  # without the rule the callers wait and send in step: the tower waits for each decode
        assert with_rule.images_per_s >= 1.3 * without.images_per_s


@pytest.mark.parametrize("callers", [16, 48, 96])
def test_small_images_keep_the_tower_busy_at_the_pace_of_an_h200(
    model: Model, in_virtual_time: Any, callers: int
) -> None:
    assert in_virtual_time(_closed_loop(model, callers, H200)).busy >= 0.95


@pytest.mark.parametrize("callers", [48, 96, 192])
@pytest.mark.cuda
def test_batches_are_full_when_many_callers_wait(model: Model, in_virtual_time: Any, callers: int) -> None:
    """A forward of one image takes as long as four images in a full batch: none overtakes, and few batches wait."""
    outcome = in_virtual_time(_closed_loop(model, callers, H200))
    assert outcome.images_per_s >= 0.9 * MOST / FULL_S


@pytest.mark.parametrize(("load", "full_batches"), [(0.25, 1), (0.5, 1.5), (0.75, 2.5)])
@pytest.mark.cuda
def test_an_image_waits_for_few_full_batches_below_the_capacity(
    model: Model, in_virtual_time: Any, load: float, full_batches: float
) -> None:
    wait_s = in_virtual_time(_open_loop(model, 96, H200, load * MOST / FULL_S))
    assert wait_s <= full_batches * FULL_S
