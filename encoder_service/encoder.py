"""The path of an image, on one screen: bytes → address → known? → decode → … → store → rows.

Runs on the event loop and touches no pixels: what takes time happens in the pipeline's threads.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from time import monotonic

from encoder_contract.digest import content_digest
from encoder_contract.errors import (
    DigestMismatchError,
    InvalidRequestError,
    UnknownImageError,
)
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.header import Header, check_limits, read_header
from encoder_service.address import Recipe
from encoder_service.metrics import Metrics
from encoder_service.pipeline import Job, Pipeline
from encoder_service.refusals import Refusals
from encoder_service.scheduler import Claim
from encoder_service.sources import Sources
from encoder_service.store import Pin, Store

# Hashing this much takes about 40 µs; more goes to a worker thread, so that the loop's lag stays small.
HASH_ON_LOOP_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image as callers name it: content digest, pixel bounds of the variant (0: the model's), tenant salt."""

    digest: bytes
    min_pixels: int = 0
    max_pixels: int = 0
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a named image; `grid` is None when its bytes are needed."""

    address: bytes
    grid: Grid | None
    cached: bool = False


class Encoder:
    """Submitted images in, rows out."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        geometry: Geometry,
        max_image_bytes: int,
        max_image_pixels: int,
        sources: Sources,
        pipeline: Pipeline,
        store: Store,
        refusals: Refusals,
        metrics: Metrics,
    ) -> None:
        self._recipe = recipe
        self._geometry = geometry
        self._max_image_bytes = max_image_bytes
        self._max_image_pixels = max_image_pixels
        self._sources = sources
        self._pipeline = pipeline
        self._store = store
        self._refusals = refusals
        self._metrics = metrics
        self._awaited: defaultdict[bytes, set[asyncio.Future[None]]] = defaultdict(set)

    def address(self, image: ImageRef) -> bytes:
        """Return the store address of `image`."""
        return self._recipe.address(
            image.digest, min_pixels=image.min_pixels, max_pixels=image.max_pixels, salt=image.salt
        )

    def name(self, image: ImageRef, claim: Claim, claimed_grid: Grid | None = None) -> Known:
        """Answer a submitted name: cached, queued now, or (grid None) its bytes are needed.

        Raises the refusal when the image is already known to be bad, and `OverloadedError` when the queue is full.
        """
        address = self.address(image)
        self._refusals.check(address)
        if (entry := self._store.pin(address)) is not None:
            with entry:
                return Known(address, _confirmed(Grid(*entry.grid), claimed_grid), cached=True)
        if (job := self._start(image, address, claim)) is not None:
            return Known(address, _confirmed(job.grid, claimed_grid))
        return Known(address, None)

    async def receive(
        self, image: ImageRef, data: bytes, claim: Claim, claimed_grid: Grid | None = None
    ) -> Known:
        """Take the bytes of an image, check them against their name and the limits, and queue it.

        Raises `DigestMismatchError`, `InvalidImageError`, `ImageLimitError` or `OverloadedError`.
        """
        began = monotonic()
        digest = (
            content_digest(data)
            if len(data) <= HASH_ON_LOOP_BYTES
            else await asyncio.to_thread(content_digest, data)
        )
        self._metrics.stage("hash", monotonic() - began)
        if digest != image.digest:
            raise DigestMismatchError(f"the bytes hash to {digest.hex()}, not to {image.digest.hex()}")
        address = self.address(image)
        header, grid = self._read(image, data)
        _confirmed(grid, claimed_grid)
        self._sources.put(digest + image.salt, data)
        if self._store.contains(address):
            return Known(address, grid, cached=True)
        self._pipeline.submit(address, data, header.upright, grid, claim)
        self._wake(address)
        return Known(address, grid)

    async def rows(self, image: ImageRef, claim: Claim, grace_s: float) -> tuple[Pin, Job | None]:
        """Return the rows of `image`, pinned, and the job that made them if they had to be waited for.

        Waits for an encoding that is under way or can be started from kept bytes; for an image that nobody has
        submitted, at most `grace_s`, then `UnknownImageError`. Cancelling withdraws the claim.
        """
        address = self.address(image)
        deadline = asyncio.get_running_loop().time() + grace_s
        while True:
            if (pin := self._store.pin(address)) is not None:
                return pin, None
            self._refusals.check(address)
            job = self._start(image, address, claim)
            if job is None:
                await self._submitted(address, image, deadline)
                continue
            return await self._pipeline.wait(job, claim), job

    def withdraw(self, claim: Claim) -> None:
        """Give up a claim; an image that nobody else wants is dropped before its batch starts."""
        self._pipeline.withdraw(claim)

    def _start(self, image: ImageRef, address: bytes, claim: Claim) -> Job | None:
        """Join the job of `address`, or start one from kept bytes; None when there are none."""
        if (job := self._pipeline.join(address, claim)) is not None:
            return job
        data = self._sources.get(image.digest + image.salt)
        if data is None:
            return None
        header, grid = self._read(image, data)
        return self._pipeline.submit(address, data, header.upright, grid, claim)

    def _read(self, image: ImageRef, data: bytes) -> tuple[Header, Grid]:
        header = read_header(data)
        check_limits(
            header, len(data), max_image_bytes=self._max_image_bytes, max_image_pixels=self._max_image_pixels
        )
        geometry = self._geometry.variant(min_pixels=image.min_pixels, max_pixels=image.max_pixels)
        return header, geometry.grid(*header.upright)

    def _wake(self, address: bytes) -> None:
        for waiter in self._awaited.pop(address, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _submitted(self, address: bytes, image: ImageRef, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._awaited[address].add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            raise UnknownImageError(
                f"image {image.digest.hex()} was not submitted: submit it, then fetch"
            ) from None
        finally:
            waiting = self._awaited.get(address)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._awaited[address]


def _confirmed(grid: Grid, claimed: Grid | None) -> Grid:
    if claimed is not None and claimed != grid:
        raise InvalidRequestError(f"the caller computed grid {tuple(claimed)}, the image has {tuple(grid)}")
    return grid
