"""Responses that vLLM stores: a conversation continues although the service has lost its images."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.photos import photo
from tests.engines.answers import TOLERANCE
from tests.vllm.http_engine import HttpEngine, serving
from tests.vllm.restartable import Restartable
from tests.vllm.test_middleware import response_content, values

LARGE_BYTES = 31 << 20
REMEMBERED_BYTES = 256 << 20


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Restartable]:
    server = Restartable(checkpoint)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def http(checkpoint: Path, server: Restartable) -> Iterator[HttpEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with serving(checkpoint, server.endpoint, grace_s=1.0) as engine:
            yield engine


def respond(http: HttpEngine, messages: list[Any], **body: Any) -> httpx.Response:
    """Ask, and retry after a 503: the service counts as down for a moment after its restart."""
    request = {
        "model": "tiny",
        "input": messages,
        "max_output_tokens": 8,
        "temperature": 0,
        "top_logprobs": 5,
        "include": ["message.output_text.logprobs"],
        "ignore_eos": True,
        "skip_special_tokens": False,
        **body,
    }
    for _ in range(60):
        response = httpx.post(http.url + "/v1/responses", json=request, timeout=300)
        if response.status_code != 503:
            return response
        time.sleep(int(response.headers["retry-after"]))
    raise AssertionError(response.text)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": response_content(list(parts))}


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """Return the text of an answer, and the log-probabilities of each token."""
    assert response.status_code == 200, response.text
    (message,) = (item for item in response.json()["output"] if item["type"] == "message")
    (part,) = message["content"]
    return {"text": part["text"], "likeliest": [values(step["top_logprobs"]) for step in part["logprobs"]]}


def assert_same(ours: dict[str, Any], right: dict[str, Any]) -> None:
    assert ours["text"] == right["text"]
    assert len(ours["likeliest"]) == len(right["likeliest"]) == 8
    pairs = zip(ours["likeliest"], right["likeliest"], strict=True)
    assert max(abs(one - other) for step in pairs for one, other in zip(*step, strict=True)) <= TOLERANCE


def assistant(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer["text"]}


def restart(http: HttpEngine, server: Restartable) -> None:
    """Let the service lose all images, and evict them from the engine's encoder cache."""
    for seed in (9140, 9141):  # the engine's encoder cache has room for one and a half
        assert respond(http, [user("x", photo(256, 256, seed))]).status_code == 200
    server.kill()
    server.start()


@pytest.mark.story("rows are lost before the prefill")
def test_a_conversation_continues_after_the_service_lost_its_images(
    http: HttpEngine, server: Restartable
) -> None:
    turns = [user("look", photo(150, 110, 9100, "PNG")), user("and?"), user("this", photo(90, 130, 9101))]
    response = respond(http, turns[:1])
    messages_so_far = turns[:1]
    for turn in turns[1:]:
        messages_so_far = [*messages_so_far, assistant(answer_of(response)), turn]
        restart(http, server)
        # Another system prompt for each turn, so that no prefix of an earlier turn is cached.
        system = {"instructions": f"turn {len(messages_so_far)}"}
        response = respond(http, [turn], previous_response_id=response.json()["id"], **system)
        assert_same(answer_of(response), answer_of(respond(http, messages_so_far, store=False, **system)))


def test_a_conversation_without_kept_images_is_refused_with_advice(
    http: HttpEngine, server: Restartable
) -> None:
    first = respond(http, [user("look", photo(150, 110, 9110, "PNG"))])
    for number in range(REMEMBERED_BYTES // LARGE_BYTES + 1):
        large = photo(40, 40, 9111 + number, "PNG") + bytes(LARGE_BYTES)
        assert respond(http, [user("x", large)]).status_code == 200
    earlier = {"previous_response_id": first.json()["id"]}
    known = respond(http, [user("and?")], **earlier, instructions="again")
    assert known.status_code == 200, "the service has them"
    restart(http, server)
    refused = respond(http, [user("and?")], **earlier, instructions="once more")
    assert refused.status_code == 404, refused.text
    assert "send the conversation with its images" in refused.json()["error"]["message"]
    refused = respond(http, [user("this", photo(90, 130, 9112))], **earlier, instructions="once more")
    assert refused.status_code == 404, "also with a new image"


def test_a_conversation_that_changes_its_cache_salt_is_refused(http: HttpEngine) -> None:
    first = respond(http, [user("look", photo(150, 110, 9120, "PNG"))], cache_salt="one")
    earlier = {"previous_response_id": first.json()["id"]}
    assert respond(http, [user("and?")], cache_salt="one", **earlier).status_code == 200
    refused = respond(http, [user("and?")], cache_salt="two", **earlier)
    assert refused.status_code == 400
    assert "cache_salt" in refused.json()["error"]["message"]


def test_background_responses_use_the_own_tower(http: HttpEngine, server: Restartable) -> None:
    encoded = server.encodes()
    question = user("look", photo(150, 110, 9130, "PNG"))
    begun = respond(http, [question], background=True).json()
    while begun["status"] in ("queued", "in_progress"):
        time.sleep(0.1)
        begun = httpx.get(f"{http.url}/v1/responses/{begun['id']}", timeout=300).json()
    assert begun["status"] == "incomplete", "it has generated its eight tokens"
    assert server.encodes() == encoded
