"""The path of an image from its name to the job queue: what a Submit does. Runs on the event loop; touches no pixels.

A name is answered from what this replica knows, or else by the cluster. If this replica is to encode the image, it asks
for the bytes, checks them and queues the image. The engine goes on from there: decode, ViT, store. A Fetch then gets
its rows from `RowFinder`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from encoder_contract.errors import EncoderError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Acquired, Cluster
from encoder_service.engine.job_queue import JobQueue
from encoder_service.engine.submit_waiters import Keeper, SubmitWaiters
from encoder_service.image.source import Source
from encoder_service.image.source_cache import SourceCache
from encoder_service.image.validation import Validator, confirm
from encoder_service.scheduler import Claim
from encoder_service.store import Store

# If requested bytes have not arrived after this time, the lease is released, so that a caller that stalls delays no
# other replica. If they arrive later, the lease is acquired again.
UPLOAD_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class SubmittedImage:
    """An image of a Submit call, the grid its caller computed, and the call's claim on it."""

    key: ImageKey
    claimed_grid: Grid | None
    claim: Claim


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is known about a named image; `grid` is None if its bytes are needed."""

    grid: Grid | None
    cached: bool = False


class Encoder:
    """Answers the names of images and receives their bytes. Belongs to one event loop."""

    def __init__(
        self,
        validator: Validator,
        sources: SourceCache,
        jobs: JobQueue,
        store: Store,
        cluster: Cluster,
        waiters: SubmitWaiters,
    ) -> None:
        self._validator = validator
        self._sources = sources
        self._jobs = jobs
        self._store = store
        self._cluster = cluster
        self._waiters = waiters

    async def name(self, images: Sequence[SubmittedImage]) -> list[LookupResult | EncoderError]:
        """Answer each submitted name: cached, queued, an error, or (grid None) bytes needed.

        Asks the cluster about everything that is not known here in one step.
        """
        answers = [self._known_here(image) for image in images]
        unknown = [image for image, answer in zip(images, answers, strict=True) if answer is None]
        acquired = await self._cluster.acquire([image.key.address for image in unknown])
        return [answer or self._asked(image, acquired) for image, answer in zip(images, answers, strict=True)]

    async def receive(self, image: SubmittedImage, data: bytes) -> LookupResult:
        """Check the bytes of an image against its name and the limits, and queue it.

        Raises `DigestMismatchError`, `InvalidImageError`, `ImageLimitError` or `OverloadedError`.
        """
        key = image.key
        source = await self._validator.take(key, data, image.claim.holder)
        grid = self._validator.grid(key, source, image.claimed_grid)
        if not self._jobs.knows(key):
            # The lease is usually ours already, but not if another caller gave it up or the bytes took too long.
            acquired = await self._cluster.acquire([key.address])
            if key.address not in acquired.granted:  # a peer holds it or encodes it
                self._sources.put(source, image.claim.holder)
                self._waiters.wake(key.address)
                self._cluster.share_source(key, data)
                return LookupResult(grid, cached=key.address in acquired.located)
        queued = self._queue(image, source, grid)
        self._sources.put(source, image.claim.holder)  # not before: a refused file pushes out no other
        self._cluster.share_source(key, data)
        return LookupResult(grid, cached=not queued)

    def withdraw(self, claim: Claim) -> None:
        """Give up a claim; an image without claims is dropped unless its batch has started."""
        self._jobs.withdraw(claim)

    def keep(self, address: bytes, keeper: Keeper) -> None:
        """Note that `keeper` can send the file of an image again, should a Fetch wait for it."""
        self._waiters.keep(address, keeper)

    def keep_no_more(self, address: bytes, keeper: Keeper) -> None:
        """Undo `keep`."""
        self._waiters.keep_no_more(address, keeper)

    def forget(self, key: ImageKey) -> None:
        """Release the lease of an image whose requested bytes will not come."""
        if key not in self._jobs:
            self._cluster.release(key.address)

    def _known_here(self, image: SubmittedImage) -> LookupResult | EncoderError | None:
        try:
            self._validator.check_name(image.key, image.claimed_grid)
            if (pin := self._store.pin(image.key.address)) is not None:
                with pin:
                    return LookupResult(confirm(Grid(*pin.grid), image.claimed_grid), cached=True)
            if (job := self._jobs.join(image.key, image.claim)) is not None:
                return LookupResult(confirm(job.grid, image.claimed_grid))
        except EncoderError as error:
            return error
        return None

    def _asked(self, image: SubmittedImage, acquired: Acquired) -> LookupResult | EncoderError:
        """Answer a name by what the cluster said: this replica is to encode the image, or peers hold or encode it.

        Bytes that are here already are not asked for again: if that peer dies, a Fetch encodes the image here.
        """
        if image.key.address in acquired.granted:
            return self._granted(image)
        locations = acquired.located.get(image.key.address, ())
        grid = self._validator.agreed((location.grid for location in locations), image.claimed_grid)
        try:
            if grid is None and (source := self._sources.get(image.key.source_key)) is not None:
                grid = self._validator.grid(image.key, source, image.claimed_grid)
        except EncoderError as error:
            return error
        return LookupResult(grid, cached=bool(locations))

    def _granted(self, image: SubmittedImage) -> LookupResult | EncoderError:
        """Answer a name that this replica is to encode, unless it was queued or encoded here meanwhile."""
        if (known := self._known_here(image)) is None:
            return self._begun(image)
        self.forget(image.key)
        return known

    def _begun(self, image: SubmittedImage) -> LookupResult | EncoderError:
        """Queue an image whose bytes are here; otherwise ask for them."""
        try:
            if (source := self._sources.get(image.key.source_key)) is not None:
                grid = self._validator.grid(image.key, source, image.claimed_grid)
                self._queue(image, source, grid)
                return LookupResult(grid)
            if image.claimed_grid is not None:  # a full queue refuses before bytes are sent
                self._jobs.check_room(image.claim.holder, image.claimed_grid.patches)
        except EncoderError as error:
            self._cluster.release(image.key.address)
            return error
        asyncio.get_running_loop().call_later(UPLOAD_WAIT_S, self.forget, image.key)
        return LookupResult(None)

    def _queue(self, image: SubmittedImage, source: Source, grid: Grid) -> bool:
        """Queue an image; return False if its rows are held by now: they came while the cluster was asked."""
        job = self._jobs.submit(image.key, source, grid, image.claim)
        if job is None:
            self._cluster.release(image.key.address)
        self._waiters.wake(image.key.address)
        return job is not None
