"""The ASGI middleware for vLLM's `--middleware`: it takes images and videos out of a request before vLLM reads it.

It submits each image to the encoder service (`image_service.py`), which answers from the header, and replaces the image
by its name and grid. vLLM therefore loads and processes no pixels, and the service encodes while vLLM tokenises, queues
and prefills text. Where only the service can count rows, vLLM lays out a blank image of the same size
(`request_images.py`). A video becomes text and an image for each pair of its frames (`videos.py`).

All images of a request are replaced, or none. They stay submitted until the request ends, at another server if theirs
fails. When it ends, the servers drop the images that they have not encoded.

A render server (`render_server.py`) lays out a request for an engine that gets it later, or never. Its images stay
submitted when its request ends. The engine's middleware gets their names, and keeps them submitted by these alone
(`token_requests.py`). If the service has lost one, the request must be rendered again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from hmac import compare_digest
from typing import Any, TypeVar
from uuid import uuid4

from vllm import envs

from encoder_contract.errors import EncoderError, LostImageError, ModelMismatchError, Status
from prefill_client.media.download import ImageHostError
from prefill_client.vllm.counts import answers, renders
from prefill_client.vllm.guarded_request import (
    LOST,
    App,
    GuardedRequest,
    Receive,
    Send,
    http_status,
    parsed_json,
    read_body,
    replay,
    send_error,
    with_length,
)
from prefill_client.vllm.image_name import MAX_PRIORITY, RequestInfo, valid_traceparent
from prefill_client.vllm.image_service import ImageService, NamedRequest
from prefill_client.vllm.render_server import CHAT_RENDER, MESSAGES_RENDER, chat_of, take_names
from prefill_client.vllm.request_images import (
    BATCH,
    CHAT,
    RESPONSES,
    ApiShape,
    RequestImages,
    check_other_route,
    no_tower,
)
from prefill_client.vllm.token_requests import ContentParts, TokenRequest
from prefill_client.vllm.videos import UnsupportedVideoError

_log = logging.getLogger("vllm.encoder_service")
Result = TypeVar("Result")
FORMS = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": BATCH,
    "/invocations": CHAT,
    "/v1/responses": RESPONSES,
}
"""The routes whose images are replaced, and how their requests carry images."""
RENDER_FORMS = {CHAT_RENDER: CHAT, "/v1/responses/render": RESPONSES, MESSAGES_RENDER: CHAT}
"""The routes that lay out a request for an engine, and how their requests, or the chats of these, carry images."""
GENERATE = "/inference/v1/generate"
"""The route of requests that are laid out already, by a render server or by their caller."""
OTHER_ROUTES = frozenset(
    (
        "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/v1/embeddings", "/v2/embed", "/pooling",
        "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring",
        "/cohere/v2/chat", "/cohere/v2/chat/render", "/v1/systemone", "/v1/decisions",
    )
)  # fmt: skip
"""The routes that take images for the engine's own tower, or for no tower."""
WEIGHT_ROUTES = frozenset(("/update_weights", "/finish_weight_update", "/collective_rpc", "/weight_checker"))
"""The routes that may change the weights of a running engine."""
# A body without these has no media, embeddings or names. Escapes of ASCII could hide them, and so could UTF-16.
_MARKS = (
    b"uuid",
    b"hashes",
    b"embeds",
    b"image",
    b"video",
    b"\0",
    *(b"\\u00%d" % row for row in range(2, 8)),
)
# Values of a body, or bytes of one, that the event loop goes through in a millisecond.
_FEW = 1000
_SHORT = 1 << 16


class EncoderServiceMiddleware:
    """One for each API server. The `ec_connector_extra_config` of its engine configures it."""

    def __init__(self, app: App) -> None:
        answers(), renders()  # vLLM shows them from the start
        self._app = app
        self._service: ImageService | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request, or the server's lifespan events."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        route = _route(scope)
        if not route or not _is_authorized(scope):
            await self._app(scope, receive, send)
        elif route in FORMS or route in RENDER_FORMS:
            await self._handle_parts(route, scope, receive, send)
        elif route == GENERATE:
            await self._handle_tokens(scope, receive, send)
        elif route in OTHER_ROUTES:
            await self._handle_other(route, scope, receive, send)
        else:
            await self._app(
                scope, receive, self._noting_weights(scope, send) if route in WEIGHT_ROUTES else send
            )

    async def _handle_parts(
        self, route: str, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        """Handle a request whose messages have parts."""
        body = await read_body(receive)
        if body is None:  # the caller has left
            return
        if route == MESSAGES_RENDER and any(mark in body for mark in _MARKS):
            chat = await chat_of(scope["app"].state, await _parsed(body, lambda parsed: parsed))
            if chat is not None:
                scope, body = {**with_length(scope, len(chat)), "path": _path(scope, CHAT_RENDER)}, chat
        form = FORMS.get(route) or RENDER_FORMS[route]
        images = self._images(form, scope, body)
        await self._handle(images, scope, body, receive, send, renders_only=route in RENDER_FORMS)

    async def _images(
        self, form: ApiShape, scope: MutableMapping[str, Any], body: bytes
    ) -> RequestImages | None:
        """Return a request that has images, or continues a response with images; else None."""
        renders_only = _route(scope) in RENDER_FORMS
        images = await _parsed(body, partial(RequestImages, form=form))
        if len(images) and renders_only:
            # vLLM's answer could not say which of a stand-in's tokens have rows.
            return images if await self._service_of(scope).geometry() is not None else None
        if images.in_background or renders_only:
            return None  # vLLM answers at once, and the end of the request would withdraw its images
        if len(images) or (images.previous_response and self._service_of(scope).earlier(images).digests):
            return images
        return None

    async def _handle_tokens(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a request that is laid out already."""
        body = await read_body(receive)
        if body is None:  # the caller has left
            return
        request_id = _request_id(scope)
        failed: EncoderError | None = None
        request: TokenRequest | None = None
        try:
            request = await self._tokens(scope, body)
            if request is not None and request.images:
                info = self._info(scope, request.body, request_id)
                submitted = await self._service_of(scope).keep(request, info)
                failed = await self._guarded(submitted, scope, receive, send)
        except EncoderError as error:
            failed = error
        if failed is not None:
            await _answer(send, failed, request_id)
        elif request is None or not request.images:
            await self._handle(self._content_parts(scope, request), scope, body, receive, send)

    async def _tokens(self, scope: MutableMapping[str, Any], body: bytes) -> TokenRequest | None:
        """Return a request of tokens that has media; else None."""
        if not any(mark in body for mark in _MARKS):
            return None
        service = self._service_of(scope)
        request = await _parsed(body, partial(TokenRequest, signer=service.signer))
        if request.has_pixels and not service.has_tower:
            raise no_tower(GENERATE)
        return request

    async def _content_parts(
        self, scope: MutableMapping[str, Any], request: TokenRequest | None
    ) -> ContentParts | None:
        """Return the images of `content_parts`; None if there are none, or for the engine's own tower."""
        if request is None:
            return None
        service = self._service_of(scope)
        parts = await service.content_parts(request.body)
        if parts is None:
            check_other_route(request.body, GENERATE, service.signer, has_tower=service.has_tower)
        return parts

    async def _handle(
        self,
        reading: Awaitable[RequestImages | ContentParts | None],
        scope: MutableMapping[str, Any],
        body: bytes,
        receive: Receive,
        send: Send,
        *,
        renders_only: bool = False,
    ) -> None:
        """Replace the images of a request, which `reading` returns, if it has any; and let vLLM answer."""
        error: EncoderError | None = None
        images: RequestImages | ContentParts | None = None
        submitted: NamedRequest | None = None
        request_id = _request_id(scope)
        try:
            images = await reading
            if images is not None:
                info = self._info(scope, images.body, request_id)
                submitted = await self._service_of(scope).submit(images, info, renders_only=renders_only)
        except EncoderError as raised:
            error = raised
            if isinstance(error, ModelMismatchError):  # perhaps another API server has updated the engine
                self._service_of(scope).doubt_weights()
        if submitted is not None:
            error = await self._guarded(submitted, scope, receive, send)
            if error is None:
                return
        if error is not None:
            if _is_of_the_image(error) or not self._service_of(scope).leave_to_own_tower(images, error):
                await _answer(send, error, request_id)
                return
            _log.warning("the engine's own tower encodes the images of a request: %s", error.message)
        await self._app(with_length(scope, len(body)), replay(body, receive), send)

    async def _guarded(
        self, submitted: NamedRequest, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> EncoderError | None:
        """Let vLLM answer while the images stay submitted. Return the error of an image if vLLM could not answer."""
        async with submitted.kept as kept:
            exchange = GuardedRequest(
                submitted.body,
                kept,
                submitted.find_failed,
                receive,
                send,
                first_encoded=submitted.first_encoded,
                videos=submitted.videos,
            )
            error = await exchange.run(self._app, with_length(scope, len(submitted.body)))
            if submitted.renders_only:
                is_named = error is None and exchange.status == 200
                renders().labels("named" if is_named else "refused").inc()
                if is_named:
                    await kept.leave()
            return error

    async def _handle_other(
        self, route: str, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        body = await read_body(receive)
        if body is None:  # the caller has left
            return
        if any(mark in body for mark in _MARKS):
            service = self._service_of(scope)
            check = partial(
                check_other_route, route=route, signer=service.signer, has_tower=service.has_tower
            )
            try:
                await _parsed(body, check)
            except EncoderError as error:
                await _answer(send, error, _request_id(scope))
                return
        await self._app(scope, replay(body, receive), send)

    def _noting_weights(self, scope: MutableMapping[str, Any], send: Send) -> Send:
        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._service_of(scope).doubt_weights()
            await send(message)

        return noting

    def _info(self, scope: MutableMapping[str, Any], body: dict[str, Any], request_id: str) -> RequestInfo:
        """Return the caller's fields for the service."""
        trace = valid_traceparent(_headers(scope).get("traceparent"))
        return RequestInfo(request_id, _priority(body), traceparent=trace)

    def _service_of(self, scope: MutableMapping[str, Any]) -> ImageService:
        if self._service is None:
            state = scope["app"].state
            self._service = ImageService(state.vllm_config, state.args, getattr(state, "engine_client", None))
        return self._service

    async def _live(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass the lifespan of the server; end a render server at start if it cannot lay out names."""
        state = scope["app"].state if "app" in scope else None
        try:
            if _only_renders(state):
                take_names(state)
        except (RuntimeError, ValueError) as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"encoder service: {error}"})
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if self._service is not None:
                await self._service.close()


def _route(scope: MutableMapping[str, Any]) -> str:
    """Return the path of a POST request; empty for all others."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return ""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_authorized(scope: MutableMapping[str, Any]) -> bool:
    """Whether vLLM, which checks its API keys after this middleware, would accept a request."""
    args = getattr(scope["app"].state, "args", None)
    keys = [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]
    if not keys:
        return True
    scheme, _, token = _headers(scope).get("authorization", "").partition(" ")
    matches = [compare_digest(token.encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _request_id(scope: MutableMapping[str, Any]) -> str:
    return (_headers(scope).get("x-request-id") or uuid4().hex)[:128]


async def _parsed(body: bytes, use: Callable[[Any], Result]) -> Result:
    """Return `use` of the JSON of a body, of None if it is invalid, which vLLM answers.

    If `use` may take long, a thread does it. A thread would not parse sooner: the parser lets no other thread run.
    """
    parsed = parsed_json(body)
    return use(parsed) if _has_few_values(body) else await asyncio.to_thread(use, parsed)


def _has_few_values(body: bytes) -> bool:
    """Whether the event loop goes through the values of a body in a millisecond. A file in it is one value."""
    at = -1
    for _ in range(_FEW):
        if (at := body.find(b",", at + 1)) < 0:
            return True
    return len(body) <= _SHORT


def _path(scope: MutableMapping[str, Any], route: str) -> str:
    """Return the path of another route of the same server."""
    return f"{scope.get('root_path', '')}{route}"


def _priority(body: dict[str, Any]) -> int:
    """Return the priority of a request for the service. vLLM puts small priorities first, the service large ones."""
    priority = body.get("priority")
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, -priority)) if isinstance(priority, int) else 0


def _is_of_the_image(error: EncoderError) -> bool:
    """Whether an image or its host is at fault; any other error means that the service cannot help."""
    if isinstance(error, UnsupportedVideoError):
        return False
    return isinstance(error, (ImageHostError, LostImageError)) or error.status in (
        Status.INVALID_ARGUMENT,
        Status.PERMISSION_DENIED,
        Status.NOT_FOUND,
    )


async def _answer(send: Send, error: EncoderError, request_id: str) -> None:
    """Answer a request instead of vLLM, whose own counters and middleware do not see it."""
    reason = error.status.name.lower()
    if isinstance(error, ImageHostError):
        reason = "image_host"
    elif isinstance(error, LostImageError):
        reason, error = "lost", LostImageError(LOST)
    answers().labels(str(http_status(error)[0]), reason).inc()
    await send_error(send, error, request_id)


def _only_renders(state: Any) -> bool:
    """Whether this is a render server with our two options: vLLM makes no connector of the second."""
    config = getattr(state, "vllm_config", None)
    return (
        config is not None
        and config.ec_transfer_config is None
        and bool(getattr(state.args, "ec_transfer_config", None))
    )
