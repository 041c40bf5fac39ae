"""Finds the rows of an image: held here, encoded here, or fetched from a peer. What a Fetch awaits."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from encoder_contract.errors import DigestMismatchError, EncoderError, OverloadedError
from encoder_service.address import ImageKey
from encoder_service.cluster.contract import Cluster, Locations
from encoder_service.engine.job_queue import JobQueue
from encoder_service.engine.submit_waiters import SubmitWaiters
from encoder_service.image.source import Source
from encoder_service.image.source_cache import SourceCache
from encoder_service.image.validation import Validator
from encoder_service.scheduler import Claim
from encoder_service.store import Pin, Store

LEASE_WAIT_S = 1.0  # to wait for another replica before looking again: its lease ends by itself if it dies


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Pinned rows, and where they were found; if they were waited for, how long each stage took and when it began."""

    pin: Pin
    source: Literal["device", "host", "peer", "encoded"]
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    stage_began_s: Mapping[str, float] = field(default_factory=dict)


class RowFinder:
    """Waits for rows that are being encoded, starts encoding, or fetches from peers. Belongs to one event loop."""

    def __init__(
        self,
        validator: Validator,
        sources: SourceCache,
        jobs: JobQueue,
        store: Store,
        cluster: Cluster,
        waiters: SubmitWaiters,
        *,
        encodes: bool = True,
    ) -> None:
        """Without a tower, `encodes` is False: rows are held, come from peers, or are put."""
        self._validator = validator
        self._sources = sources
        self._jobs = jobs
        self._store = store
        self._cluster = cluster
        self._waiters = waiters
        self._encodes = encodes

    def known_error(self, error: Exception) -> EncoderError:
        """Return what to tell who awaits rows of an error on their way; a lost device ends everything."""
        return self._jobs.known_error(error)

    async def locate(self, images: Sequence[ImageKey]) -> dict[bytes, Locations]:
        """Return where peers hold those of the images that are not known here; as `Cluster.find`."""
        unknown = [key for key in images if not self._jobs.knows(key)]
        return await self._cluster.find(unknown) if unknown else {}

    async def rows_here(self, key: ImageKey, claim: Claim) -> FetchResult | None:
        """Return the rows of an image if they are held or being encoded here, else None."""
        self._cluster.asked(key)
        if (pin := self._store.pin(key.address)) is not None:
            return FetchResult(pin, pin.tier)
        if (job := self._jobs.join(key, claim)) is None:
            return None
        pin = await self._jobs.wait(job, claim)
        return FetchResult(pin, "encoded", job.stage_ms, job.stage_began_s)

    async def rows(
        self, key: ImageKey, claim: Claim, grace_s: float, located: dict[bytes, Locations]
    ) -> FetchResult:
        """Return the rows of an image, pinned: held here, encoded here, or fetched from a peer.

        `located` is a fresh answer of `locate`. Waits for an encoding that is under way or can be started. For an image
        that nobody has submitted, waits at most `grace_s`, then raises `UnknownImageError`. Cancelling withdraws the
        claim.
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
            elif (
                source := await self._source_of(key, claim, is_elsewhere=elsewhere is not None)
            ) is not None:
                elsewhere = await self._begin(key, source, claim, failed)
            elif self._jobs.knows(key):
                elsewhere = ()  # it came while the cluster was asked
            else:
                elsewhere = await self._waiters.wait(key, claim.holder, deadline)

    async def _begin(self, key: ImageKey, source: Source, claim: Claim, failed: set[str]) -> Locations:
        """Start encoding, or wait for the replica that does, unless it `failed`; return where the image is then."""
        acquired = await self._cluster.acquire([key.address], failed)
        if key.address not in acquired.granted:
            located = acquired.located.get(key.address)
            return located or await self._cluster.wait_published(key.address, LEASE_WAIT_S, failed)
        try:
            begun = self._jobs.submit(key, source, self._validator.grid(key, source), claim)
        except EncoderError:
            if key not in self._jobs:
                self._cluster.release(key.address)
            raise
        if begun is None:
            self._cluster.release(key.address)
        self._waiters.wake(key.address)
        return ()

    def _begun_as_cheaper(self, key: ImageKey, claim: Claim) -> bool:
        """Encode bytes that are here, without a lease, if that should be faster than a transfer; return whether."""
        if (source := self._sources.get(key.source_key)) is None:
            return False
        grid = self._validator.grid(key, source)
        encode_s = self._jobs.encode_s(grid.patches)
        if not 0 < encode_s < self._cluster.transfer_s(self._validator.geometry.tokens(grid)):
            return False
        try:
            self._jobs.submit(key, source, grid, claim)
        except OverloadedError:
            return False  # nothing is faster in a queue that is full
        self._waiters.wake(key.address)
        return True

    async def _source_of(self, key: ImageKey, claim: Claim, *, is_elsewhere: bool) -> Source | None:
        """Return the source of an image if it is here or another replica shared it, and there is a tower for it."""
        if not self._encodes:
            return None
        source = self._sources.get(key.source_key)
        if source is not None or not is_elsewhere:
            return source
        if (data := await self._cluster.find_source(key)) is None:
            return None
        try:
            source = await self._validator.take(key, data, claim.holder)
        except DigestMismatchError:
            return None  # bytes in the index may be anyone's: they must not become this image's embedding
        self._sources.put(source, claim.holder)
        return source
