"""An engine with real components, and a gate in front of its tower."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Pipe
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError, UnavailableError
from encoder_contract.geometry import Grid
from encoder_contract.header import read_header
from encoder_service.engine.devices import DeviceProcess
from encoder_service.engine.job_queue import Job, JobQueue, Work
from encoder_service.engine.model import Model
from encoder_service.engine.process import RemoteMetrics, RemoteStore, RemoteWork, Wire
from encoder_service.engine.session import Session
from encoder_service.engine.workers import Engine, RowStore
from encoder_service.image.decoder import Decoder
from encoder_service.image.source import Source
from encoder_service.metrics import Metrics
from encoder_service.scheduler import Claim, Limits, Scheduler
from encoder_service.store import Pin, Store
from encoder_service.vision import Tower
from tests.waiting import START_S, soon

Workplace = tuple[Work, RowStore, Metrics, Callable[[], None]]
"""What the workers get: queue, store, metrics; and a function that closes the connections."""


@dataclass
class Bench:
    """An engine, its components, and the outcomes of its jobs."""

    engine: Engine
    jobs: JobQueue
    store: Store
    model: Model
    ended: dict[bytes, Pin | EncoderError] = field(default_factory=dict)  # by content digest
    hang_up: Callable[[], None] = lambda: None

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
        await asyncio.to_thread(self.hang_up)  # then all reports of the workers have arrived
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
    limits: Limits | None = None,
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
    kept = Store(width=model.tower.width, dtype=model.tower.dtype, wait_s=0.2, **options)  # type: ignore[arg-type]
    limits = limits or Limits(images=100, patches=10**6, source_bytes=1 << 30, claims=1000)
    ended: dict[bytes, Pin | EncoderError] = {}
    jobs = JobQueue(
        Scheduler(
            limits,
            max_ahead_patches=ahead_patches or 2 * batch_patches,
            max_ahead_images=64,
            large_pixels=decode_pixels,
        ),
        model.decoder,
        kept,
        loop=asyncio.get_running_loop(),
        on_end=lambda job, outcome: ended.__setitem__(job.key.digest, outcome),
        device=model.device,
    )
    here: Workplace = jobs, kept, Metrics(), lambda: None
    with answered(jobs, kept, model) if REMOTE else nullcontext(here) as (work, rows, metrics, hang_up):
        options = {"batch_patches": batch_patches, "decode_pixels": decode_pixels}
        engine = Engine(work, model, rows, metrics, **options)
        bench = Bench(engine, jobs, kept, model, ended, hang_up)
        engine.start()
        try:
            yield bench
        finally:
            await bench.stop()
    kept.close()


REMOTE = False
"""Whether `running` uses connections to the queue and the store, as in a device process."""


@contextmanager
def answered(jobs: JobQueue, store: Store, model: Model) -> Iterator[Workplace]:
    """Yield what the workers of a device process get, with a session that answers them."""
    pairs = [Pipe() for _ in range(6)]
    (ours, theirs), *others = pairs
    device = SimpleNamespace(number=0, failures=0, control=ours, connections=[end for end, _ in others])
    session = Session(cast(DeviceProcess, device), jobs, store, Metrics(), 1.0)
    serving = threading.Thread(target=session.run, args=(_thread,))
    serving.start()
    wire = Wire([end for _, end in others])
    shared = theirs.recv()

    def hang_up() -> None:
        for _, end in pairs:
            end.close()
        serving.join()

    try:
        rows = RemoteStore(wire, shared, model.device)
        yield RemoteWork(wire, model.device), rows, cast(Metrics, RemoteMetrics(wire)), hang_up
    finally:
        hang_up()


def _thread(name: str, work: Callable[..., None], *given: Any) -> threading.Thread:
    return threading.Thread(target=work, args=given, name=name)


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
