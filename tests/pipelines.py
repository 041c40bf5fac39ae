"""A pipeline over the real rooms, and a gate before its tower."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from encoder_contract.digest import content_digest
from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_contract.header import read_header
from encoder_service.engine.model import Model
from encoder_service.engine.pipeline import Pipeline
from encoder_service.engine.stages import Stages
from encoder_service.image.patches import to_patches
from encoder_service.image.source import Source
from encoder_service.scheduler import Claim, Limits, Scheduler
from encoder_service.store import Pin, Store

Encode = Callable[[Sequence[Tensor], Sequence[Grid]], list[Tensor]]
Cut = Callable[..., list[Tensor]]


@dataclass
class Bench:
    """A pipeline, what it runs on, and what happened."""

    pipeline: Pipeline
    store: Store
    model: Model
    ended: dict[bytes, Pin | EncoderError] = field(default_factory=dict)

    def submit(self, image: bytes, claim: Claim) -> tuple[bytes, object]:
        """Queue an image under its digest; return address and job."""
        header = read_header(image)
        grid = self.model.processor.geometry.grid(*header.upright)
        key = self.model.recipe.key(content_digest(image))
        return key.address, self.pipeline.submit(key, Source(key.source_key, image, header), grid, claim)

    async def rows(self, image: bytes, claim: Claim) -> Pin:
        """Queue an image and wait for it."""
        _, job = self.submit(image, claim)
        return await self.pipeline.wait(job, claim)  # type: ignore[arg-type]


def demanded(request: str = "r") -> Claim:
    """A claim of a prefill that waits."""
    return Claim(request, f"client of {request}", demanded=True)


@asynccontextmanager
async def running(
    model: Model,
    encode: Encode | None = None,
    *,
    batch_patches: int = 4096,
    decode_pixels: int = 50_000_000,
    limits: Limits | None = None,
    decode_one: Callable[[Source], Tensor | EncoderError] | None = None,
    cut: Cut = to_patches,
    **store: int,
) -> AsyncIterator[Bench]:
    """Run a pipeline over the real rooms; `encode`, `decode_one` and `cut` stand for the model's own stages."""
    width = model.tower.spec.width
    options = {"host_bytes": 32 << 20, **store}
    kept = Store(width=width, dtype=model.tower.dtype, wait_s=0.2, **options)  # type: ignore[arg-type]
    geometry = model.processor.geometry
    limits = limits or Limits(images=100, patches=10**6, source_bytes=1 << 30, claims=1000)
    ended: dict[bytes, Pin | EncoderError] = {}
    pipeline = Pipeline(
        Scheduler(limits, max_ahead_patches=2 * batch_patches, max_ahead_images=64),
        Stages(
            batches=model.decoder.batches,
            decode_batch=model.decoder.decode_batch,
            decode_one=decode_one or model.decoder.decode_one,
            to_patches=partial(cut, geometry=geometry),
            encode=encode or model.tower.encode,
            put=kept.put,
            pin=kept.pin,
            set_aside=lambda grids: kept.set_aside(list(map(geometry.tokens, grids))),
            give_back=lambda grid: kept.give_back(geometry.tokens(grid)),
        ),
        loop=asyncio.get_running_loop(),
        batch_patches=batch_patches,
        decode_pixels=decode_pixels,
        on_end=lambda job, outcome: ended.__setitem__(job.key.digest, outcome),
    )
    pipeline.start()
    try:
        yield Bench(pipeline, kept, model, ended)
    finally:
        await pipeline.stop()
        kept.close()


class Gate:
    """The real tower behind a gate; remembers the grids of every batch it was given."""

    def __init__(self, model: Model) -> None:
        self._encode = model.tower.encode
        self.open = threading.Event()
        self.batches: list[list[Grid]] = []

    def encode(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Note the batch, wait for the gate, encode."""
        self.batches.append(list(grids))
        assert self.open.wait(20)
        return self._encode(patches, grids)

    async def reached(self, batches: int) -> None:
        """Wait until so many batches have come."""
        async with asyncio.timeout(20):
            while len(self.batches) < batches:
                await asyncio.sleep(0.005)
