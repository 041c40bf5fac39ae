"""Admin calls: inspect the store and drop entries. Only for the server's user on the server's host."""

from functools import partial
from hmac import compare_digest

from encoder_contract.errors import ForbiddenError
from encoder_contract.v1 import admin_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.caller import Identity
from encoder_service.api.inbound import CallGate, Methods
from encoder_service.devices.job_queue import JobQueue
from encoder_service.image.sources import SourceCache
from encoder_service.limits import Caller
from encoder_service.metrics import Metrics
from encoder_service.store import Store

SERVICE = "encoder_contract.v1.AdminService"


class AdminService:
    """Stats, Evict and Flush over the store of one server."""

    def __init__(
        self,
        store: Store,
        sources: SourceCache,
        videos: SourceCache,
        jobs: JobQueue,
        identity: Identity,
        metrics: Metrics,
    ) -> None:
        self._identity = identity
        self._metrics = metrics
        self._store = store
        self._sources = sources
        self._videos = videos
        self._jobs = jobs

    def identify(self, caller: Caller) -> None:
        """Raise `UnauthenticatedError` or `ForbiddenError` unless the caller has the right `operate`."""
        self._identity.require("operate", caller)

    async def stats(self, request: pb.StatsRequest, caller: Caller) -> pb.StatsResponse:
        """Return the store's statistics."""
        self._guard(request.proof, caller)
        return self._stats()

    async def evict(self, request: pb.EvictRequest, caller: Caller) -> pb.EvictResponse:
        """Drop one embedding."""
        self._guard(request.proof, caller)
        return pb.EvictResponse(evicted=self._store.evict(request.address))

    async def flush(self, request: pb.FlushRequest, caller: Caller) -> pb.FlushResponse:
        """Drop every embedding that is not pinned, and all image and video files."""
        self._guard(request.proof, caller)
        self._sources.clear()
        self._videos.clear()
        return pb.FlushResponse(entries=self._store.flush())

    def _guard(self, proof: bytes, caller: Caller) -> None:
        if not (caller.is_local and compare_digest(proof, self._store.segment.segment_id)):
            raise ForbiddenError(
                "operator calls are allowed only on the server's host, as the server's user: run the command there"
            )

    def _stats(self) -> pb.StatsResponse:
        stats = self._store.stats()
        stored, encoded = self._metrics.fetches()
        return pb.StatsResponse(
            tiers=[
                pb.TierStats(
                    name=tier.name,
                    size_bytes=tier.size_bytes,
                    used_bytes=tier.used_bytes,
                    pinned_bytes=tier.pinned_bytes,
                    entries=tier.entries,
                    hits=tier.hits,
                    evictions=tier.evictions,
                )
                for tier in stats.tiers
            ],
            misses=stats.misses,
            pins=stats.pins,
            largest=[
                pb.EntryStats(
                    address=entry.address,
                    tier=entry.tier,
                    bytes=entry.row_bytes,
                    tokens=entry.tokens,
                    pins=entry.pins,
                    hits=entry.hits,
                )
                for entry in self._store.largest()
            ],
            source_images=len(self._sources),
            source_bytes=self._sources.held_bytes,
            queued_images=len(self._jobs),
            fetched_stored=stored,
            fetched_encoded=encoded,
        )


def methods(operator: AdminService, gate: CallGate) -> Methods:
    identify = operator.identify
    return {
        "Stats": gate.unary(operator.stats, partial(messages.parse, pb.StatsRequest), identify),
        "Evict": gate.unary(operator.evict, partial(messages.parse, pb.EvictRequest), identify),
        "Flush": gate.unary(operator.flush, partial(messages.parse, pb.FlushRequest), identify),
    }
