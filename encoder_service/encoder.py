"""The path of an image: bytes → address → known? → decode → … → store → rows; on the event loop, no pixels."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from encoder_contract.errors import DigestMismatchError, EncoderError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageRef, Recipe
from encoder_service.cluster.coordinator import Coordinator
from encoder_service.cluster.index import Locations
from encoder_service.engine.failure_cache import FailureCache
from encoder_service.engine.pipeline import Pipeline
from encoder_service.engine.submit_waiters import SubmitWaiters
from encoder_service.image.source import Source
from encoder_service.image.source_cache import SourceCache
from encoder_service.image.validation import Validator, confirm
from encoder_service.scheduler import Claim
from encoder_service.store import Pin, Store

LEASE_WAIT_S = 1.0  # how long to sleep before looking again: a lease ends by itself when its holder dies
# Bytes that were asked for and are not here after so long give the lease back: a caller that stalls stalls nobody
# else. Should they come after all, the lease is asked for again.
UPLOAD_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class SubmittedImage:
    """An image of a Submit call, the grid its caller computed, and the claim that goes with it."""

    image: ImageRef
    claimed_grid: Grid | None
    claim: Claim


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is known of a named image; `grid` is None when its bytes are needed."""

    address: bytes
    grid: Grid | None
    cached: bool = False


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Rows, pinned; where they were found; how long each stage took, and when it began, if they were waited for."""

    pin: Pin
    source: Literal["device", "host", "peer", "encoded"]
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    stage_began_s: Mapping[str, float] = field(default_factory=dict)


class Encoder:
    """Submitted images in, rows out."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        validator: Validator,
        sources: SourceCache,
        pipeline: Pipeline,
        store: Store,
        failures: FailureCache,
        fleet: Coordinator,
        transfer_s: Callable[[int], float],
        max_waiting_images: int,
        on_asked: Callable[[bytes, ImageRef], None] = lambda _address, _image: None,
    ) -> None:
        """`transfer_s` says how long rows of so many tokens take from a peer; `on_asked` hears of every Fetch."""
        self._recipe = recipe
        self._validator = validator
        self._sources = sources
        self._pipeline = pipeline
        self._store = store
        self._failures = failures
        self._fleet = fleet
        self._transfer_s = transfer_s
        self._on_asked = on_asked
        self._submit_waiters = SubmitWaiters(fleet.look_around, lambda: fleet.in_company, max_waiting_images)

    # Submit

    async def name(self, images: Sequence[SubmittedImage]) -> list[LookupResult | EncoderError]:
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
            else:
                answers[number] = self._elsewhere(named, address, acquired.located.get(address, ()))
        return [answer for answer in answers if answer is not None]

    async def receive(self, named: SubmittedImage, data: bytes) -> LookupResult:
        """Take the bytes of an image, check them against their name and the limits, and queue it.

        Raises `DigestMismatchError`, `InvalidImageError`, `ImageLimitError` or `OverloadedError`.
        """
        image = named.image
        source = await self._validator.take(image, data)
        grid = self._validator.grid(image, source, named.claimed_grid)
        self._sources.put(source)
        known = await self._take_on(self._recipe.address(image), source, grid, named.claim)
        self._fleet.share_source(image, data)
        return known

    def withdraw(self, claim: Claim) -> None:
        """Give up a claim; an image that nobody else wants is dropped before its batch starts."""
        self._pipeline.withdraw(claim)

    def forget(self, image: ImageRef) -> None:
        """Say that bytes that were asked for will not come."""
        if not self._pipeline.has(address := self._recipe.address(image)):
            self._fleet.gave_up(address)

    # Fetch

    async def locate(self, images: Sequence[ImageRef]) -> dict[bytes, Locations]:
        """Return where peers hold those of the images that are not known here; nowhere where they only have bytes."""
        keys = {self._recipe.address(image): image.source_key for image in images}
        unknown = {a: k for a, k in keys.items() if not (self._store.contains(a) or self._pipeline.has(a))}
        return await self._fleet.look_around(unknown) if unknown else {}

    async def rows(
        self, image: ImageRef, claim: Claim, grace_s: float, located: dict[bytes, Locations]
    ) -> FetchResult:
        """Return the rows of `image`, pinned: held here, encoded here, or brought over from a peer.

        `located` is what `locate` just said. Waits for an encoding that is under way or can be started; for an image
        that nobody has submitted, at most `grace_s`, then `UnknownImageError`. Cancelling withdraws the claim.
        """
        address = self._recipe.address(image)
        deadline = asyncio.get_running_loop().time() + grace_s
        elsewhere = located.get(address)
        failed: set[str] = set()
        while True:
            if (found := await self.rows_here(image, claim)) is not None:
                return found
            live = tuple(location for location in elsewhere or () if location.replica_id not in failed)
            if live and self._begun_as_cheaper(image, address, claim):
                continue
            if live:
                keeper = await self._fleet.fetch_from_peer(image, address, live)
                if keeper is not None and (pin := self._store.pin(address)) is not None:
                    return FetchResult(pin, "peer")
                failed.update(location.replica_id for location in live)
                elsewhere = (await self._fleet.look_around({address: image.source_key})).get(address)
            elif (source := await self._source_of(image, is_elsewhere=elsewhere is not None)) is None:
                elsewhere = await self._submitted(address, image, claim, deadline)
            else:
                elsewhere = await self._begin(image, address, source, claim, failed)

    async def rows_here(self, image: ImageRef, claim: Claim) -> FetchResult | None:
        """Return the rows of `image` if they are held here or being made here; None when they are not."""
        address = self._recipe.address(image)
        self._on_asked(address, image)
        if (pin := self._store.pin(address)) is not None:
            return FetchResult(pin, pin.tier)
        self._failures.check(image.source_key)
        if (job := self._pipeline.join(address, claim)) is None:
            return None
        pin = await self._pipeline.wait(job, claim)
        return FetchResult(pin, "encoded", job.stage_ms, job.stage_began_s)

    # Inside

    def _known_here(self, named: SubmittedImage, address: bytes) -> LookupResult | EncoderError | None:
        try:
            self._validator.check_name(named.image, named.claimed_grid)
            self._failures.check(named.image.source_key)
            if (pin := self._store.pin(address)) is not None:
                with pin:
                    return LookupResult(address, confirm(Grid(*pin.grid), named.claimed_grid), cached=True)
            if (job := self._pipeline.join(address, named.claim)) is not None:
                return LookupResult(address, confirm(job.grid, named.claimed_grid))
        except EncoderError as error:
            return error
        return None

    def _elsewhere(
        self, named: SubmittedImage, address: bytes, locations: Locations
    ) -> LookupResult | EncoderError:
        """Answer a name that peers hold, or are at; with the bytes here, we go on where that ends should it die."""
        grid = self._validator.agreed((location.grid for location in locations), named.claimed_grid)
        try:
            if grid is None and (source := self._sources.get(named.image.source_key)) is not None:
                grid = self._validator.grid(named.image, source, named.claimed_grid)
        except EncoderError as error:
            return error
        return LookupResult(address, grid, cached=bool(locations))

    def _granted(self, named: SubmittedImage, address: bytes) -> LookupResult | EncoderError:
        """Answer a name that is ours to encode, unless it was begun or ended here while the index was asked."""
        if (known := self._known_here(named, address)) is None:
            return self._begun_from_source(named, address)
        self.forget(named.image)
        return known

    def _begun_from_source(self, named: SubmittedImage, address: bytes) -> LookupResult | EncoderError:
        source = self._sources.get(named.image.source_key)
        try:
            if source is None:
                if named.claimed_grid is not None:  # a full queue says no before bytes travel
                    self._pipeline.check_room(named.claim.client_id, named.claimed_grid.patches)
                asyncio.get_running_loop().call_later(UPLOAD_WAIT_S, self.forget, named.image)
                return LookupResult(address, None)
            grid = self._validator.grid(named.image, source, named.claimed_grid)
            self._submit(address, source, grid, named.claim)
        except EncoderError as error:
            self._fleet.gave_up(address)
            return error
        return LookupResult(address, grid)

    async def _take_on(self, address: bytes, source: Source, grid: Grid, claim: Claim) -> LookupResult:
        """Queue an image whose bytes have come, unless it is held by now or a peer is at it."""
        if not self._pipeline.has(address) and not self._store.contains(address):
            # Mostly ours already; it is not when another caller gave it up, or the bytes took too long.
            acquired = await self._fleet.acquire([address])
            if address not in acquired.granted:
                self._submit_waiters.wake(address)
                return LookupResult(address, grid, cached=address in acquired.located)
        return LookupResult(address, grid, cached=not self._submit(address, source, grid, claim))

    async def _begin(
        self, image: ImageRef, address: bytes, source: Source, claim: Claim, failed: set[str]
    ) -> Locations:
        """Start encoding, or wait for who is at it, but not for replicas that `failed`; return where it is then."""
        acquired = await self._fleet.acquire([address], failed)
        if address in acquired.granted:
            try:
                self._submit(address, source, self._validator.grid(image, source), claim)
            except EncoderError:
                self.forget(image)
                raise
            return ()
        return acquired.located.get(address) or await self._fleet.wait_elsewhere(address, LEASE_WAIT_S)

    def _submit(self, address: bytes, source: Source, grid: Grid, claim: Claim) -> bool:
        """Queue an image; False when it is held by now: it came to be so while the index was asked."""
        if held := self._store.contains(address):
            self._fleet.gave_up(address)
        else:
            self._pipeline.submit(address, source, grid, claim)
        self._submit_waiters.wake(address)
        return not held

    async def _source_of(self, image: ImageRef, *, is_elsewhere: bool) -> Source | None:
        """Return the source of `image` if it is here, or another replica shared it."""
        source = self._sources.get(image.source_key)
        if source is not None or not is_elsewhere:
            return source
        if (data := await self._fleet.find_source(image)) is None:
            return None
        try:
            source = await self._validator.take(image, data)
        except DigestMismatchError:
            return None  # whoever wrote them to the index does not thereby choose our embedding
        self._sources.put(source)
        return source

    def _begun_as_cheaper(self, image: ImageRef, address: bytes, claim: Claim) -> bool:
        """Encode bytes at hand, without a lease, where that should take less time than rows from a peer."""
        if (source := self._sources.get(image.source_key)) is None:
            return False
        grid = self._validator.grid(image, source)
        encode_s = self._pipeline.encode_s(grid.patches)
        if not 0 < encode_s < self._transfer_s(self._validator.geometry.tokens(grid)):
            return False
        self._submit(address, source, grid, claim)
        return True

    async def _submitted(self, address: bytes, image: ImageRef, claim: Claim, deadline: float) -> Locations:
        """Wait until `image` turns up, here or elsewhere: then where; `UnknownImageError` at the deadline."""
        if self._store.contains(address) or self._pipeline.has(address):
            return ()  # it came while the index was asked
        with suppress(TimeoutError):
            if asyncio.get_running_loop().time() < deadline:
                return await self._submit_waiters.wait(address, image.source_key, claim.client_id, deadline)
        raise UnknownImageError(f"image {image.digest.hex()} was not submitted: submit it, then fetch")
