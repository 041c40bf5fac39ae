"""The path of an image: bytes → address → known? → decode → … → store → rows; on the event loop, no pixels."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from encoder_contract.errors import DigestMismatchError, EncoderError, UnknownImageError
from encoder_contract.geometry import Grid
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Cluster, Locations
from encoder_service.engine.job_queue import JobQueue
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

    key: ImageKey
    claimed_grid: Grid | None
    claim: Claim


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is known of a named image; `grid` is None when its bytes are needed."""

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
        validator: Validator,
        sources: SourceCache,
        jobs: JobQueue,
        store: Store,
        cluster: Cluster,
        max_waiting_images: int,
    ) -> None:
        self._validator = validator
        self._sources = sources
        self._jobs = jobs
        self._store = store
        self._cluster = cluster
        self._submit_waiters = SubmitWaiters(cluster, max_waiting_images)

    # Submit

    async def name(self, images: Sequence[SubmittedImage]) -> list[LookupResult | EncoderError]:
        """Answer submitted names: cached, queued now, refused, or (grid None) the bytes are needed.

        Asks the index about all that is not known here in one step.
        """
        answers = [self._known_here(named) for named in images]
        unknown = [number for number, answer in enumerate(answers) if answer is None]
        acquired = await self._cluster.acquire([images[number].key.address for number in unknown])
        for number in unknown:
            named, address = images[number], images[number].key.address
            if address in acquired.granted:
                answers[number] = self._granted(named)
            else:
                answers[number] = self._elsewhere(named, acquired.located.get(address, ()))
        return [answer for answer in answers if answer is not None]

    async def receive(self, named: SubmittedImage, data: bytes) -> LookupResult:
        """Take the bytes of an image, check them against their name and the limits, and queue it.

        Raises `DigestMismatchError`, `InvalidImageError`, `ImageLimitError` or `OverloadedError`.
        """
        key = named.key
        source = await self._validator.take(key, data)
        grid = self._validator.grid(key, source, named.claimed_grid)
        self._sources.put(source)
        known = await self._take_on(key, source, grid, named.claim)
        self._cluster.share_source(key, data)
        return known

    def withdraw(self, claim: Claim) -> None:
        """Give up a claim; an image that nobody else wants is dropped before its batch starts."""
        self._jobs.withdraw(claim)

    def forget(self, key: ImageKey) -> None:
        """Say that bytes that were asked for will not come."""
        if key not in self._jobs:
            self._cluster.release(key.address)

    # Fetch

    async def locate(self, images: Sequence[ImageKey]) -> dict[bytes, Locations]:
        """Return where peers hold those of the images that are not known here; nowhere where they only have bytes."""
        unknown = [key for key in images if not (self._store.contains(key.address) or key in self._jobs)]
        return await self._cluster.find(unknown) if unknown else {}

    async def rows(
        self, key: ImageKey, claim: Claim, grace_s: float, located: dict[bytes, Locations]
    ) -> FetchResult:
        """Return the rows of an image, pinned: held here, encoded here, or brought over from a peer.

        `located` is what `locate` just said. Waits for an encoding that is under way or can be started; for an image
        that nobody has submitted, at most `grace_s`, then `UnknownImageError`. Cancelling withdraws the claim.
        """
        deadline = asyncio.get_running_loop().time() + grace_s
        elsewhere = located.get(key.address)
        failed: set[str] = set()
        while True:
            if (found := await self.rows_here(key, claim)) is not None:
                return found
            live = tuple(location for location in elsewhere or () if location.replica_id not in failed)
            if live and self._begun_as_cheaper(key, claim):
                continue
            if live:
                keeper = await self._cluster.fetch_from_peer(key, live)
                if keeper is not None and (pin := self._store.pin(key.address)) is not None:
                    return FetchResult(pin, "peer")
                failed.update(location.replica_id for location in live)
                elsewhere = (await self._cluster.find([key])).get(key.address)
            elif (source := await self._source_of(key, is_elsewhere=elsewhere is not None)) is None:
                elsewhere = await self._submitted(key, claim, deadline)
            else:
                elsewhere = await self._begin(key, source, claim, failed)

    async def rows_here(self, key: ImageKey, claim: Claim) -> FetchResult | None:
        """Return the rows of an image if they are held here or being made here; None when they are not."""
        self._cluster.asked(key)
        if (pin := self._store.pin(key.address)) is not None:
            return FetchResult(pin, pin.tier)
        if (job := self._jobs.join(key, claim)) is None:
            return None
        pin = await self._jobs.wait(job, claim)
        return FetchResult(pin, "encoded", job.stage_ms, job.stage_began_s)

    # Inside

    def _known_here(self, named: SubmittedImage) -> LookupResult | EncoderError | None:
        try:
            self._validator.check_name(named.key, named.claimed_grid)
            if (pin := self._store.pin(named.key.address)) is not None:
                with pin:
                    return LookupResult(confirm(Grid(*pin.grid), named.claimed_grid), cached=True)
            if (job := self._jobs.join(named.key, named.claim)) is not None:
                return LookupResult(confirm(job.grid, named.claimed_grid))
        except EncoderError as error:
            return error
        return None

    def _elsewhere(self, named: SubmittedImage, locations: Locations) -> LookupResult | EncoderError:
        """Answer a name that peers hold, or are at; with the bytes here, we go on where that ends should it die."""
        grid = self._validator.agreed((location.grid for location in locations), named.claimed_grid)
        try:
            if grid is None and (source := self._sources.get(named.key.source_key)) is not None:
                grid = self._validator.grid(named.key, source, named.claimed_grid)
        except EncoderError as error:
            return error
        return LookupResult(grid, cached=bool(locations))

    def _granted(self, named: SubmittedImage) -> LookupResult | EncoderError:
        """Answer a name that is ours to encode, unless it was begun or ended here while the index was asked."""
        if (known := self._known_here(named)) is None:
            return self._begun_from_source(named)
        self.forget(named.key)
        return known

    def _begun_from_source(self, named: SubmittedImage) -> LookupResult | EncoderError:
        source = self._sources.get(named.key.source_key)
        try:
            if source is None:
                if named.claimed_grid is not None:  # a full queue says no before bytes travel
                    self._jobs.check_room(named.claim.client_id, named.claimed_grid.patches)
                asyncio.get_running_loop().call_later(UPLOAD_WAIT_S, self.forget, named.key)
                return LookupResult(None)
            grid = self._validator.grid(named.key, source, named.claimed_grid)
            self._submit(named.key, source, grid, named.claim)
        except EncoderError as error:
            self._cluster.release(named.key.address)
            return error
        return LookupResult(grid)

    async def _take_on(self, key: ImageKey, source: Source, grid: Grid, claim: Claim) -> LookupResult:
        """Queue an image whose bytes have come, unless it is held by now or a peer is at it."""
        address = key.address
        if key not in self._jobs and not self._store.contains(address):
            # Mostly ours already; it is not when another caller gave it up, or the bytes took too long.
            acquired = await self._cluster.acquire([address])
            if address not in acquired.granted:
                self._submit_waiters.wake(address)
                return LookupResult(grid, cached=address in acquired.located)
        return LookupResult(grid, cached=not self._submit(key, source, grid, claim))

    async def _begin(self, key: ImageKey, source: Source, claim: Claim, failed: set[str]) -> Locations:
        """Start encoding, or wait for who is at it, but not for replicas that `failed`; return where it is then."""
        acquired = await self._cluster.acquire([key.address], failed)
        if key.address in acquired.granted:
            try:
                self._submit(key, source, self._validator.grid(key, source), claim)
            except EncoderError:
                self.forget(key)
                raise
            return ()
        return acquired.located.get(key.address) or await self._cluster.wait_published(
            key.address, LEASE_WAIT_S
        )

    def _submit(self, key: ImageKey, source: Source, grid: Grid, claim: Claim) -> bool:
        """Queue an image; False when it is held by now: it came to be so while the index was asked."""
        if held := self._store.contains(key.address):
            self._cluster.release(key.address)
        else:
            self._jobs.submit(key, source, grid, claim)
        self._submit_waiters.wake(key.address)
        return not held

    async def _source_of(self, key: ImageKey, *, is_elsewhere: bool) -> Source | None:
        """Return the source of an image if it is here, or another replica shared it."""
        source = self._sources.get(key.source_key)
        if source is not None or not is_elsewhere:
            return source
        if (data := await self._cluster.find_source(key)) is None:
            return None
        try:
            source = await self._validator.take(key, data)
        except DigestMismatchError:
            return None  # whoever wrote them to the index does not thereby choose our embedding
        self._sources.put(source)
        return source

    def _begun_as_cheaper(self, key: ImageKey, claim: Claim) -> bool:
        """Encode bytes at hand, without a lease, where that should take less time than rows from a peer."""
        if (source := self._sources.get(key.source_key)) is None:
            return False
        grid = self._validator.grid(key, source)
        encode_s = self._jobs.encode_s(grid.patches)
        if not 0 < encode_s < self._cluster.transfer_s(self._validator.geometry.tokens(grid)):
            return False
        self._submit(key, source, grid, claim)
        return True

    async def _submitted(self, key: ImageKey, claim: Claim, deadline: float) -> Locations:
        """Wait until an image turns up, here or elsewhere: then where; `UnknownImageError` at the deadline."""
        if self._store.contains(key.address) or key in self._jobs:
            return ()  # it came while the index was asked
        with suppress(TimeoutError):
            if asyncio.get_running_loop().time() < deadline:
                return await self._submit_waiters.wait(key, claim.client_id, deadline)
        raise UnknownImageError(f"image {key.digest.hex()} was not submitted: submit it, then fetch")
