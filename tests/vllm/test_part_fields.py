"""Fields of parts, null or unknown to vLLM, give the prompt of an engine without the middleware."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import data_url, raw
from tests.vllm.http_engine import HttpEngine, serving

TRUST = "--trust-request-chat-template"
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}[{{ part.label }}]"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endfor %}"
)
# As clients write them that have one class for all parts.
NULLS = dict.fromkeys(("text", "image_url", "video_url", "audio_url", "input_audio", "image_embeds", "uuid"))
IMAGE = photo(200, 150, 9501, "PNG")
ANOTHER = {"url": data_url(photo(90, 80, 9502, "PNG"))}
TEXT = {**NULLS, "type": "text", "text": "hello"}


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[HttpEngine]:
    """An engine without our flags."""
    with serving(checkpoint, "", TRUST) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(checkpoint: Path, service: ServerProcess) -> Iterator[HttpEngine]:
    """An engine with the middleware."""
    with serving(checkpoint, service.endpoint, TRUST) as engine:
        yield engine


def prompt(engine: HttpEngine, parts: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a chat's prompt, written by a template that reads a field of each part."""
    response = engine.chat(parts, chat_template=TEMPLATE, return_token_ids=True)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["prompt_token_ids"]
    return tokens


@pytest.mark.parametrize(
    "parts",
    [
        [TEXT],
        [TEXT, {**NULLS, **raw(IMAGE)}],
        [{**TEXT, "image_url": ANOTHER}],
        [{**TEXT, "image_url": ANOTHER}, raw(IMAGE)],
        [{**raw(IMAGE), "video_url": {}, "text": "hello"}],
    ],
    ids=["text", "text and image", "text with an image_url", "the same beside an image", "image with a video_url"],
)  # fmt: skip
def test_null_fields_and_keys_of_another_kind_change_no_prompt(
    http: HttpEngine, alone: HttpEngine, parts: list[dict[str, Any]]
) -> None:
    assert prompt(http, parts) == prompt(alone, parts)


def test_the_chat_template_is_shown_other_fields(http: HttpEngine, alone: HttpEngine) -> None:
    parts = [{**raw(IMAGE), "label": "seven"}, {**TEXT, "label": "eight"}]
    written = prompt(http, parts)
    assert written == prompt(alone, parts)
    assert written != prompt(http, [raw(IMAGE), TEXT]), "the template reads them"


def test_null_fields_are_accepted_in_responses(http: HttpEngine, service: ServerProcess) -> None:
    nulls = {"image_url": None, "file_id": None, "text": None}
    parts = [
        {**nulls, "type": "input_text", "text": "hello"},
        {**nulls, "type": "input_image", "image_url": data_url(photo(90, 90, 9503, "PNG")), "detail": "auto"},
    ]
    encoded = service.encodes()
    request = {"model": "tiny", "input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    response = httpx.post(http.url + "/v1/responses", json=request, timeout=600)
    assert response.status_code == 200, response.text
    assert service.encodes() == encoded + 1
