"""One small FastAPI app: OpenAI-compatible chat completions over a `Chat`."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from encoder_contract.errors import (
    DeadlineError,
    EncoderError,
    ImageLimitError,
    InvalidRequestError,
    OverloadedError,
    Status,
)
from encoder_contract.traceparent import TRACEPARENT, trace_id
from prefill_client import traceparent
from prefill_client.http_server import DisconnectedError, cancel_on_disconnect
from prefill_client.media.image_loader import ImageLoader
from prefill_reference.chat import Chat, Prefilled
from prefill_reference.engine import sampler
from prefill_reference.schema import ChatRequest

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/chat/completions"
# The HTTP status of each gRPC status; any other is a 500.
_HTTP_STATUS = {
    Status.INVALID_ARGUMENT: 400,
    Status.NOT_FOUND: 503,  # an image's bytes expired between Submit and Fetch: a retry helps
    Status.PERMISSION_DENIED: 403,
    Status.RESOURCE_EXHAUSTED: 429,
    Status.UNAVAILABLE: 503,
    Status.DEADLINE_EXCEEDED: 504,
    Status.CANCELLED: 499,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process accepts."""

    requests: int = 64  # running at the same time; 429 for more
    body_bytes: int = 256 << 20
    request_s: float = 300.0


class _Admission:
    """ASGI middleware that bounds the number of running chat requests. A streamed answer counts until it ends."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_chat = scope["type"] == "http" and scope["path"] == COMPLETIONS
        if is_chat and self._running >= self._limit:
            why = f"{self._limit} requests are running already: retry"
            await _refusal(OverloadedError(why, retry_after_ms=1000))(scope, receive, send)
            return
        self._running += is_chat
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= is_chat


@dataclass(frozen=True)
class HttpService:
    """The HTTP routes. `model` is the name that requests use."""

    chat: Chat
    tokenizer: Any
    model: str
    image_loader: ImageLoader
    video_loader: ImageLoader
    limits: Limits

    def app(self) -> FastAPI:
        """Return the ASGI application."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "local"}
        app = FastAPI(title="Reference prefill service", docs_url=None, redoc_url=None)
        app.add_api_route(COMPLETIONS, self.completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", lambda: {"object": "list", "data": [model]})
        app.add_api_route("/health", lambda: {"status": "ok"})
        app.add_middleware(_Admission, limit=self.limits.requests)
        return app

    async def completions(self, request: Request) -> Response:
        """Answer a chat request. An error before the first token becomes an HTTP status."""
        context = request.headers.get(TRACEPARENT, "")
        traceparent.set(context if trace_id(context) else "")  # for the calls that this request's task makes
        try:
            async with asyncio.timeout(self.limits.request_s):
                asked = await self._read(request)
                prefilled = await cancel_on_disconnect(request, self._prefill(asked))
                if asked.stream:
                    return StreamingResponse(self._stream(asked, prefilled), media_type="text/event-stream")
                return JSONResponse(await cancel_on_disconnect(request, self._whole(asked, prefilled)))
        except TimeoutError:
            return _refusal(DeadlineError(f"no answer within {self.limits.request_s:g} s"))
        except EncoderError as error:
            return _refusal(error)
        except DisconnectedError:
            return Response(status_code=499)

    async def _read(self, request: Request) -> ChatRequest:
        """Read and validate the body. A thread parses it, because it may hold megabytes of base64."""
        body = bytearray()
        async for data in request.stream():
            body += data
            if len(body) > self.limits.body_bytes:
                raise ImageLimitError(f"the request has more than {self.limits.body_bytes} bytes")
        try:
            asked = await asyncio.to_thread(ChatRequest.model_validate_json, bytes(body))
        except ValidationError as error:  # name some fields, without their values, which may have megabytes
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
            raise InvalidRequestError("; ".join(wrong)) from error
        if asked.model != self.model:
            raise InvalidRequestError(f"unknown model {asked.model!r}: this service serves {self.model!r}")
        return asked

    async def _prefill(self, asked: ChatRequest) -> Prefilled:
        images = await self.image_loader.load_all(asked.urls("image"))
        videos = await self.video_loader.load_all(asked.urls("video"))
        return await self.chat.prefill(asked.prompt_messages(images, videos))

    def _tokens(self, asked: ChatRequest, prefilled: Prefilled) -> AsyncGenerator[int, None]:
        choose = sampler(asked.temperature, asked.top_p, asked.seed)
        return self.chat.decode(prefilled, max_tokens=asked.answer_tokens, choose=choose)

    async def _whole(self, asked: ChatRequest, prefilled: Prefilled) -> dict[str, Any]:
        tokens = [token async for token in self._tokens(asked, prefilled)]
        finish = asked.finish_reason(len(tokens), prefilled.room)
        choice = {"message": {"role": "assistant", "content": self._text(tokens)}, "finish_reason": finish}
        return {**self._answer("chat.completion", choice), "usage": _usage(prefilled, tokens)}

    async def _stream(self, asked: ChatRequest, prefilled: Prefilled) -> AsyncGenerator[str, None]:
        """Yield server-sent events. Text is sent once its last character is complete."""
        whole, sent, tokens = self._answer("chat.completion.chunk"), "", list[int]()

        def piece(finish: str | None = None, **delta: str) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return _event({**whole, "choices": [choice]})

        yield piece(role="assistant", content="")
        try:
            async with (
                asyncio.timeout(self.limits.request_s),
                aclosing(self._tokens(asked, prefilled)) as decoding,
            ):
                async for token in decoding:
                    tokens.append(token)
                    text = self._text(tokens)
                    if len(text) > len(sent) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                        yield piece(content=text[len(sent) :])
                        sent = text
        except (TimeoutError, EncoderError) as error:
            # The status was sent long ago. OpenAI's client raises an error that arrives as an event.
            yield _event(_error_body(str(error) or "the answer took too long", type(error).__name__))
            return
        finish = asked.finish_reason(len(tokens), prefilled.room)
        yield piece(finish, content=self._text(tokens)[len(sent) :])
        if asked.stream_options.include_usage:
            yield _event({**whole, "usage": _usage(prefilled, tokens)})
        yield "data: [DONE]\n\n"

    def _answer(self, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
        numbered = [{"index": 0, "logprobs": None, **choice} for choice in choices]
        head = {"id": f"chatcmpl-{uuid4().hex}", "object": kind, "created": int(time.time())}
        return {**head, "model": self.model, "choices": numbered}

    def _text(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _usage(prefilled: Prefilled, tokens: list[int]) -> dict[str, Any]:
    prompt, generated = prefilled.layout.tokens, len(tokens)
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return {**counts, "prompt_tokens_details": {"cached_tokens": prefilled.prefix_tokens}}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _error_body(message: str, code: str) -> dict[str, Any]:
    is_callers = code.startswith(("Invalid", "ImageLimit", "Forbidden"))
    kind = "invalid_request_error" if is_callers else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refusal(error: EncoderError) -> Response:
    headers = {"Retry-After": str(-(-error.retry_after_ms // 1000))} if error.retry_after_ms else None
    status = _HTTP_STATUS.get(error.status, 500)
    if status == 500:
        log.error("a request failed", exc_info=error)
    return JSONResponse(_error_body(error.message, type(error).__name__), status, headers)
