"""An unmodified `vllm serve` with the middleware: callers send the same requests as without it."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.photos import photo
from testing.server_process import ServerProcess, running
from testing.vllm_engine import VllmEngine, data_url, raw
from tests.engines.answers import TOLERANCE, prompt
from tests.vllm.http_engine import HttpEngine, serving
from tests.vllm.service import SERVICE, SETTINGS

PROMPTS = [prompt(700 + number, 1 + number % 8) for number in range(16)]


@pytest.fixture(scope="module")
def right(checkpoint: Path, service: ServerProcess) -> list[list[dict[str, float]]]:
    """The log-probabilities of each prompt with the engine's own tower."""
    engine = VllmEngine(checkpoint, service.endpoint)
    answers = [engine.ask(parts, own=True) for parts in PROMPTS]
    engine.close()
    return [
        [{f"token_id:{token}": value for token, value in step.items()} for step in answer.top]
        for answer in answers
    ]


@pytest.fixture(scope="module")
def http(checkpoint: Path, service: ServerProcess, right: object) -> Iterator[HttpEngine]:
    """A `vllm serve` with our three flags."""
    with serving(checkpoint, service.endpoint, "--allowed-media-domains", "127.0.0.1", "*.invalid") as engine:
        yield engine


class Album(BaseHTTPRequestHandler):
    """An image host with one image; other paths name the status of their answer."""

    def do_GET(self) -> None:
        status = 200 if self.path == "/photo" else int(self.path[1:])
        if not status:  # close the connection without an answer
            return
        body = photo(120, 80, 3, "PNG") if status == 200 else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def album() -> Iterator[str]:
    """The URL of an image host, at a port that the engine's `--allowed-media-domains` does not name."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Album) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def content(parts: list[Any]) -> list[dict[str, Any]]:
    return [raw(part) if isinstance(part, bytes) else {"type": "text", "text": part} for part in parts]


def top(choice: dict[str, Any]) -> list[dict[str, float]]:
    return [
        {each["token"]: each["logprob"] for each in step["top_logprobs"]}
        for step in choice["logprobs"]["content"]
    ]


def assert_equal(
    ours: list[dict[str, float]], right: list[dict[str, float]], tolerance: float = TOLERANCE
) -> None:
    assert len(ours) == len(right) == 8
    for step, expected in zip(ours, right, strict=True):
        both = step.keys() & expected.keys()
        assert len(both) >= 4
        assert all(abs(step[token] - expected[token]) <= tolerance for token in both), (step, expected)


def ask(http: HttpEngine, parts: list[Any], **body: Any) -> list[dict[str, float]]:
    response = http.chat(content(parts), **body)
    assert response.status_code == 200, response.text
    return top(response.json()["choices"][0])


def ask_until_served(http: HttpEngine, parts: list[Any]) -> list[dict[str, float]]:
    """Ask, and retry after each 503 as its Retry-After says."""
    for _ in range(60):
        response = http.chat(content(parts))
        if response.status_code == 200:
            return top(response.json()["choices"][0])
        assert response.status_code == 503, response.text
        time.sleep(int(response.headers["retry-after"]))
    raise AssertionError(response.text)


@pytest.mark.story("chat completions")
def test_chats_with_images_answer_as_with_the_own_tower(
    http: HttpEngine, right: list[list[dict[str, float]]]
) -> None:
    for parts, expected in zip(PROMPTS, right, strict=True):
        assert_equal(ask(http, parts), expected)
    counted = http.metrics()
    assert (
        sum(value for name, value in counted.items() if name.startswith("vllm:encoder_service_images_total"))
        > 0
    )
    assert any('transport="shm"' in name for name in counted)


def test_sixteen_concurrent_callers(http: HttpEngine, right: list[list[dict[str, float]]]) -> None:
    with ThreadPoolExecutor(16) as pool:
        for ours, expected in zip(pool.map(lambda parts: ask(http, parts), PROMPTS), right, strict=True):
            assert_equal(ours, expected)


@pytest.mark.story("streamed answers, and responses")
def test_a_streamed_answer(http: HttpEngine, right: list[list[dict[str, float]]]) -> None:
    body = {"stream": True, "max_tokens": 8}
    response = http.chat(content(PROMPTS[3]), **body)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    steps = [
        step
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("logprobs")
        for step in top(choice)
    ]
    assert_equal(steps, right[3])


def respond(http: HttpEngine, parts: list[Any], **body: Any) -> list[list[float]]:
    """Ask by the API of responses; return the five largest log-probabilities of each token of the answer."""
    request = {
        "model": "tiny",
        "input": [{"role": "user", "content": response_content(parts)}],
        "max_output_tokens": 8,
        "temperature": 0,
        "top_logprobs": 5,
        "include": ["message.output_text.logprobs"],
        "ignore_eos": True,
        "skip_special_tokens": False,  # an answer without text has no log-probabilities
        **body,
    }
    response = httpx.post(http.url + "/v1/responses", json=request, timeout=120)
    assert response.status_code == 200, response.text
    (message,) = (item for item in response.json()["output"] if item["type"] == "message")
    return [values(step["top_logprobs"]) for step in message["content"][0]["logprobs"]]


def response_content(parts: list[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "input_image", "image_url": data_url(part)}
        if isinstance(part, bytes)
        else {"type": "input_text", "text": part}
        for part in parts
    ]


def values(likeliest: list[dict[str, Any]]) -> list[float]:
    return sorted((each["logprob"] for each in likeliest), reverse=True)


def max_difference(ours: list[list[float]], expected: list[dict[str, float]]) -> float:
    """Return the largest difference of a log-probability, by rank, since this API returns tokens as text."""
    assert len(ours) == len(expected) == 8
    pairs = zip(ours, expected, strict=True)
    return max(
        abs(value - other)
        for step, other_step in pairs
        for value, other in zip(step, sorted(other_step.values(), reverse=True), strict=False)
    )


@pytest.mark.story("streamed answers, and responses")
def test_responses_answer_as_with_the_own_tower(
    http: HttpEngine, right: list[list[dict[str, float]]]
) -> None:
    for parts, expected in zip(PROMPTS[:8], right, strict=False):
        assert max_difference(respond(http, parts), expected) <= TOLERANCE
    assert max_difference(respond(http, PROMPTS[0]), right[8]) > 100 * TOLERANCE, "of another prompt"


def test_images_in_tool_output_are_encoded_by_the_service(http: HttpEngine, service: ServerProcess) -> None:
    encoded = service.encodes()
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    found = {
        "type": "function_call_output",
        "call_id": "1",
        "output": response_content([photo(91, 92, 8100, "PNG")]),
    }
    question = {"role": "user", "content": "look"}
    assert len(respond(http, [], input=[question, call, found])) == 8
    assert service.encodes() == encoded + 1


def test_another_cache_salt_shares_no_embedding(
    http: HttpEngine, service: ServerProcess, right: list[list[dict[str, float]]]
) -> None:
    images = sum(isinstance(part, bytes) for part in PROMPTS[9])
    assert_equal(ask(http, PROMPTS[9]), right[9])
    for salt in ("one", "two"):
        encoded = service.encodes()
        assert_equal(ask(http, PROMPTS[9], cache_salt=salt), right[9])
        assert max_difference(respond(http, PROMPTS[9], cache_salt=salt), right[9]) <= TOLERANCE
        assert service.encodes() == encoded + images, "once for this tenant"


def test_text_and_invalid_bodies_are_left_to_vllm(http: HttpEngine) -> None:
    assert http.chat([{"type": "text", "text": "an image in words"}]).status_code == 200
    for body in (b'{"image"', b'["image"]', b'{"messages": "image"}'):
        response = httpx.post(
            http.url + "/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
            timeout=120,
        )
        assert response.status_code == 400 or response.status_code == 422, response.text


@pytest.mark.story("an image that cannot be encoded")
@pytest.mark.parametrize(
    ("part", "body", "status", "message"),
    [
        (raw(b"no image at all"), {}, 400, "image 0: "),
        (raw(photo(900, 4, 1, "PNG")), {}, 400, "aspect ratio"),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}, {}, 403, "not allowed"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {}, 403, "allowed-local-media-path"),
        ({"type": "image_url", "uuid": "someone's"}, {}, 400, "Missing 'type' field"),  # as vLLM alone
        ({"type": "image_url", "image_url": None, "uuid": "someone's"}, {}, 400, "has no image_url"),
        ({"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "x"}, {}, 403, "embeddings"),
        (raw(photo(90, 90, 1, "PNG")), {"mm_processor_kwargs": {"max_pixels": 1024}}, 400, "mm_processor_kwargs"),
        (raw(photo(90, 90, 1, "PNG")), {"media_io_kwargs": {"image": {"x": 1}}}, 400, "media_io_kwargs"),
    ],
)  # fmt: skip
def test_unservable_images_are_refused_with_their_own_error(
    http: HttpEngine, part: dict[str, Any], body: dict[str, Any], status: int, message: str
) -> None:
    response = http.chat([{"type": "text", "text": "x"}, part], **body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, status)
    assert message in response.json()["error"]["message"]


def test_the_middlewares_own_answers_are_counted_and_have_the_callers_request_id(http: HttpEngine) -> None:
    """They are not in vLLM's `http_requests_total`."""
    count = 'vllm:encoder_service_answers_total{reason="invalid_argument",status="400"}'
    before = http.metrics().get(count, 0)
    message = {"role": "user", "content": [raw(b"no image at all")]}
    for route, headers in product(("/v1/chat/completions", "/invocations"), ({}, {"X-Request-Id": "mine"})):
        body = {"model": "tiny", "messages": [message]}
        response = httpx.post(http.url + route, json=body, headers=headers, timeout=120)
        assert response.status_code == 400
        assert response.headers["x-request-id"] == headers.get(
            "X-Request-Id", response.headers["x-request-id"]
        )
    assert http.metrics()[count] == before + 4
    assert http.chat([{**raw(b""), "type": "image_embeds", "image_embeds": {}}]).headers["x-request-id"]
    assert http.metrics()['vllm:encoder_service_answers_total{reason="permission_denied",status="403"}'] >= 1


EMBEDDED = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "x"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize(
    "part",
    [
        json.dumps(EMBEDDED),
        json.dumps(EMBEDDED).replace("image_embeds", "im\\u0061ge_embeds"),
        json.dumps(EMBEDDED).replace('"type": "image_embeds", ', ""),
        '{"type": "video_embeds", "video_embeds": {"video_grid_thw": [1, 4, 4], "timestamps": [1.0]}, "uuid": "x"}',
        '{"type": "audio_embeds", "audio_embeds": null, "uuid": "x"}',
    ],
    ids=["image", "escaped", "without a type", "video", "audio"],
)
def test_embeddings_from_callers_are_refused(http: HttpEngine, path: str, part: str) -> None:
    body = f'{{"model": "tiny", "max_tokens": 2, "messages": [{{"role": "user", "content": [{part}]}}]}}'
    response = httpx.post(
        http.url + path, content=body, headers={"content-type": "application/json"}, timeout=120
    )
    assert response.status_code == 403, response.text
    assert "callers cannot send embeddings" in response.json()["error"]["message"]


def test_images_of_invocations_are_encoded_by_the_service(http: HttpEngine, service: ServerProcess) -> None:
    encoded = service.encodes()
    message = {"role": "user", "content": content(["x", photo(93, 94, 8200, "PNG")])}
    body = {"model": "tiny", "max_tokens": 2, "messages": [message]}
    assert httpx.post(http.url + "/invocations", json=body, timeout=120).status_code == 200
    assert service.encodes() == encoded + 1


@pytest.mark.parametrize("around", ["", '{"type": "image_url", "image_url": {"url": "x"}}'])
def test_deeply_nested_json_gets_a_400(http: HttpEngine, around: str) -> None:
    nested = "[" * 100_000 + around + "]" * 100_000
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": {nested}}}]}}'
    response = httpx.post(
        http.url + "/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=120,
    )
    assert response.status_code == 400, response.text


def test_an_image_is_loaded_from_an_allowed_domain_at_any_port(http: HttpEngine, album: str) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{album}/photo"}}
    assert http.chat([{"type": "text", "text": "x"}, part]).status_code == 200


@pytest.mark.parametrize("path", ["/404", "/500", "/503", "/429", "/0"])
def test_a_failing_image_host_gets_a_422(http: HttpEngine, album: str, path: str) -> None:
    """Stock vLLM, too, answers 422 for a 404."""
    part = {"type": "image_url", "image_url": {"url": album + path}}
    response = http.chat([{"type": "text", "text": "x"}, part])
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "UnprocessableEntityError"
    assert f"image 0: {album}{path}" in response.json()["error"]["message"]


def test_an_unknown_image_host_gets_a_422(http: HttpEngine) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://nowhere.invalid/x.png"}}
    response = http.chat([{"type": "text", "text": "x"}, part])
    assert (response.status_code, response.json()["error"]["code"]) == (422, 422)


def test_named_parts_on_other_routes_fail_only_their_request(http: HttpEngine) -> None:
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "x"}
    message = {"role": "user", "content": [part]}
    anthropic = {"model": "tiny", "max_tokens": 4, "messages": [message]}
    assert httpx.post(http.url + "/v1/messages", json=anthropic, timeout=60).status_code >= 400
    assert ask(http, PROMPTS[0])


@pytest.mark.parametrize(
    ("image", "status", "message"),
    [
        ({"image_url": data_url(b"no image")}, 400, "image 0: "),
        ({"file_id": "file-1"}, 400, "has no image_url"),
        ({"image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": "x"}, 403, "embeddings"),
    ],
)
def test_unservable_images_of_responses_are_refused_with_their_own_error(
    http: HttpEngine, image: dict[str, Any], status: int, message: str
) -> None:
    part = {"type": "input_image", "detail": "auto", **image}
    request = {"model": "tiny", "input": [{"role": "user", "content": [part]}]}
    response = httpx.post(http.url + "/v1/responses", json=request, timeout=60)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILE = {"type": "file", "file": {"file_data": "x"}}
IMAGE = raw(photo(90, 80, 3))


@pytest.mark.parametrize(
    ("parts", "fields", "status"),
    [
        ([AUDIO], {}, 400),
        ([FILE], {}, 400),
        ([IMAGE] * 16, {}, 400),
        ([{"type": "image_url", "image_url": {"url": "ftp://host/x.png"}}], {}, 400),
        ([{"type": "image_url", "image_url": None, "uuid": "unknown"}], {}, 400),
        ([], {"n": 0}, 400),
        ([], {"model": "another"}, 404),
        ([], {"max_tokens": 100_000}, 400),
        ([{"type": "text", "text": "x " * 9000}], {}, 400),
        ([], {"chat_template": "{{ messages }}"}, 400),
        ([], {"response_format": {"type": "json_schema"}}, 400),
        ([], {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, 400),
        ([], {"add_generation_prompt": True, "continue_final_message": True}, 400),
        ([], {"mm_processor_kwargs": "x"}, 400),
        ([], {"media_io_kwargs": {"image": 3}}, 400),
        ([], {"ec_transfer_params": "x"}, 400),
        ([], {"cache_salt": ""}, 400),
    ],
)
def test_refused_requests_get_the_status_of_vllm_alone(
    http: HttpEngine, parts: list[dict[str, Any]], fields: dict[str, Any], status: int
) -> None:
    """Statuses of 0.32.0 without our flags; a request with an image beside the refused part or field."""
    response = http.chat([IMAGE, *parts], **fields)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == status


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"previous_response_id": "resp_x"}, 404), ({"previous_response_id": 3}, 400)],
)
def test_refused_responses_get_the_status_of_vllm_alone(
    http: HttpEngine, fields: dict[str, Any], status: int
) -> None:
    part = {"type": "input_image", "detail": "auto", "image_url": data_url(photo(90, 80, 3))}
    body = {"model": "tiny", "input": [{"role": "user", "content": [part]}], **fields}
    assert httpx.post(http.url + "/v1/responses", json=body, timeout=60).status_code == status


@pytest.mark.story("an image that cannot be encoded")
def test_an_image_that_fails_to_decode_fails_only_its_request(http: HttpEngine) -> None:
    whole = photo(300, 200, 5, "PNG")
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(ask, http, PROMPTS[5])
        broken = http.chat(content(["x", whole[: len(whole) // 2]]))
        assert broken.status_code == 400, "as stock vLLM"
        assert "image 0: " in broken.json()["error"]["message"]
        assert good.result()


@pytest.mark.story("callers hang up")
def test_the_engine_survives_disconnecting_callers(http: HttpEngine) -> None:
    def leave(number: int) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content(prompt(800 + number, 4))}]}
        with suppress(httpx.TimeoutException):
            httpx.post(http.url + "/v1/chat/completions", json=body, timeout=0.05 * (1 + number % 8))

    threads = [threading.Thread(target=leave, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ask(http, PROMPTS[0])


@pytest.mark.story("without the service")
def test_requests_get_503_until_the_service_is_back(
    checkpoint: Path, right: list[list[dict[str, float]]]
) -> None:
    with (
        running(checkpoint, executable=SERVICE, **SETTINGS) as first,
        serving(checkpoint, first.endpoint, submit_timeout_s=10.0) as http,
    ):
        assert_equal(ask(http, PROMPTS[1]), right[1])
        first.kill()
        down = http.chat(content(["new", photo(222, 111, 9, "PNG")]))
        assert down.status_code == 503
        assert "retry-after" in down.headers
        assert http.chat([{"type": "text", "text": "text goes on"}]).status_code == 200
        with running(checkpoint, executable=SERVICE, **{**SETTINGS, "listen": first.endpoint}):
            assert_equal(ask_until_served(http, PROMPTS[2]), right[2])
