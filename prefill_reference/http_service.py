"""The HTTP edge of the reference prefill service: OpenAI-compatible chat completions over a `Chat`."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    ImageLimitError,
    InvalidRequestError,
    OverloadedError,
)
from encoder_contract.errors import Status as Code
from encoder_contract.traceparent import TRACEPARENT
from prefill_client import Trace, traceparent
from prefill_client.http_server import DisconnectedError, cancel_on_disconnect
from prefill_client.media.image_loader import ImageLoader
from prefill_reference.chat import Chat, Prefilled
from prefill_reference.completions import ChatRequest, completion, error_body, piece, usage
from prefill_reference.engine import sampler
from prefill_reference.metrics import Metrics

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/chat/completions"
# Trace files that are kept, some tens of kilobytes each: enough to look into the latest requests.
KEPT_TRACES = 100
# The HTTP status of each gRPC status; any other is a 500.
_HTTP_STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 503,  # an image's bytes expired between Submit and Fetch: a retry helps
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
    Code.CANCELLED: 499,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process accepts."""

    requests: int = 64  # running at the same time; 429 for more
    body_bytes: int = 256 << 20
    request_s: float = 300.0


class Admission:
    """ASGI middleware that bounds the number of running chat requests. A streamed answer counts until it ends."""

    def __init__(self, app: ASGIApp, limit: int, metrics: Metrics) -> None:
        self._app = app
        self._limit = limit
        self._metrics = metrics
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 429."""
        if scope["type"] != "http" or scope["path"] != COMPLETIONS:
            await self._app(scope, receive, send)
            return
        if self._running >= self._limit:
            self._metrics.requests.labels("refused").inc()
            refusal = _error_response(
                OverloadedError(f"{self._limit} requests are running already: retry", retry_after_ms=1000)
            )
            await refusal(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1


class TraceFolder:
    """Writes a trace file for each request, named after the id of its answer, and keeps the newest `kept` files."""

    def __init__(self, folder: Path, *, kept: int = KEPT_TRACES) -> None:
        """Create the folder if it does not exist. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._kept = kept

    def keep(self, trace: Trace) -> None:
        """Write a trace. Blocks: do not call it on an event loop. Raises `OSError`."""
        trace.write(self._folder / f"chatcmpl-{trace.request_id}.json")
        files = sorted(self._folder.glob("chatcmpl-*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[: -self._kept]:
            file.unlink(missing_ok=True)


class HttpService:
    """The HTTP routes."""

    def __init__(
        self,
        chat: Chat,
        tokenizer: Any,
        model: str,
        *,
        image_loader: ImageLoader,
        video_loader: ImageLoader,
        metrics: Metrics,
        limits: Limits,
        traces: TraceFolder | None = None,
    ) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._model = model
        self._image_loader = image_loader
        self._video_loader = video_loader
        self._metrics = metrics
        self._limits = limits
        self._traces = traces

    def app(self) -> FastAPI:
        """Return the ASGI application."""
        app = FastAPI(title="Reference prefill service", docs_url=None, redoc_url=None)
        app.add_api_route(COMPLETIONS, self.completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/health", self.health)
        app.add_api_route("/metrics", self.exposition)
        app.add_middleware(Admission, limit=self._limits.requests, metrics=self._metrics)
        return app

    async def models(self) -> dict[str, Any]:
        """List the served model."""
        return {
            "object": "list",
            "data": [{"id": self._model, "object": "model", "created": 0, "owned_by": "local"}],
        }

    async def health(self) -> dict[str, str]:
        """Report that the process answers."""
        return {"status": "ok"}

    async def exposition(self) -> Response:
        """Return the metrics for Prometheus."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def completions(self, request: Request) -> Response:
        """Answer a chat request. An error before the first token becomes an HTTP status."""
        outcome = "failed"
        context = request.headers.get(TRACEPARENT, "")
        trace = Trace(uuid4().hex, traceparent=context)
        # Applies to the calls that this request's task makes.
        traceparent.set(context if trace.trace_id else "")
        try:
            async with asyncio.timeout(self._limits.request_s):
                chat_request = await self._read(request)
                prefilled = await cancel_on_disconnect(request, self._prefill(chat_request, trace))
                if chat_request.stream:
                    outcome = "streamed"
                    return StreamingResponse(
                        self._stream(chat_request, prefilled, trace), media_type="text/event-stream"
                    )
                answer = await cancel_on_disconnect(request, self._whole(chat_request, prefilled, trace))
            outcome = "answered"
            return JSONResponse(answer)
        except TimeoutError:
            return _error_response(DeadlineError(f"no answer within {self._limits.request_s:g} s"))
        except EncoderError as error:
            return _error_response(error)
        except DisconnectedError:
            outcome = "left"
            return Response(status_code=499)
        finally:
            self._metrics.requests.labels(outcome).inc()
            if self._traces is not None:
                await self._write_trace(trace)

    async def _write_trace(self, trace: Trace) -> None:
        assert self._traces is not None
        try:
            await asyncio.to_thread(self._traces.keep, trace)
        except OSError as error:  # for example a full disk; the request still gets its answer
            log.warning("the trace of request %s cannot be written: %s", trace.request_id, error)

    async def _read(self, request: Request) -> ChatRequest:
        """Read and validate the body. A thread parses it, because it may hold megabytes of base64."""
        body = bytearray()
        async for data in request.stream():
            body += data
            if len(body) > self._limits.body_bytes:
                raise ImageLimitError(f"the request has more than {self._limits.body_bytes} bytes")
        try:
            chat_request = await asyncio.to_thread(ChatRequest.model_validate_json, bytes(body))
        except ValidationError as error:
            raise InvalidRequestError(_invalid_fields(error)) from error
        if chat_request.model != self._model:
            raise InvalidRequestError(
                f"unknown model {chat_request.model!r}: this service serves {self._model!r}"
            )
        return chat_request

    async def _prefill(self, chat_request: ChatRequest, trace: Trace) -> Prefilled:
        images = await self._image_loader.load_all(chat_request.image_urls)
        videos = await self._video_loader.load_all(chat_request.video_urls)
        with self._metrics.first_token_seconds.time():
            prefilled = await self._chat.prefill(
                chat_request.prompt_messages(images, videos), on_chunk=self._metrics.on_chunk, trace=trace
            )
        self._metrics.prompt_tokens.labels("cached").inc(prefilled.prefix_tokens)
        self._metrics.prompt_tokens.labels("prefilled").inc(prefilled.layout.tokens - prefilled.prefix_tokens)
        return prefilled

    def _tokens(self, chat_request: ChatRequest, prefilled: Prefilled) -> AsyncGenerator[int, None]:
        choose = sampler(chat_request.temperature, chat_request.top_p, chat_request.seed)
        return self._chat.decode(prefilled, max_tokens=chat_request.answer_tokens, choose=choose)

    async def _whole(self, chat_request: ChatRequest, prefilled: Prefilled, trace: Trace) -> dict[str, Any]:
        tokens = [token async for token in self._tokens(chat_request, prefilled)]
        used = self._usage(prefilled, tokens)
        finish = chat_request.finish_reason(len(tokens), prefilled.room)
        return completion(_identity(trace), self._model, self._text(tokens), finish, used)

    async def _stream(
        self, chat_request: ChatRequest, prefilled: Prefilled, trace: Trace
    ) -> AsyncGenerator[str, None]:
        """Yield server-sent events. Text is sent once its last character is complete."""
        identity, sent, tokens = _identity(trace), "", list[int]()
        yield _event(piece(identity, self._model, {"role": "assistant", "content": ""}))
        try:
            async with (
                asyncio.timeout(self._limits.request_s),
                aclosing(self._tokens(chat_request, prefilled)) as decoding,
            ):
                async for token in decoding:
                    tokens.append(token)
                    text = self._text(tokens)
                    if len(text) > len(sent) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                        yield _event(piece(identity, self._model, {"content": text[len(sent) :]}))
                        sent = text
        except (TimeoutError, EncoderError) as error:
            # The status was sent long ago. OpenAI's client raises an error that arrives as an event.
            yield _event(error_body(str(error) or "the answer took too long", type(error).__name__))
            return
        rest = self._text(tokens)[len(sent) :]
        finish = chat_request.finish_reason(len(tokens), prefilled.room)
        yield _event(piece(identity, self._model, {"content": rest}, finish))
        used = self._usage(prefilled, tokens)
        if chat_request.stream_options.include_usage:
            yield _event({**piece(identity, self._model, None), "usage": used})
        yield "data: [DONE]\n\n"

    def _usage(self, prefilled: Prefilled, tokens: list[int]) -> dict[str, Any]:
        self._metrics.generated_tokens.inc(len(tokens))
        return usage(prefilled.layout.tokens, prefilled.prefix_tokens, len(tokens))

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _identity(trace: Trace) -> str:
    return f"chatcmpl-{trace.request_id}"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _invalid_fields(error: ValidationError) -> str:
    """Name the first few invalid fields, without their values, which may have megabytes."""
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])


def _error_response(error: EncoderError) -> Response:
    headers = {"Retry-After": str(-(-error.retry_after_ms // 1000))} if error.retry_after_ms else None
    status = _HTTP_STATUS.get(error.status, 500)
    if status == 500:
        log.error("a request failed", exc_info=error)
    return JSONResponse(error_body(error.message, type(error).__name__), status, headers)
