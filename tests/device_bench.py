"""An engine with real components, and a gate in front of its tower."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_contract.header import read_header
from encoder_service.config import Config
from encoder_service.devices.dispatcher import Dispatcher
from encoder_service.devices.job_queue import Job, JobQueue
from encoder_service.devices.model import Model
from encoder_service.image.device_decoder import Decoder
from encoder_service.image.source import Source
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Claim, QueueLimits, Scheduler
from encoder_service.store import Pin, Store
from encoder_service.vision import Tower
from testing.device_thread import DeviceThread
from tests.waiting import START_S, soon


@dataclass
class Bench:
    """An engine, its components, and the outcomes of its jobs."""

    engine: Dispatcher
    device: DeviceThread
    jobs: JobQueue
    store: Store
    model: Model
    ended: dict[bytes, Pin | EncoderError] = field(default_factory=dict)  # by content digest

    def submit(self, image: bytes, claim: Claim) -> Job:
        """Queue an image."""
        header = read_header(image)
        grid = self.model.tower.geometry.grid(*header.upright)
        key = self.model.recipe.key(content_digest(image))
        job = self.jobs.submit(key, Source(key.source_key, image, header), grid, claim)
        assert job is not None, "it is held already"
        return job

    async def rows(self, image: bytes, claim: Claim) -> Pin:
        """Queue an image and wait for it."""
        return await self.jobs.wait(self.submit(image, claim), claim)

    async def stop(self) -> None:
        """Stop the engine, as a server does."""
        self.jobs.close()
        await self.engine.stop()
        self.jobs.fail_all(UnavailableError("the engine has stopped"))


def demanded(request: str = "r") -> Claim:
    """Return the claim of a Fetch whose chunk is waiting."""
    return Claim(request, f"client of {request}", demanded=True)


class Changed:
    """A real component with some of its methods replaced."""

    def __init__(self, part: object, **methods: Callable[..., object]) -> None:
        self._part = part
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def in_batches(model: Model) -> Model:
    """Return the model with a decoder that decodes every image in batches, as a GPU decodes JPEGs."""
    one = model.decoder.decode
    changed = Changed(
        model.decoder,
        can_batch=lambda _: True,
        decode_batch=lambda sources: [one(source) for source in sources],
    )
    changed.__dict__["decodes_batches"] = True
    return replace(model, decoder=cast(Decoder, changed))


@asynccontextmanager
async def running(
    model: Model,
    encode: Callable[..., list[Tensor]] | None = None,
    *,
    batch_patches: int = 4096,
    ahead_patches: int = 0,
    decode_pixels: int = 50_000_000,
    limits: QueueLimits | None = None,
    decode: Callable[[Source], Tensor | EncoderError] | None = None,
    **store: int,
) -> AsyncIterator[Bench]:
    """Run an engine with real components; `encode` and `decode` replace those of the model's tower and decoder.

    As many patches are prepared ahead of the tower as two batches hold, or `ahead_patches`.
    """
    if encode is not None:
        model = replace(model, tower=cast(Tower, Changed(model.tower, encode=encode)))
    if decode is not None:
        model = replace(model, decoder=cast(Decoder, Changed(model.decoder, decode=decode)))
    options = {"host_bytes": 32 << 20, **store}
    kept = Store(row_bytes=model.tower.width * model.tower.dtype.itemsize, wait_s=0.2, **options)  # type: ignore[arg-type]
    limits = limits or QueueLimits(images=100, patches=10**6, source_bytes=1 << 30, claims=1000)
    ended: dict[bytes, Pin | EncoderError] = {}
    jobs = JobQueue(
        Scheduler(
            limits,
            max_ahead_patches=ahead_patches or 2 * batch_patches,
            max_ahead_images=64,
            large_pixels=decode_pixels,
        ),
        model.decoder.can_batch,
        kept,
        loop=asyncio.get_running_loop(),
        on_end=lambda job, outcome: ended.__setitem__(job.key.digest, outcome),
        device=model.device,
    )
    config = Config(model=Path("unused"), devices="cpu")
    device = DeviceThread(config, model, batch_patches=batch_patches)
    tokens = model.tower.geometry.tokens
    engine = Dispatcher([device], jobs, kept, Metrics(), tokens, decode_pixels=decode_pixels)
    bench = Bench(engine, device, jobs, kept, model, ended)
    engine.start()
    try:
        yield bench
    finally:
        await bench.stop()
    kept.close()


class Gate:
    """The real tower behind a gate; records the grids of every batch."""

    def __init__(self, model: Model) -> None:
        self._encode = model.tower.encode
        self.open = threading.Event()
        self.batches: list[list[Grid]] = []

    def encode(self, patches: Sequence[Tensor], grids: Sequence[Grid], *_: object) -> list[Tensor]:
        """Record the batch, wait for the gate, encode."""
        self.batches.append(list(grids))
        assert self.open.wait(START_S)
        return self._encode(patches, grids)

    async def reached(self, batches: int) -> None:
        """Wait until this many batches have arrived."""
        await soon(lambda: len(self.batches) >= batches)
