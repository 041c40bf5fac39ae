"""The HTTP routes of the gateway: the calls that SGLang makes to an encoder."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    ImageLimitError,
    InvalidRequestError,
    Status,
)
from encoder_contract.turns import Room
from prefill_client.http_server import DisconnectedError, cancel_on_disconnect
from prefill_client.sglang_gateway.gateway import Gateway
from prefill_client.sglang_gateway.metrics import GatewayMetrics
from prefill_client.sglang_gateway.parts import MAX_RANKS, Address, Part, read_object, req_id_of

log = logging.getLogger(__name__)

ENCODE, RECEIVER, HEALTH, METRICS = "/encode", "/scheduler_receive_url", "/health", "/metrics"
# A body that registers a receiver is short.
_MAX_RECEIVER_BYTES = 64 << 10
# SGLang sends a body at once. If its host is gone, the body never ends, and would hold memory of others.
BODY_S = 60.0
# Memory for bodies, in largest bodies. A body has its declared length reserved from its first byte until it is served.
BODIES = 4
# The HTTP status of each gRPC status. Any other becomes 503, because SGLang answers its own caller with 503 anyway.
_HTTP_STATUS = {Status.INVALID_ARGUMENT: 400, Status.PERMISSION_DENIED: 403}


class GatewayHttp:
    """The routes. Each one also exists below `/v0`, `/v1` and so on, which SGLang treats as separate encoders."""

    def __init__(
        self, gateway: Gateway, metrics: GatewayMetrics, *, max_parts: int, max_body_bytes: int
    ) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._slots = Room(max_parts)
        self._body_memory = Room(BODIES * max_body_bytes, "bytes of bodies of all requests")
        # Parsing megabytes of JSON holds the GIL. Parse one body at a time, so that health checks run in between.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="json")

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [Route(METRICS, self.exposition)]
        for prefix in ("", "/v{number:int}"):
            routes += [
                Route(prefix + ENCODE, self.encode, methods=["POST"]),
                Route(prefix + RECEIVER, self.receiver, methods=["POST"]),
                Route(prefix + HEALTH, self.health),
            ]
        return Starlette(routes=routes)

    async def health(self, _: Request) -> Response:
        """Answer 200, or 503 and the reason while no replica of the service serves."""
        if self._gateway.is_healthy:
            return Response()
        return JSONResponse({"message": self._gateway.why_unhealthy}, 503)

    async def exposition(self, _: Request) -> Response:
        """Return the metrics for Prometheus."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def receiver(self, request: Request) -> Response:
        """Register the receiver of one of SGLang's ranks for a part."""
        try:
            body = read_object(await _body(request, _MAX_RECEIVER_BYTES))
            count, address = body.get("receive_count"), body.get("receive_url")
            if type(count) is not int or not 1 <= count <= MAX_RANKS or not isinstance(address, str):
                raise InvalidRequestError(
                    f"receive_count must be a number from 1 to {MAX_RANKS}, and receive_url host:port"
                )
            self._gateway.add_receiver(req_id_of(body), count, Address.parse(address))
        except EncoderError as error:
            log.error("a receiver was refused: %s", error.message)
            return _refusal(error)
        return JSONResponse(None)

    async def encode(self, request: Request) -> Response:
        """Serve a part. Parts beyond `max_parts` wait; a part takes its slot once its body has arrived."""
        outcome, begun = "failed", asyncio.Event()

        async def serve(part: Part) -> None:
            async with self._slots.taken():
                begun.set()
                await self._gateway.encode(part)

        try:
            with self._metrics.parts_now.track_inprogress():
                async with AsyncExitStack() as held:
                    body = await self._body_in_memory(request, held)
                    parsing = asyncio.get_running_loop().run_in_executor(self._reader, Part.parse, body)
                    await cancel_on_disconnect(request, serve(await parsing))
                    outcome = ""
            return JSONResponse(None)
        except EncoderError as error:
            refusal = _refusal(error)
            outcome = "refused" if refusal.status_code < 500 else "failed"
            log.warning("a part was %s: %s", outcome, error.message)
            return refusal
        except (DisconnectedError, ClientDisconnect):
            outcome = "" if begun.is_set() else "left"  # a part that begun is counted by the gateway
            return Response(status_code=499)
        finally:
            if outcome:
                self._metrics.parts.labels(outcome).inc()

    async def _body_in_memory(self, request: Request, held: AsyncExitStack) -> bytes:
        """Return the body, whose memory is reserved until `held` is closed. Before its first byte, it takes none."""
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdigit() else self._max_body_bytes
        _require_size(size, self._max_body_bytes)
        pieces = request.stream()
        async with _in_time():
            first = await anext(pieces)
        await held.enter_async_context(self._body_memory.taken(amount=size))
        return await _rest(pieces, first, self._max_body_bytes)


async def _body(request: Request, max_bytes: int) -> bytes:
    return await _rest(request.stream(), b"", max_bytes)


async def _rest(pieces: AsyncIterator[bytes], first: bytes, max_bytes: int) -> bytes:
    read, size = [first], len(first)
    async with _in_time():
        async for piece in pieces:
            size += len(piece)
            _require_size(size, max_bytes)
            read.append(piece)
    return b"".join(read)


def _require_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ImageLimitError(f"the request has more than {max_bytes} bytes (--max-body-bytes)")


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(BODY_S):
            yield
    except TimeoutError:
        raise DeadlineError(f"the request did not arrive within {BODY_S:g} s") from None


def _refusal(error: EncoderError) -> Response:
    return JSONResponse({"message": error.message}, _HTTP_STATUS.get(error.status, 503))
