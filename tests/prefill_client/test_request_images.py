"""The images and videos in a request's JSON, and which requests are refused."""

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.errors import ForbiddenError, InvalidRequestError
from encoder_contract.geometry import Grid
from prefill_client.vllm.image_name import ImageName, NameSigner, RequestInfo
from prefill_client.vllm.parts import template_text
from prefill_client.vllm.request_images import (
    BATCH,
    CHAT,
    RESPONSES,
    ApiShape,
    NamedImage,
    RequestImages,
    check_other_route,
)
from prefill_client.vllm.videos import Sampling, UnsupportedVideoError, VideoTokenCounts


def request(form: ApiShape, key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {form.messages: [{"role": "user", key: list(parts)}]}


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize(("form", "key"), [(CHAT, "content"), (RESPONSES, "content"), (RESPONSES, "output")])
@pytest.mark.parametrize("by", ["type", "key", "null key"])
def test_embeddings_of_every_modality_are_refused(modality: str, form: ApiShape, key: str, by: str) -> None:
    kind = f"{modality}_embeds"
    parts: dict[str, dict[str, Any]] = {
        "type": {"type": kind},
        "key": {kind: {}, "uuid": "x"},
        "null key": {"type": "text", kind: None, "uuid": "x"},
    }
    with pytest.raises(ForbiddenError, match=kind):
        RequestImages(request(form, key, {"type": "text", "text": "x"}, parts[by]), form)


# As clients write them that have one class for all parts.
NULLS = dict.fromkeys(
    (
        "text",
        "image_url",
        "video_url",
        "audio_url",
        "input_audio",
        "image_pil",
        "image_embeds",
        "file",
        "uuid",
    )
)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(("form", "kind"), [(CHAT, "text"), (RESPONSES, "input_text")])
def test_null_fields_change_no_part(form: ApiShape, kind: str, role: str) -> None:
    text = {**NULLS, "type": kind, "text": "image_embeds"}
    body = {form.messages: [{"role": role, "content": [text]}]}
    assert len(RequestImages(body, form)) == 0
    check_other_route(body, "/tokenize", SIGNER, has_tower=False)
    parts = [text, {**NULLS, **image("a")}, {**NULLS, **image("b"), "uuid": "u"}]
    assert RequestImages(request(form, "content", *parts), form).references() == [("a", ""), ("b", "u")]
    if form is CHAT:
        assert RequestImages(request(form, "content", {**NULLS, **video("c")}), form).video_urls() == ["c"]


def test_null_options_choose_no_frames() -> None:
    body = {
        "media_io_kwargs": {"video": {"fps": 1, "max_frames": None}, "image": None},
        "mm_processor_kwargs": {"max_pixels": None, "fps": None},
    }
    assert Sampling.read(body) == Sampling(fps=1)


def test_the_type_decides_what_a_part_with_several_keys_is() -> None:
    parts = [{**image("a"), **video("b"), "type": kind} for kind in ("text", "image_url", "video_url")]
    images = RequestImages(request(CHAT, "content", *parts), CHAT)
    assert (images.references(), images.video_urls()) == ([("a", "")], ["b"])


def test_other_fields_of_an_image_stay() -> None:
    """The chat template may read them."""
    fields = {"label": "seven", "cache_control": {"type": "ephemeral"}, "detail": "high"}
    for form, stand_in in product((CHAT, RESPONSES), ("", "data:x")):
        body = request(form, "content", {**image("a"), **fields, "text": None, "uuid": "mine"})
        images = RequestImages(body, form)
        images.replace([[NamedImage("name", [1, 4, 4], stand_in)]], RequestInfo())
        (part,) = body[form.messages][0]["content"]
        assert part.items() >= fields.items()
        assert part["uuid"] == "name"
        assert "text" not in part
        assert ("image_url" in part) == bool(stand_in)


def test_other_fields_of_a_text_stay_where_a_video_divides_it() -> None:
    text = {"type": "text", "text": "1<|video_pad|>2", "label": "seven"}
    body = request(CHAT, "content", text, video("b"))
    RequestImages(body, CHAT)
    assert [part.get("label") for part in body["messages"][0]["content"][:3]] == ["seven", None, "seven"]


@pytest.mark.parametrize("parameters", ["x", [1], 7])
def test_ec_transfer_params_must_be_an_object(parameters: object) -> None:
    body = request(CHAT, "content", image("data:x")) | {"ec_transfer_params": parameters}
    with pytest.raises(InvalidRequestError, match="ec_transfer_params must be an object"):
        RequestImages(body, CHAT)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def test_a_video_is_replaced_by_text_and_pictures() -> None:
    text = {"type": "text", "text": "x"}
    body = request(CHAT, "content", text, image("a"), video("b"), image("c"), text)
    body |= {"mm_processor_kwargs": {"num_frames": 4}, "media_io_kwargs": {"video": {"fps": 1}}}
    images = RequestImages(body, CHAT)
    assert len(images) == 3
    assert (images.references(), images.video_urls()) == ([("a", ""), ("c", "")], ["b"])
    assert images.in_order(["a", "c"], ["b"]) == ["a", "b", "c"]
    still, pair = NamedImage("still", [1, 4, 4]), NamedImage("pair", [1, 2, 2])
    images.replace([[still], ["<0.5 seconds>", pair, "end"], [still]], RequestInfo())
    content = body["messages"][0]["content"]
    assert [part.get("uuid") or part["text"] for part in content] == [
        "x", "still", "<|vision_start|>", "<0.5 seconds>", "pair", "end", "<|vision_end|>", "still", "x",
    ]  # fmt: skip
    assert content[4] == {
        "type": "image_embeds",
        "image_embeds": {"image_grid_thw": [1, 2, 2]},
        "uuid": "pair",
    }
    assert not {"mm_processor_kwargs", "media_io_kwargs"} & body.keys(), "vLLM would hash them into the names"


def shown(*contents: object) -> str:
    """Return the text of the users' messages of a request, with the URLs of its videos where they are shown."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content} for content in contents]}
    images = RequestImages(body, CHAT)
    images.replace([[f"[{url}]"] for url in images.video_urls()], RequestInfo())
    return " ".join("".join(part["text"] for part in each["content"]) for each in body["messages"])


def test_videos_take_the_first_placeholders_of_the_prompt() -> None:
    """As in vLLM, which does not see who has written a placeholder."""
    pad = "<|video_pad|>"
    marked = "<|vision_start|>{}<|vision_end|>".format
    assert shown(f"{pad}.", [video("a"), f"b {pad}"]) == f"[a]. {marked(pad)}b {pad}"
    assert shown([video("a"), f"b {pad}"]) == f"{marked('[a]')}b {pad}"
    text = {"type": "text", "text": f"1 {pad}{pad} 2"}
    assert shown([video("a"), text, video("b"), video("c")]) == (
        f"{marked('[a]')}1 [b][c] 2{marked(pad)}{marked(pad)}"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{"description": "<|video_pad|>"}]},
        {
            "messages": [
                {"role": "system", "content": "<|video_pad|>"},
                {"role": "user", "content": [video("b")]},
            ]
        },
        {"messages": [{"role": "user", "content": ["<|image_pad|>", video("b")]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}, video("b")]}]},
        {"messages": [{"role": "user", "content": [{**image("a"), "label": "<|image_pad|>"}, video("b")]}]},
    ],
)
def test_placeholders_where_no_video_can_be_shown_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedVideoError, match="_pad"):
        RequestImages(request(CHAT, "content", video("b")) | changes, CHAT)
    template = {"chat_template": "<|image_pad|><|video_pad|>"}  # of the request's own
    RequestImages(request(CHAT, "content", video("b")) | template, CHAT)


def test_an_answers_usage_shows_the_tokens_of_videos() -> None:
    tokens = VideoTokenCounts(rows=20, all=31)
    for images, expected in ((20, {"video": 31}), (25, {"image": 5, "video": 31})):
        text = '"multimodal_tokens":{"image":20}'
        usage = {"prompt_tokens_details": {"multimodal_tokens": {"image": images}}}
        answer = json.dumps({"text": text, "usage": usage}, separators=(",", ":"))
        usage = {"prompt_tokens_details": {"multimodal_tokens": expected}}
        assert json.loads(tokens.in_usage(answer.encode())) == {"text": text, "usage": usage}


def test_the_conversations_of_a_batch_are_replaced() -> None:
    messages = [
        [{"role": "user", "content": [image("a")]}],
        [{"role": "user", "content": [image("b"), image("c")]}],
    ]
    images = RequestImages({"messages": messages}, BATCH)
    assert [url for url, _ in images.references()] == ["a", "b", "c"]
    assert images.loses_parameters, "vLLM makes a request for each conversation, without ec_transfer_params"
    images.replace([[NamedImage(name, [1, 4, 4])] for name in "xyz"], RequestInfo())
    parts = [part for conversation in messages for message in conversation for part in message["content"]]
    assert [part["uuid"] for part in parts] == ["x", "y", "z"]
    with pytest.raises(InvalidRequestError, match="/v1/chat/completions"):
        RequestImages({"messages": [[{"role": "user", "content": [video("b")]}]]}, BATCH)


@pytest.mark.parametrize("url", [None, {}, {"url": None}, ""])
def test_an_image_that_was_sent_with_a_uuid_needs_no_url(url: object) -> None:
    parts = ({"type": "image_url", "image_url": url, "uuid": "x"}, {"image_pil": None, "uuid": "y"})
    body = request(CHAT, "content", *parts, {**image("a"), "uuid": "z"})
    assert RequestImages(body, CHAT).references() == [("", "x"), ("", "y"), ("a", "z")]
    with pytest.raises(InvalidRequestError, match="no image_url"):
        RequestImages(request(CHAT, "content", {"type": "image_url", "image_url": url}), CHAT).references()


ANTHROPIC = {"type": "image", "source": {"type": "base64", "data": "AA"}}
SCHEMA = {"type": "object", "properties": {"image": {"type": "string"}, "image_url": {"type": "string"}}}
SIGNER = NameSigner(bytes(32))
IDENTIFIER = SIGNER.identifier(ImageName(bytes(32), Grid(1, 4, 4), bytes(16)))


@pytest.mark.parametrize("part", [image("data:x"), ANTHROPIC, {"image_url": "x"}, video("data:x")])
def test_images_of_other_routes_need_the_engines_own_tower(part: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    for body in (chat, {"state": "a decision", "images": ["data:x"]}, {"videos": ["data:x"]}):
        check_other_route(body, "/v1/messages", SIGNER, has_tower=True)
        with pytest.raises(InvalidRequestError, match=r"images of /v1/messages .* no vision tower"):
            check_other_route(body, "/v1/messages", SIGNER, has_tower=False)


def test_other_routes_take_no_embeddings_and_no_names_of_ours() -> None:
    """An identifier that a caller has seen must not stand for another image in the caches of the API server."""
    refused: list[Any] = [
        {"messages": [{"content": [{**image("data:x"), "uuid": IDENTIFIER}]}]},
        {"features": {"mm_hashes": {"image": [IDENTIFIER]}}},
        [[{"image_embeds": {}}]],
    ]
    for body in refused:
        with pytest.raises(ForbiddenError):
            check_other_route(body, "/pooling", SIGNER, has_tower=True)
    text = {"input": "an image in words", "type": "image_is_no_type", "hash": "0" * 64, "odd": "\ud800" * 64}
    for body in (None, 3, "x", text, {"type": ["image"]}, SCHEMA):
        check_other_route(body, "/pooling", SIGNER, has_tower=False)


def test_the_check_of_a_prompt_of_tokens_costs_less_than_its_json() -> None:
    body = {"model": "m", "input": list(range(300_000))}
    text = json.dumps(body)

    def cpu_s(work: Callable[[], object]) -> float:
        began_s = time.thread_time()
        work()
        return time.thread_time() - began_s

    check = partial(check_other_route, body, "/v1/embeddings", SIGNER, has_tower=False)
    costs = [(cpu_s(check), cpu_s(partial(json.loads, text))) for _ in range(5)]
    assert min(ours for ours, _ in costs) < min(parsing for _, parsing in costs) / 2


@pytest.mark.parametrize("part", [{"video_url": "b"}, {"type": "video_url", "video_url": "b"}, video("b")])
def test_a_video_is_found_by_its_type_or_its_key(part: dict[str, Any]) -> None:
    assert RequestImages(request(CHAT, "content", part), CHAT).video_urls() == ["b"]


@pytest.mark.parametrize(
    ("form", "part", "message"),
    [
        (RESPONSES, video("b"), "/v1/chat/completions"),
        (CHAT, video("data:video/jpeg;base64,AA,BB"), "send a video file"),
        (CHAT, {"type": "video_url", "video_url": None, "uuid": "x"}, "needs its video_url"),
    ],
)
def test_unsupported_videos_are_refused(form: ApiShape, part: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        RequestImages(request(form, "content", part), form).video_urls()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_kwargs": {"add_vision_id": True}}, "add_vision_id"),
        ({"media_io_kwargs": {"image": {"image_mode": "RGBA"}}}, "media_io_kwargs.image is not supported"),
        ({"media_io_kwargs": {"video": {"max_frames": 9}}}, "media_io_kwargs.video.max_frames is not"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps must be one number above 0"),
        ({"media_io_kwargs": {"video": {"fps": float("nan")}}}, "video.fps must be"),
        ({"media_io_kwargs": {"video": [2]}}, "media_io_kwargs.video must be an object"),
        ({"media_io_kwargs": "fast"}, "media_io_kwargs must be an object"),
        ({"mm_processor_kwargs": {"do_sample_frames": True}}, "mm_processor_kwargs.do_sample_frames is not"),
        ({"mm_processor_kwargs": {"size": {}}}, "mm_processor_kwargs.size is not"),
        ({"mm_processor_kwargs": {"fps": [2.0, 1.0]}}, "mm_processor_kwargs.fps must be one number"),
        ({"mm_processor_kwargs": {"fps": 10**400}}, "mm_processor_kwargs.fps must be one number"),
        ({"mm_processor_kwargs": {"num_frames": 4.5}}, "num_frames must be one whole number"),
        ({"mm_processor_kwargs": {"num_frames": True}}, "num_frames must be one whole number"),
        ({"mm_processor_kwargs": {"num_frames": 4, "fps": 2}}, "fps or num_frames, not both"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        RequestImages(request(CHAT, "content", video("b")) | options, CHAT)


@pytest.mark.parametrize("template", ["{{ messages }}", "{% for message in messages %}" * 200, "{{\0}}", ""])
def test_a_chat_template_is_the_path_of_a_file_or_itself(template: str, tmp_path: Path) -> None:
    assert template_text(template) == template
    file = tmp_path / "template.jinja"
    file.write_text(template)
    assert template_text(str(file)) == template
