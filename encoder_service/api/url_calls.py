"""ResolveUrl and RecordUrl: what image URLs hold, shared by the callers of a tenant. No URL is loaded here."""

from collections.abc import Callable

from encoder_contract.digest import DIGEST_BYTES
from encoder_contract.errors import ForbiddenError, InvalidRequestError, ModelMismatchError, UnavailableError
from encoder_contract.v1 import encoder_pb2 as pb
from encoder_service.api.describe import ServerInfo
from encoder_service.api.messages import Context
from encoder_service.engine.url_resolver import CLAIM_BYTES, UrlResolver
from encoder_service.observability.metrics import Metrics

MAX_WAIT_S, MAX_CLAIM_S = 30.0, 60.0
MAX_VALIDATOR_BYTES = 256


class UrlCalls:
    """The two calls. One instance serves all connections, on one event loop."""

    def __init__(
        self, resolver: UrlResolver, info: ServerInfo, metrics: Metrics, is_draining: Callable[[], bool]
    ) -> None:
        self._resolver = resolver
        self._info = info
        self._metrics = metrics
        self._is_draining = is_draining

    async def resolve(self, request: pb.ResolveUrlRequest, context: Context) -> pb.ResolveUrlResponse:
        """Say what a URL holds; see the contract."""
        caller = self._admitted(request.caller, request.url_digest, context)
        found = await self._resolver.resolve(
            request.url_digest,
            caller.tenant_salt,
            self._info.identity.holders(caller, context),
            wait_s=min(request.wait_ms / 1000, MAX_WAIT_S),
            claim_s=min(max(request.claim_ms, 1) / 1000, MAX_CLAIM_S),
            is_over=self._is_draining,
        )
        if found.record is None:
            self._metrics.url("claimed" if found.claim else "unshared")
        else:
            self._metrics.url("fresh" if found.is_fresh else "stale")
        return pb.ResolveUrlResponse(record=found.record, fresh=found.is_fresh, claim=found.claim)

    async def record(self, request: pb.RecordUrlRequest, context: Context) -> pb.RecordUrlResponse:
        """Keep what a URL holds; see the contract."""
        caller = self._admitted(request.caller, request.url_digest, context)
        if len(request.claim) not in (0, CLAIM_BYTES):
            raise InvalidRequestError(f"a claim has {CLAIM_BYTES} bytes, as ResolveUrl gave it")
        record = None
        if request.HasField("record"):
            record = self._checked(request)
        elif request.unshared:
            record = pb.UrlRecord()
        await self._resolver.record(
            request.url_digest,
            caller.tenant_salt,
            record,
            fresh_s=request.fresh_ms / 1000,
            claim=request.claim,
        )
        return pb.RecordUrlResponse()

    def _admitted(self, caller: pb.Caller, url_digest: bytes, context: Context) -> pb.Caller:
        """Return who calls. Raises `EncoderError` for who may not, and for what is no digest."""
        admitted = self._info.identity.admit("submit", caller, context)
        if not self._info.shares_urls:
            raise ForbiddenError(
                "this server shares no URLs: with neither --tenants-file nor --tls-client-ca it cannot tell callers "
                "apart, and its operator has to start it with --share-urls yes"
            )
        if not self._info.encodes:
            raise ModelMismatchError("this server has no tower (--store-only): it takes no images")
        if self._is_draining():
            raise UnavailableError("the server is draining: use another one")
        self._info.check_model(admitted)
        if len(url_digest) != DIGEST_BYTES:
            raise InvalidRequestError(f"a URL's digest has {DIGEST_BYTES} bytes, got {len(url_digest)}")
        return admitted

    def _checked(self, request: pb.RecordUrlRequest) -> pb.UrlRecord:
        """Return the record with the fields that we know, and no others. Raises `InvalidRequestError`."""
        given, limits = request.record, self._info.description.limits
        if len(given.digest) != DIGEST_BYTES or len(given.answered_by) not in (0, DIGEST_BYTES):
            raise InvalidRequestError(f"digests of a record have {DIGEST_BYTES} bytes")
        if request.unshared:
            raise InvalidRequestError("what has a record is not unshared")
        if not 0 < given.size_bytes <= limits.max_image_bytes:
            raise InvalidRequestError(f"an image has 1 to {limits.max_image_bytes} bytes")
        if not 0 < given.width * given.height <= limits.max_image_pixels:
            raise InvalidRequestError(f"an image has 1 to {limits.max_image_pixels} pixels")
        for validator in (given.etag, given.last_modified):
            if len(validator.encode()) > MAX_VALIDATOR_BYTES or not validator.isprintable():
                raise InvalidRequestError(
                    f"etag and last_modified are printable, of {MAX_VALIDATOR_BYTES} bytes at most"
                )
        return pb.UrlRecord(
            digest=given.digest,
            size_bytes=given.size_bytes,
            width=given.width,
            height=given.height,
            etag=given.etag,
            last_modified=given.last_modified,
            answered_by=given.answered_by,
        )
