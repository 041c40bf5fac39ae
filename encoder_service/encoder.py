"""The path of an image, on one screen: bytes → address → known? → decode → … → store → rows.

Runs on the event loop and touches no pixels: what takes time happens in the pipeline's threads.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from encoder_contract.digest import content_digest
from encoder_contract.errors import DigestMismatchError, EncoderError, InvalidRequestError, UnknownImageError
from encoder_contract.geometry import Geometry, Grid
from encoder_contract.header import Header, check_limits, read_header
from encoder_service.address import ImageRef, Recipe
from encoder_service.desk import Job
from encoder_service.fleet import Fleet
from encoder_service.index import Locations
from encoder_service.metrics import Metrics
from encoder_service.pipeline import Pipeline
from encoder_service.refusals import Refusals
from encoder_service.scheduler import Claim
from encoder_service.sources import Sources
from encoder_service.store import Pin, Store

# Hashing this much takes about 40 µs; more goes to a worker thread, so that the loop's lag stays small.
HASH_ON_LOOP_BYTES = 256 << 10

# How often a Fetch looks whether an image that nobody has submitted here has turned up elsewhere.
LOOK_AROUND_S = 0.25

# A lease ends by itself when its holder dies; this is only how long to sleep before looking again.
LEASE_WAIT_S = 1.0

# Bytes that were asked for and are not here after so long give the lease back: a caller that stalls stalls nobody
# else. Should they come after all, the lease is asked for again.
UPLOAD_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Named:
    """An image of a Submit call, the grid its caller computed, and the claim that goes with it."""

    image: ImageRef
    claimed_grid: Grid | None
    claim: Claim


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a named image; `grid` is None when its bytes are needed."""

    address: bytes
    grid: Grid | None
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Rows, pinned; where they were found, and the job that made them if they had to be waited for."""

    pin: Pin
    source: Literal["device", "host", "peer", "encoded"]
    job: Job | None = None


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
        fleet: Fleet,
        transfer_s: Callable[[int], float],
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
        self._fleet = fleet
        self._transfer_s = transfer_s
        self._metrics = metrics
        self._awaited: defaultdict[bytes, set[asyncio.Future[None]]] = defaultdict(set)

    # Submit

    async def name(self, images: Sequence[Named]) -> list[Known | EncoderError]:
        """Answer submitted names: cached, queued now, refused, or (grid None) the bytes are needed.

        Asks the index about all that is not known here in one step.
        """
        addresses = [self._recipe.address(named.image) for named in images]
        answers = [self._known_here(named, address) for named, address in zip(images, addresses, strict=True)]
        unknown = [number for number, answer in enumerate(answers) if answer is None]
        acquired = await self._fleet.acquire([addresses[number] for number in unknown])
        for number in unknown:
            named, address = images[number], addresses[number]
            if address in acquired.granted:
                answers[number] = self._granted(named, address)
            elif address in acquired.located:  # its grid is what the caller computed
                answers[number] = Known(address, named.claimed_grid, cached=True)
            else:  # a peer is at it; with the bytes here, we go on where it ends should it die
                answers[number] = Known(address, named.claimed_grid if self._has_bytes(named.image) else None)
        return [answer for answer in answers if answer is not None]

    async def receive(self, named: Named, data: bytes) -> Known:
        """Take the bytes of an image, check them against their name and the limits, and queue it.

        Raises `DigestMismatchError`, `InvalidImageError`, `ImageLimitError` or `OverloadedError`.
        """
        image = named.image
        await self._check_digest(image, data)
        address = self._recipe.address(image)
        header, grid = self._read(image, data)
        _confirm(grid, named.claimed_grid)
        self._sources.put(image.source_key, data)
        known = await self._take_on(address, data, header, grid, named.claim)
        await self._fleet.share_source(image, data)
        return known

    def withdraw(self, claim: Claim) -> None:
        """Give up a claim; an image that nobody else wants is dropped before its batch starts."""
        self._pipeline.withdraw(claim)

    def forget(self, image: ImageRef) -> None:
        """Say that bytes that were asked for will not come."""
        address = self._recipe.address(image)
        if not self._pipeline.has(address):
            self._fleet.gave_up(address)

    # Fetch

    async def locate(self, images: Sequence[ImageRef]) -> dict[bytes, Locations]:
        """Return where peers hold those of the images that are not known here, in one step."""
        addresses = [self._recipe.address(image) for image in images]
        unknown = [a for a in addresses if not self._store.contains(a) and not self._pipeline.has(a)]
        return await self._fleet.locate(unknown) if unknown and self._fleet.joined else {}

    async def rows(
        self, image: ImageRef, claim: Claim, grace_s: float, located: dict[bytes, Locations]
    ) -> Found:
        """Return the rows of `image`, pinned: held here, encoded here, or brought over from a peer.

        `located` is what `locate` just said. Waits for an encoding that is under way or can be started; for an image
        that nobody has submitted, at most `grace_s`, then `UnknownImageError`. Cancelling withdraws the claim.
        """
        address = self._recipe.address(image)
        deadline = asyncio.get_running_loop().time() + grace_s
        locations = located.get(address, ())
        failed: set[str] = set()
        while True:
            if (found := await self.rows_here(image, claim)) is not None:
                return found
            live = tuple(location for location in locations if location.replica_id not in failed)
            if live and self._begun_as_cheaper(image, address, claim):
                continue
            if live:
                keeper = await self._fleet.bring(image, address, live)
                if keeper is not None and (pin := self._store.pin(address)) is not None:
                    return Found(await _on_host(pin), "peer")
                failed.update(location.replica_id for location in live)
            elif await self._begin(image, address, claim, deadline, failed):
                continue
            locations = (await self._fleet.locate([address])).get(address, ())

    async def rows_here(self, image: ImageRef, claim: Claim) -> Found | None:
        """Return the rows of `image` if they are held here or being made here; None when they are not."""
        address = self._recipe.address(image)
        if (pin := self._store.pin(address)) is not None:
            tier = pin.tier
            return Found(await _on_host(pin), tier)
        self._refusals.check(address)
        if (job := self._pipeline.join(address, claim)) is None:
            return None
        return Found(await _on_host(await self._pipeline.wait(job, claim)), "encoded", job)

    # Inside

    def _known_here(self, named: Named, address: bytes) -> Known | EncoderError | None:
        try:
            self._refusals.check(address)
            if (pin := self._store.pin(address)) is not None:
                with pin:
                    return Known(address, _confirm(Grid(*pin.grid), named.claimed_grid), cached=True)
            if (job := self._pipeline.join(address, named.claim)) is not None:
                return Known(address, _confirm(job.grid, named.claimed_grid))
        except EncoderError as error:
            return error
        return None

    def _granted(self, named: Named, address: bytes) -> Known | EncoderError:
        """Answer a name that is ours to encode, unless it was begun or ended here while the index was asked."""
        known = self._known_here(named, address)
        if known is not None:
            self.forget(named.image)
            return known
        return self._begun_from_source(named, address)

    def _begun_from_source(self, named: Named, address: bytes) -> Known | EncoderError:
        data = self._sources.get(named.image.source_key)
        if data is None:
            asyncio.get_running_loop().call_later(UPLOAD_WAIT_S, self.forget, named.image)
            return Known(address, None)
        try:
            header, grid = self._read(named.image, data)
            _confirm(grid, named.claimed_grid)
            self._submit(address, data, header, grid, named.claim)
        except EncoderError as error:
            self._fleet.gave_up(address)
            return error
        return Known(address, grid)

    async def _take_on(self, address: bytes, data: bytes, header: Header, grid: Grid, claim: Claim) -> Known:
        """Queue an image whose bytes have come, unless it is held by now or a peer is at it."""
        if not self._pipeline.has(address) and not self._store.contains(address):
            # Mostly ours already; it is not when another caller gave it up, or the bytes took too long.
            acquired = await self._fleet.acquire([address])
            if address not in acquired.granted:
                self._wake(address)
                return Known(address, grid, cached=address in acquired.located)
        return Known(address, grid, cached=not self._submit(address, data, header, grid, claim))

    async def _begin(
        self, image: ImageRef, address: bytes, claim: Claim, deadline: float, failed: set[str]
    ) -> bool:
        """Start encoding `image` from bytes held anywhere; False after a wait, when it is worth looking around.

        The replicas in `failed` do not count as holding it.
        """
        data = self._sources.get(image.source_key) or await self._source_elsewhere(image)
        if data is None:
            await self._submitted(address, image, deadline)
            return False
        acquired = await self._fleet.acquire([address], failed)
        if address in acquired.granted:
            try:
                header, grid = self._read(image, data)
                self._submit(address, data, header, grid, claim)
            except EncoderError:
                self.forget(image)
                raise
            return True
        if address not in acquired.located:
            await self._fleet.wait_elsewhere(address, LEASE_WAIT_S)
        return False

    def _submit(self, address: bytes, data: bytes, header: Header, grid: Grid, claim: Claim) -> bool:
        """Queue an image; False when it is held by now: it came to be so while the index was asked."""
        if held := self._store.contains(address):
            self._fleet.gave_up(address)
        else:
            self._pipeline.submit(address, data, header.upright, grid, claim)
        self._wake(address)
        return not held

    async def _source_elsewhere(self, image: ImageRef) -> bytes | None:
        data = await self._fleet.find_source(image)
        if data is None:
            return None
        try:
            await self._check_digest(image, data)
        except DigestMismatchError:
            return None  # whoever can write to the index cannot thereby choose our embeddings
        self._sources.put(image.source_key, data)
        return data

    def _has_bytes(self, image: ImageRef) -> bool:
        return self._sources.get(image.source_key) is not None

    def _begun_as_cheaper(self, image: ImageRef, address: bytes, claim: Claim) -> bool:
        """Encode bytes at hand, without a lease, where that should take less time than rows from a peer."""
        data = self._sources.get(image.source_key)
        if data is None:
            return False
        header, grid = self._read(image, data)
        encode_s = self._pipeline.encode_s(grid.patches)
        if not 0 < encode_s < self._transfer_s(self._geometry.tokens(grid)):
            return False
        self._submit(address, data, header, grid, claim)
        return True

    async def _check_digest(self, image: ImageRef, data: bytes) -> None:
        began = monotonic()
        digest = (
            content_digest(data)
            if len(data) <= HASH_ON_LOOP_BYTES
            else await asyncio.to_thread(content_digest, data)
        )
        self._metrics.stage("hash", monotonic() - began)
        if digest != image.digest:
            raise DigestMismatchError(f"the bytes hash to {digest.hex()}, not to {image.digest.hex()}")

    def _read(self, image: ImageRef, data: bytes) -> tuple[Header, Grid]:
        header = read_header(data)
        check_limits(
            header,
            len(data),
            max_image_bytes=self._max_image_bytes,
            max_image_pixels=self._max_image_pixels,
        )
        geometry = self._geometry.variant(min_pixels=image.min_pixels, max_pixels=image.max_pixels)
        return header, geometry.grid(*header.upright)

    def _wake(self, address: bytes) -> None:
        for waiter in self._awaited.pop(address, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _submitted(self, address: bytes, image: ImageRef, deadline: float) -> None:
        """Wait until `image` is submitted here, or it is time to look around; `UnknownImageError` at the deadline."""
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline:
            raise UnknownImageError(f"image {image.digest.hex()} was not submitted: submit it, then fetch")
        waiter = loop.create_future()
        self._awaited[address].add(waiter)
        until = min(deadline, loop.time() + LOOK_AROUND_S) if self._fleet.joined else deadline
        try:
            async with asyncio.timeout_at(until):
                await waiter
        except TimeoutError:
            return
        finally:
            waiting = self._awaited.get(address)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._awaited[address]


async def _on_host(pin: Pin) -> Pin:
    """Return `pin`, its rows in the host tier."""
    if pin.tier != "host":
        await asyncio.to_thread(pin.to_host)
    return pin


def _confirm(grid: Grid, claimed: Grid | None) -> Grid:
    if claimed is not None and claimed != grid:
        raise InvalidRequestError(f"the caller computed grid {tuple(claimed)}, the image has {tuple(grid)}")
    return grid
