"""Admin calls: drop entries of the store, load other weights. Only for the server's user on the server's host."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest

from encoder_contract.errors import ForbiddenError
from encoder_contract.v1 import admin_pb2 as pb
from encoder_service.api import messages
from encoder_service.api.caller import Identity
from encoder_service.api.inbound import CallGate, Inbound, Methods
from encoder_service.image.sources import SourceCache
from encoder_service.limits import Caller
from encoder_service.store import Store

SERVICE = "encoder_contract.v1.AdminService"


@dataclass(frozen=True, slots=True)
class Step:
    """What a reload does now, for people; the last one has the fingerprint of the model that is served."""

    text: str
    model: bytes = b""


class AdminService:
    """Evict and Flush over the store of one server, and Reload of its weights."""

    def __init__(
        self,
        store: Store,
        sources: SourceCache,
        videos: SourceCache,
        reload: Callable[[str], AsyncGenerator[Step]],
        identity: Identity,
    ) -> None:
        """`reload` has the server serve another folder."""
        self._identity = identity
        self._store = store
        self._sources = sources
        self._videos = videos
        self._reload = reload

    def identify(self, caller: Caller) -> None:
        """Raise `UnauthenticatedError` or `ForbiddenError` unless the caller has the right `operate`."""
        self._identity.require("operate", caller)

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

    async def reload(
        self, request: pb.ReloadRequest, call: Inbound[pb.ReloadRequest]
    ) -> AsyncGenerator[pb.ReloadResponse]:
        """Serve another checkpoint; answer with each step, and last with the fingerprint of the model."""
        self._guard(request.proof, call.caller)
        async with aclosing(self._reload(request.folder)) as steps:
            async for step in steps:
                yield pb.ReloadResponse(step=step.text, model_fingerprint=step.model)

    def _guard(self, proof: bytes, caller: Caller) -> None:
        if not (caller.is_local and compare_digest(proof, self._store.segment.segment_id)):
            raise ForbiddenError(
                "operator calls are allowed only on the server's host, as the server's user: run the command there"
            )


def methods(operator: AdminService, gate: CallGate) -> Methods:
    identify = operator.identify
    return {
        "Evict": gate.unary(operator.evict, partial(messages.parse, pb.EvictRequest), identify),
        "Flush": gate.unary(operator.flush, partial(messages.parse, pb.FlushRequest), identify),
        "Reload": gate.one_request(operator.reload, partial(messages.parse, pb.ReloadRequest), identify),
    }
