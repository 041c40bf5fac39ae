"""Controls of the middleware: without its checks, callers can name embeddings, and errors have no text."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from prefill_client.plugin import door
from prefill_client.vllm import middleware, request_images
from testing.vllm_engine import VllmEngine, raw


def test_without_the_check_embeddings_reach_vllm(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "x"}
    assert through_middleware(engine, part) == (403, None)
    monkeypatch.setattr(request_images, "EMBEDDED", set())
    assert through_middleware(engine, part) == (200, part)


def test_without_the_check_a_failed_image_is_a_bare_500(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = raw(b"no image at all")
    assert through_middleware(engine, part) == (400, None)
    monkeypatch.setattr(door, "raise_first", lambda *_: None)
    with pytest.raises((AssertionError, IndexError)):  # which a server turns into a 500 without text
        through_middleware(engine, part)


def through_middleware(engine: VllmEngine, part: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Send a chat with one part through the middleware; return the status and the part that vLLM would get."""
    status, body = behind_middleware(engine, [part])
    return status, body["messages"][0]["content"][0] if body else None


def behind_middleware(
    engine: VllmEngine, parts: list[dict[str, Any]], **fields: Any
) -> tuple[int, dict[str, Any] | None]:
    """Send a chat through the middleware; return the status and the body that vLLM would get.

    `fields` are more fields of the request.
    """
    received: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            received.append(json.loads((await receive())["body"]))
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    unread = [json.dumps({"messages": [{"role": "user", "content": parts}], **fields}).encode()]

    async def receive() -> Any:
        if not unread:
            await asyncio.Event().wait()  # the caller stays
        return {"type": "http.request", "body": unread.pop()}

    async def call() -> None:
        state = SimpleNamespace(vllm_config=engine.config, args=SimpleNamespace(), engine_client=None)
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        ours = middleware.EncoderServiceMiddleware(vllm)
        try:
            await ours({**scope, "app": SimpleNamespace(state=state)}, receive, send)
        finally:
            await ours({"type": "lifespan"}, receive, send)

    asyncio.run(call())
    return sent[0]["status"], received[0] if received else None
