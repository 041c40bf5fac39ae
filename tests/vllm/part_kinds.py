"""Compares what vLLM takes a part for, by its own validation and parser, with what the middleware takes it for."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from encoder_contract.errors import EncoderError
from prefill_client.vllm.request_images import CHAT, RequestImages

try:
    from vllm.renderers.chat_utils.chat_message import (
        _KNOWN_CONTENT_PART_FIELDS as KNOWN_FIELDS,
    )
    from vllm.renderers.chat_utils.chat_message import (
        parse_chat_message_content_mm_part as parse_part,
    )
except ImportError:  # before 0.33
    from vllm.renderers.chat_utils import _KNOWN_CONTENT_PART_FIELDS as KNOWN_FIELDS
    from vllm.renderers.chat_utils import _parse_chat_message_content_mm_part as parse_part

__all__ = ["KNOWN_FIELDS", "disagreements"]

IMAGE, VIDEO = "data:image/png;base64,AAAA", "data:video/mp4;base64,AAAA"
VALUES: dict[str, list[Any]] = {
    "text": [None, "", "hello"],
    "image_url": [None, {}, "", IMAGE, {"url": IMAGE}, {"url": IMAGE, "detail": "low"}, {"url": None}],
    "video_url": [None, {}, VIDEO, {"url": VIDEO}],
    "uuid": [None, "", "k"],
    "refusal": [None, "no"],
    "thinking": [None, "hm"],
    "label": ["x"],
    "cache_control": [{"type": "ephemeral"}],
    "detail": ["auto", None],
    "name": ["f"],
    "image_pil": [None],
    "image_embeds": [None],
    "audio_embeds": [None],
    "video_embeds": [None],
    "prompt_embeds": [None],
    "audio_url": [None],
    "input_audio": [None],
    "file": [None],
    "tool_reference": [None],
}
TYPES = [*VALUES, "input_image", "input_text", "image", None, 5, *["text", "image_url", "video_url"] * 6]
WHOLE = {"text": "hello", "image_url": {"url": IMAGE}, "video_url": {"url": VIDEO}}
"""What a part of this type usually has."""


def disagreements(parts: int, seed: int) -> dict[str, Any]:
    """Compare random parts; return the kinds that vLLM has seen, and the parts that the middleware takes otherwise."""
    draw = random.Random(seed)
    kinds, different = set(), []
    for part in (_part(draw) for _ in range(parts)):
        stock, ours = _stock(part), _ours(part)
        kinds.add(stock)
        allowed = {stock}
        if stock == "refused":  # by vLLM if we pass it on; we serve a URL also in the form of another API
            allowed |= {"passed on", *map(_stock, _other_forms(part))}
        if ours not in allowed:
            different.append({"part": part, "stock": stock, "ours": ours})
    return {"kinds": sorted(kinds), "different": different[:10], "count": len(different)}


def _part(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(TYPES)
    part: dict[str, Any] = {} if kind is None else {"type": kind}
    for key, values in VALUES.items():
        if draw.random() < (0.5 if key == kind else 0.1):
            part[key] = draw.choice(values)
    if isinstance(kind, str) and kind in WHOLE and draw.random() < 0.8:
        part[kind] = WHOLE[kind]
    if kind == "video_embeds":  # 0.33 reads the sound of a video here; we refuse both
        part.pop("audio_embeds", None)
    return json.loads(json.dumps(part))


def _stock(part: dict[str, Any]) -> str:
    """Return "image", "video", or "passed on" for parts without media; "refused" as vLLM does."""
    try:
        request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": [part]}])
        message = request.messages[0]
        (read,) = (message if isinstance(message, dict) else message.model_dump())["content"]
        kind, content = parse_part(read)
    except Exception:  # noqa: BLE001 - a value of the wrong type makes its parser raise errors of many kinds
        return "refused"
    if kind not in ("image_url", "input_image", "image_pil", "video_url"):
        return "refused" if kind.endswith("_embeds") and kind != "prompt_embeds" else "passed on"
    if kind == "video_url":
        return "video" if content else "refused"  # vLLM may still have the video of a `uuid`
    return "image" if content or read.get("uuid") else "refused"


def _ours(part: dict[str, Any]) -> str:
    body = {"messages": [{"role": "user", "content": [json.loads(json.dumps(part))]}]}
    with suppress(EncoderError):
        images = RequestImages(body, CHAT)
        references, videos = images.references(), images.video_urls()
        return "image" if references else "video" if videos else "passed on"
    return "refused"


def _other_forms(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {**part, "detail": "auto"}
    for key in ("image_url", "video_url"):
        url = part.get(key)
        if url:
            other = url.get("url") if isinstance(url, dict) else {"url": url}
            yield {**part, key: other, "detail": "auto"}
