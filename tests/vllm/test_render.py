"""A render server without pixels, and engines that get its tokens: answers are those of a chat at one engine."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.msgpack import Decoder
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind

from encoder_contract.geometry import Grid
from prefill_client.vllm.image_name import ImageName, NameSigner
from prefill_client.vllm.token_requests import grid_item
from testing.photos import photo
from testing.server_process import ServerProcess
from testing.vllm_engine import Answer, Part, VllmEngine, data_url
from tests.vllm.http_engine import HttpEngine, RenderServer, rendering, serving
from tests.vllm.test_middleware import assert_equal, content, top
from tests.waiting import PATIENCE_S

GENERATE = "/inference/v1/generate"
PHOTOS = [photo(64 + 32 * (seed % 5), 64 + 32 * (seed % 7), 4100 + seed, "PNG") for seed in range(16)]
CASES: dict[str, list[Part]] = {
    "one image": ["look ", PHOTOS[0], " what?"],
    "four images": [part for photo in PHOTOS[:4] for part in ("image ", photo)],
    "sixteen images": [part for photo in PHOTOS for part in ("image ", photo)],
    "one image three times": ["a ", PHOTOS[5], " b ", PHOTOS[6], PHOTOS[5], " c ", PHOTOS[5], "?"],
    "a long text": ["words " * 60, PHOTOS[7], " and words" * 60],
}


EVENTS = "inproc://kv-events"
BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def offline(checkpoint: Path, service: ServerProcess) -> Iterator[VllmEngine]:
    """An engine without a server, which publishes the events of its KV blocks."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=EVENTS)
    engine = VllmEngine(checkpoint, service.endpoint, kv_events_config=events)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def events(offline: VllmEngine) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber of these events, as a router."""
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(EVENTS)
        yield socket


@pytest.fixture(scope="module")
def right(offline: VllmEngine, events: object) -> dict[str, list[dict[str, float]]]:
    """The log-probabilities of each case with the engine's own tower."""
    return {name: by_token_id(offline.ask(parts, own=True)) for name, parts in CASES.items()}


def by_token_id(answer: Answer) -> list[dict[str, float]]:
    """Return the likeliest tokens of each step as vLLM's API calls them, with their log-probabilities."""
    return [{f"token_id:{token}": value for token, value in step.items()} for step in answer.top]


@pytest.fixture(scope="module")
def render(checkpoint: Path, service: ServerProcess, right: object) -> Iterator[RenderServer]:
    """A render server."""
    with rendering(checkpoint, service.endpoint) as server:
        yield server


@pytest.fixture(scope="module")
def http(checkpoint: Path, service: ServerProcess, right: object) -> Iterator[HttpEngine]:
    """An engine that takes tokens."""
    with serving(checkpoint, service.endpoint, "--enable-scale-out") as engine:
        yield engine


@pytest.fixture(scope="module")
def stock(checkpoint: Path, right: object) -> Iterator[RenderServer]:
    """A render server without our flags."""
    with rendering(checkpoint, "") as server:
        yield server


def rendered(server: HttpEngine, parts: list[Part], **body: Any) -> dict[str, Any]:
    response = RenderServer.render(server, content(parts), **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def generated(http: HttpEngine, request: dict[str, Any]) -> list[dict[str, float]]:
    response = http.post(GENERATE, request)
    assert response.status_code == 200, response.text
    return steps(response.json()["choices"][0])


def steps(choice: dict[str, Any]) -> list[dict[str, float]]:
    """Return the likeliest tokens of each step, with their log-probabilities."""
    return [
        {f"token_id:{each['token_id']}": each["logprob"] for each in step["top_logprobs"]}
        for step in choice["logprobs"]["content"]
    ]


def images_of_the_service(http: HttpEngine) -> float:
    """Return how many images an engine has got from the service."""
    return sum(value for name, value in http.metrics().items() if "images_total" in name)


def names(request: dict[str, Any]) -> list[str]:
    found: list[str] = request["features"]["mm_hashes"]["image"]
    return found


@pytest.mark.story("render servers, and engines that take tokens")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("payload", ["tensors", "none"])
def test_a_rendered_request_answers_as_a_chat_with_the_own_tower(
    render: RenderServer, http: HttpEngine, right: dict[str, Any], case: str, payload: str
) -> None:
    request = rendered(render, CASES[case], mm_payload=payload)
    assert len(json.dumps(request)) < 20_000
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in names(request))
    assert_equal(generated(http, request), right[case])


def test_a_chat_shares_the_prefix_of_a_rendered_request(
    render: RenderServer, http: HttpEngine, right: dict[str, Any]
) -> None:
    """By name: routers that render a chat find its blocks in the events of any engine."""
    request = rendered(render, CASES["a long text"])
    generated(http, request)
    response = http.chat(content(CASES["a long text"]), return_token_ids=True)
    assert response.json()["prompt_token_ids"] == request["token_ids"]
    assert_equal(top(response.json()["choices"][0]), right["a long text"])
    assert names(rendered(http, CASES["a long text"])) == names(request), "an engine renders, too"


def generated_offline(engine: VllmEngine, request: dict[str, Any]) -> list[dict[str, float]]:
    """Give a rendered request to an engine without a server: the example of docs/vllm.md."""
    read = GenerateRequest.model_validate(request)
    assert read.features is not None
    placeholders = {
        modality: [PlaceholderRange(offset=each.offset, length=each.length) for each in ranges]
        for modality, ranges in read.features.mm_placeholders.items()
    }
    prompt = mm_input(
        prompt_token_ids=read.token_ids,
        mm_kwargs=MultiModalKwargsItems(mm_kwargs_from_features(read.features)),
        mm_hashes=read.features.mm_hashes,
        mm_placeholders=placeholders,
        cache_salt=read.cache_salt,
    )
    parameters = read.sampling_params
    parameters.output_kind = RequestOutputKind.FINAL_ONLY
    if read.ec_transfer_params is not None:
        parameters.extra_args = {
            **(parameters.extra_args or {}),
            "ec_transfer_params": read.ec_transfer_params,
        }
    request_id = read.request_id
    engine.llm.llm_engine.add_request(request_id, prompt, parameters)
    return by_token_id(engine.run(request_id)[request_id])


@pytest.mark.story("the engine as a class of Python")
def test_two_engines_behind_one_render_server_answer_alike(
    render: RenderServer, http: HttpEngine, offline: VllmEngine, right: dict[str, Any]
) -> None:
    """Also from their prefix caches, and one of them has no server."""
    request = rendered(render, CASES["a long text"])
    for _ in range(2):
        assert_equal(generated(http, request), right["a long text"])
        assert_equal(generated_offline(offline, request), right["a long text"])


def test_kv_events_have_the_identifiers_and_places_of_the_render(
    render: RenderServer, offline: VllmEngine, events: zmq.Socket[bytes], right: object
) -> None:
    """A router computes both from the render's answer alone."""
    request = rendered(render, ["events ", PHOTOS[9], " between " * 8, PHOTOS[10], " after " * 20])
    tokens, places = request["token_ids"], request["features"]["mm_placeholders"]["image"]
    expected = [
        [
            (name, place["offset"] - start)
            for name, place in zip(names(request), places, strict=True)
            if place["offset"] < start + BLOCK_TOKENS and place["offset"] + place["length"] > start
        ]
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    ]
    assert sum(map(bool, expected)) >= 2
    generated_offline(offline, request)
    stored = stored_blocks(events, tokens[:BLOCK_TOKENS], len(expected))
    assert [token for block, _ in stored for token in block] == tokens[: BLOCK_TOKENS * len(expected)]
    assert [keys for _, keys in stored] == expected


def stored_blocks(
    events: zmq.Socket[bytes], first: list[int], count: int
) -> list[tuple[list[int], list[tuple[str, int]]]]:
    """Return the tokens and keys of the blocks that were stored from the one with the tokens `first` on."""
    decoder = Decoder(KVEventBatch)
    found: list[tuple[list[int], list[tuple[str, int]]]] = []
    while len(found) < count:
        assert events.poll(1000 * PATIENCE_S), "no event"
        for event in decoder.decode(events.recv_multipart()[-1]).events:
            if not isinstance(event, BlockStored):
                continue
            for index, keys in enumerate(event.extra_keys or [None] * len(event.block_hashes)):
                tokens = event.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                if found or tokens == first:
                    found.append((tokens, [(name, offset) for name, offset in keys or ()]))
    return found[:count]


def test_a_streamed_answer_and_another_tenant(
    render: RenderServer, http: HttpEngine, right: dict[str, Any]
) -> None:
    request = rendered(render, CASES["four images"], cache_salt="tenant")
    assert set(names(request)).isdisjoint(names(rendered(render, CASES["four images"])))
    lines = http.post(GENERATE, {**request, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert_equal(
        [step for each in chunks for choice in each["choices"] for step in steps(choice)],
        right["four images"],
    )
    assert http.post(GENERATE, {**request, "cache_salt": None}).status_code == 403


def sampled(request: dict[str, Any], server: HttpEngine) -> dict[str, Any]:
    """Return a rendered request with the sampling parameters of the others, which ask for log-probabilities."""
    parameters = rendered(server, ["any text"])["sampling_params"]
    return {
        **request,
        "sampling_params": {**parameters, "extra_args": request["sampling_params"].get("extra_args")},
    }


TURNS = [
    {"role": "system", "content": content(["a system that shows ", PHOTOS[11]])},
    {"role": "user", "content": content([PHOTOS[12], " a question"])},
    {"role": "assistant", "content": "an answer"},
    {"role": "tool", "tool_call_id": "c", "content": content(["a result: ", PHOTOS[13], PHOTOS[11]])},
    {"role": "user", "content": "and now?"},
]


def test_images_of_system_and_tool_turns_answer_as_those_of_a_stock_render_server(
    stock: RenderServer, render: RenderServer, http: HttpEngine
) -> None:
    ours, pixels = (rendered(each, [], messages=TURNS) for each in (render, stock))
    assert ours["token_ids"] == pixels["token_ids"]
    assert len(names(ours)) == 4
    right = generated(http, pixels)
    assert_equal(generated(http, ours), right)
    chat = http.chat([], messages=TURNS)
    assert_equal(top(chat.json()["choices"][0]), right)


def test_images_in_messages_of_both_other_apis_are_named(
    stock: RenderServer, render: RenderServer, http: HttpEngine
) -> None:
    image = data_url(PHOTOS[0])
    input_parts = [
        {"type": "input_text", "text": "m "},
        {"type": "input_image", "image_url": image, "detail": "auto"},
    ]
    responses = {"model": "tiny", "input": [{"role": "user", "content": input_parts}], "max_output_tokens": 8}
    source = {"type": "base64", "media_type": "image/png", "data": image.partition(",")[2]}
    tool = {"type": "tool_use", "id": "c", "name": "t", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    messages = {
        "model": "tiny", "max_tokens": 8, "system": "a system", "messages": [
            {"role": "user", "content": [{"type": "text", "text": "m "}, {"type": "image", "source": source}]},
            {"role": "assistant", "content": [tool]}, {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    (named,) = names(rendered(render, ["m ", PHOTOS[0]]))
    for route, body, count in (("/v1/responses", responses, 1), ("/v1/messages", messages, 2)):
        response = render.post(f"{route}/render", body)
        assert response.status_code == 200, response.text
        ours, pixels = response.json(), stock.post(f"{route}/render", body).json()
        assert names(ours) == [named] * count
        assert ours["token_ids"] == pixels["token_ids"]
        assert_equal(generated(http, sampled(ours, render)), generated(http, sampled(pixels, render)))
    broken = [{**result, "content": [{"type": "image", "source": "no object"}]}]
    for change in (
        {"max_tokens": "x"},
        {"model": "unknown"},
        {"messages": [{"role": "user", "content": broken}]},
    ):
        refused, by_stock = (
            each.post("/v1/messages/render", {**messages, **change}) for each in (render, stock)
        )
        assert refused.status_code == by_stock.status_code >= 400


def told(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the middleware wrote beside the features, where this release puts it."""
    inside = (request["sampling_params"].get("extra_args") or {}).get("ec_transfer_params")
    found: dict[str, Any] = (request.get("ec_transfer_params") or inside)["encoder_service"]
    return found


def pair(render: RenderServer, **body: Any) -> dict[str, Any]:
    """Return a rendered request with two images of different sizes."""
    return rendered(render, ["x ", PHOTOS[6], " y ", PHOTOS[7], " z"], **body)


def each_name(change: Callable[[ImageName], ImageName]) -> Callable[[dict[str, Any]], None]:
    """Return a function that changes the names of a request, but not its identifiers."""

    def changed(request: dict[str, Any]) -> None:
        read = map(ImageName.from_hex, told(request)["images"])
        told(request)["images"] = [change(name).hex() for name in read if name is not None]

    return changed


def of_another_key(request: dict[str, Any]) -> None:
    other = NameSigner(bytes(32))
    request["features"]["mm_hashes"]["image"] = list(other.names(told(request)["images"]))


def as_video(request: dict[str, Any]) -> None:
    features = request["features"]
    features["mm_hashes"]["video"] = [names(request)[0]]
    features["mm_placeholders"]["video"] = [{"offset": 1, "length": 1}]


def sealed(request: dict[str, Any]) -> None:
    images = told(request)["images"]
    request["features"]["mm_hashes"]["image"] = [a + b for a, b in zip(images, names(request), strict=True)]
    told(request)["images"] = []


def without_parameters(request: dict[str, Any]) -> None:
    request["sampling_params"]["extra_args"] = None
    request["ec_transfer_params"] = None


def features(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that replaces what the features say of images under a key."""

    def changed(request: dict[str, Any]) -> None:
        request["features"][key]["image"] = change(request["features"][key]["image"])

    return changed


def spans(**changes: int) -> Callable[[Any], Any]:
    return lambda ranges: [
        {key: value + changes.get(key, 0) for key, value in ranges[0].items()},
        *ranges[1:],
    ]


def in_another_order(request: dict[str, Any]) -> None:
    for by_modality in filter(None, request["features"].values()):
        by_modality["image"].reverse()


def nulls(request: dict[str, Any]) -> None:
    request["features"] |= {key: {"image": [None, None]} for key in ("kwargs_data", "mm_metadata")}


GRID = grid_item(Grid(1, 40, 40))
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], int]] = {
    "no names": (lambda request: told(request).update(images=[]), 403),
    "no parameters": (without_parameters, 403),
    "a flood of names": (lambda request: told(request)["images"].extend(told(request)["images"] * 50_000), 200),
    "parameters that are no object": (lambda request: request.update(ec_transfer_params=[1]), 200),
    "identifiers of another key": (of_another_key, 403),
    "names of other files": (each_name(lambda name: replace(name, digest=bytes(32))), 403),
    "names of other grids": (each_name(lambda name: replace(name, grid=Grid(1, name.grid.w, name.grid.h))), 403),
    "names of another tenant": (lambda request: request.update(cache_salt="another"), 403),
    "identifiers exchanged": (features("mm_hashes", lambda each: each[::-1]), 400),
    "an identifier as that of a video": (as_video, 403),
    "identifiers that contain their names": (sealed, 200),
    "an unknown image without pixels": (features("mm_hashes", lambda each: ["5e" * 32, each[1]]), 400),
    "hashes that are no list": (features("mm_hashes", lambda each: each[0]), 400),
    "hashes that are numbers": (features("mm_hashes", lambda each: [1, 2]), 400),
    "one hash too many": (features("mm_hashes", lambda each: [*each, each[0]]), 400),
    "no placeholders": (lambda request: request["features"].update(mm_placeholders={}), 400),
    "a placeholder without a token of a row": (features("mm_placeholders", spans(length=-1)), 400),
    "a placeholder with a token too many": (features("mm_placeholders", spans(length=1)), 400),
    "images in another order, with their placeholders": (in_another_order, 200),
    "a placeholder over another one": (features("mm_placeholders", lambda each: [each[0]] * 2), 400),
    "a placeholder beyond the prompt": (features("mm_placeholders", spans(offset=5000)), 400),
    "features that are no object": (lambda request: request.update(features=[names(request)]), 403),
    "grids of a caller": (features("mm_metadata", lambda each: [GRID] * 2), 200),
    "tensors of a caller": (features("kwargs_data", lambda each: [GRID] * 2), 200),
    "grids and tensors that are null": (nulls, 200),
    "one grid too few": (features("mm_metadata", lambda each: each[:1]), 400),
    "tensors that are garbage": (features("kwargs_data", lambda each: ["x"] * 2), 200),
    "other servers, priorities and traces": (
        lambda request: told(request).update(
            submitted_to=["10.0.0.1:1", "x"], priority=99, traceparent="zz", stored=["a", -5]
        ),
        200,
    ),
}  # fmt: skip


@pytest.mark.attack("a request of tokens with names, grids or placeholders of its caller")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_features_fail_alone_or_change_nothing(
    render: RenderServer, http: HttpEngine, kind: str
) -> None:
    change, status = HOSTILE[kind]
    good = pair(render)
    hostile = pair(render)
    change(hostile)
    response = http.post(GENERATE, hostile)
    assert response.status_code == status, response.text
    if change is of_another_key:
        assert "different keys: set name_key_file" in response.text
    expected = generated(http, good)
    if status == 200:
        assert_equal(steps(response.json()["choices"][0]), expected)


@pytest.mark.attack("a request of tokens with names, grids or placeholders of its caller")
@pytest.mark.parametrize("moved", [{"offset": 1}, {"offset": -1}])
def test_a_moved_placeholder_changes_no_answer_but_its_own(
    render: RenderServer, http: HttpEngine, moved: dict[str, int]
) -> None:
    """As in vLLM, which checks no tokens: blocks of both are different ones."""
    good, hostile = pair(render), pair(render)
    features("mm_placeholders", spans(**moved))(hostile)
    changed = generated(http, hostile)
    right = generated(http, good)
    with pytest.raises(AssertionError):
        assert_equal(changed, right)
    assert_equal(generated(http, pair(render, cache_salt="nobody else's blocks")), right)


def test_an_image_that_breaks_off_fails_the_request_of_its_tokens(
    render: RenderServer, http: HttpEngine
) -> None:
    """Its header is sound, so it is rendered."""
    whole = photo(200, 200, 4420, "PNG")
    response = http.post(GENERATE, rendered(render, ["x ", PHOTOS[6], whole[: len(whole) // 2]]))
    assert response.status_code == 400
    assert "image 1: unsupported, damaged or truncated PNG" in response.text


def test_pixels_of_a_stock_render_server_go_to_the_own_tower(
    stock: RenderServer, render: RenderServer, http: HttpEngine, right: dict[str, list[dict[str, float]]]
) -> None:
    request = rendered(stock, CASES["four images"])
    assert request["token_ids"] == rendered(render, CASES["four images"])["token_ids"]
    before = images_of_the_service(http)
    assert_equal(generated(http, request), right["four images"])
    assert images_of_the_service(http) == before


@pytest.mark.attack("pixels under the identifier of another image")
def test_pixels_under_an_identifier_reach_no_tower(
    stock: RenderServer, render: RenderServer, http: HttpEngine
) -> None:
    named, pixels = pair(render), rendered(stock, ["x ", PHOTOS[6], " y ", PHOTOS[7], " z"])
    expected = generated(http, named)
    other = rendered(stock, ["x ", PHOTOS[11], " y ", PHOTOS[12], " z"])["features"]["kwargs_data"]
    pixels["features"]["mm_hashes"]["image"] = names(named)
    pixels["features"]["kwargs_data"] = other
    assert http.post(GENERATE, pixels).status_code == 403
    named["features"]["kwargs_data"] = other
    assert_equal(generated(http, named), expected)


@pytest.mark.attack("pixels under the identifier of another image")
def test_no_route_takes_an_identifier_for_other_pixels(render: RenderServer, http: HttpEngine) -> None:
    request = pair(render)
    (identifier, _), image = names(request), {**content([PHOTOS[3]])[0]}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [{**image, "uuid": identifier}]}]}
    assert http.post("/tokenize", body).status_code == 403
    embeds = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}, "uuid": identifier}
    assert RenderServer.render(render, [embeds]).status_code == 403
    # As its own `uuid` of an image, it is only a word of the caller.
    other = rendered(render, [PHOTOS[3]])
    response = RenderServer.render(render, body["messages"][0]["content"])
    assert names(response.json()) == names(other)


def test_content_parts_are_named_and_laid_out(
    render: RenderServer, http: HttpEngine, right: dict[str, list[dict[str, float]]]
) -> None:
    request = rendered(render, CASES["one image three times"])
    tokens, ranges = list(request["token_ids"]), request["features"]["mm_placeholders"]["image"]
    for place in reversed(ranges):
        del tokens[place["offset"] : place["offset"] + place["length"] - 1]
    urls = [data_url(each) for each in CASES["one image three times"] if isinstance(each, bytes)]
    parts = [{"type": "image_url", "url": url} for url in urls]
    body = {"token_ids": tokens, "sampling_params": request["sampling_params"], "content_parts": parts}
    assert_equal(generated(http, body), right["one image three times"])
    before = images_of_the_service(http)
    # Names of another tenant, so that no cache has them.
    assert_equal(generated(http, {**body, "cache_salt": "parts"}), right["one image three times"])
    assert images_of_the_service(http) == before + 2
    for broken in (
        [{"type": "image_url"}] * 4,
        [{"type": "image_url", "url": "data:image/png;base64,AA"}] * 4,
    ):
        assert http.post(GENERATE, {**body, "content_parts": broken}).status_code == 400


def test_a_render_that_vllm_refuses_is_counted(render: RenderServer) -> None:
    before = renders(render)
    rendered(render, [PHOTOS[0]])
    assert RenderServer.render(render, content([PHOTOS[0]]), model="unknown").status_code == 404
    assert RenderServer.render(render, content([b"no image"])).status_code == 400
    now = renders(render)
    assert {result: now[result] - before[result] for result in now} == {"named": 1, "refused": 1}


def renders(server: HttpEngine) -> dict[str, float]:
    """Return how many renders with images had each result."""
    counted = server.metrics()
    return {
        result: counted.get(f'vllm:encoder_service_renders_total{{result="{result}"}}', 0)
        for result in ("named", "refused")
    }
