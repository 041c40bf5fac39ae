"""The operator's calls: look into the store, drop entries. Only for the same user on the same host."""

from hmac import compare_digest
from typing import Any, TypeAlias

import grpc

from encoder_contract.errors import ForbiddenError
from encoder_contract.v1 import admin_pb2 as pb
from encoder_contract.v1.admin_pb2_grpc import AdminServiceServicer
from encoder_service import wire
from encoder_service.pipeline import Pipeline
from encoder_service.sources import Sources
from encoder_service.store import Store

SERVICE = "encoder_contract.v1.AdminService"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminService(AdminServiceServicer):
    """Stats, Evict and Flush over the store of one server."""

    def __init__(self, store: Store, sources: Sources, pipeline: Pipeline) -> None:
        self._store = store
        self._sources = sources
        self._pipeline = pipeline

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:  # noqa: N802
        """Say what the store holds and has done."""
        async with wire.Border(context):
            self._guard(request.proof, context)
            return self._stats()

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:  # noqa: N802
        """Drop one embedding."""
        async with wire.Border(context):
            self._guard(request.proof, context)
            return pb.EvictResponse(evicted=self._store.evict(request.address))

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:  # noqa: N802
        """Drop every embedding that nobody uses, and the sources."""
        async with wire.Border(context):
            self._guard(request.proof, context)
            self._sources.clear()
            return pb.FlushResponse(entries=self._store.flush())

    def _guard(self, proof: bytes, context: Context) -> None:
        if not (wire.is_local(context) and compare_digest(proof, self._store.segment.segment_id)):
            raise ForbiddenError("only the server's own user on its own host may do this")

    def _stats(self) -> pb.StatsResponse:
        stats = self._store.stats()
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
                for entry in stats.largest
            ],
            source_images=len(self._sources),
            source_bytes=self._sources.held_bytes,
            queued_images=self._pipeline.queued_images,
        )
