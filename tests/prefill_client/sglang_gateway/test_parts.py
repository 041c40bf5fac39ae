"""Parsing SGLang's requests: strict, with the field's name in every refusal, before anything is loaded."""

import json
from typing import Any

import pytest

from encoder_contract.errors import EncoderError, ForbiddenError, ImageLimitError, InvalidRequestError
from prefill_client.sglang_gateway.parts import Address, AllowedReceivers, Part
from tests.sglang_messages import body_of

DATA = "data:image/jpeg;base64,/9j/4AAQ"


def part(*items: Any, **other: Any) -> Part:
    return Part.parse(json.dumps(body_of(items, **{"port": 40000, **other})).encode())


def refused(*items: Any, **other: Any) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        part(*items, **other).urls(4)
    return caught.value


def test_urls_base64_and_harmless_options_are_accepted() -> None:
    items = [
        DATA,
        "/9j/4AAQ",  # base64 of a JPEG begins like a path
        "https://example.org/a.jpg",
        {"url": DATA, "content_hash": "sha256:00", "detail": "high", "max_dynamic_patch": 4},
        {"url": DATA, "preprocess_kwargs": None, "not_known_yet": None},
    ]
    assert part(*items).urls(5) == [DATA, "data:;base64,/9j/4AAQ", "https://example.org/a.jpg", DATA, DATA]


@pytest.mark.parametrize("key", ["preprocess_kwargs", "max_long_side_pixel", "not_known_yet"])
def test_options_that_may_change_pixels_are_refused_by_name(key: str) -> None:
    error = refused(DATA, {"url": DATA, key: 512})
    assert isinstance(error, InvalidRequestError)
    assert f"item 1: {key}" in error.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "FILE:/etc/passwd"])
def test_files_are_refused(url: str) -> None:
    assert isinstance(refused(url), ForbiddenError)


@pytest.mark.parametrize("item", [None, 3, "", {"detail": "low"}, {"url": None}, ["nested"]])
def test_an_item_without_a_url_is_refused(item: Any) -> None:
    assert "item 0 has no url" in refused(item).message


def test_audio_and_too_many_images_are_refused() -> None:
    assert part(DATA, modality="VIDEO").urls(4) == [DATA]
    assert "AUDIO is not served" in refused(DATA, modality="AUDIO").message
    assert isinstance(refused(*[DATA] * 5), ImageLimitError)


@pytest.mark.parametrize(
    "change",
    [
        *({"mm_items": items} for items in (None, [], "x", {})),
        *({"part_idx": index} for index in (-1, 1, True, "0", None)),
        *({"num_parts": count} for count in (0, 1.0, None)),
        *({"req_id": name} for name in ("", None, 3, "x" * 513)),
        *({"embedding_port": port} for port in ("40000", [], ["40000"], True, [40000] * 257)),
        {"prefill_host": None},
        *({name: "half \ud800 of a pair"} for name in ("req_id", "prefill_host", "modality")),
        {"mm_items": [{"url": DATA, "detail": "\udc00"}]},
        {"modality": "SMELL"},
        {"modality": None},
        {"modality": []},
    ],
)
def test_a_malformed_part_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Part.parse(json.dumps(body_of([DATA], port=40000) | change).encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'"x"', b"[" * 100_000])
def test_a_body_without_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        Part.parse(body)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    body = json.dumps(body_of([DATA], port=40000) | {"req_id": "a \N{GRINNING FACE}"})
    assert "\\ud83d" in body
    assert Part.parse(body.encode()).req_id == "a \N{GRINNING FACE}"


def test_the_request_names_its_receivers() -> None:
    assert part(DATA).receivers == (Address("127.0.0.1", 40000),)
    assert part(DATA, port=[1, 2]).receivers == (Address("127.0.0.1", 1), Address("127.0.0.1", 2))
    assert part(DATA, port=None).receivers is None
    assert Address.parse("[::1]:7") == Address("::1", 7)
    assert Address("::1", 7).url == "tcp://[::1]:7"
    for text in ("host", "host:", "host:x", "", "127.0.0.1:" + "9" * 5000):
        with pytest.raises(InvalidRequestError):
            Address.parse(text)


def test_only_allowed_networks_and_ports_receive_rows() -> None:
    allowed = AllowedReceivers(["10.1.0.0/16", "::1"], "2000-3000")
    for address in (Address("10.1.2.3", 2000), Address("10.1.2.3", 3000), Address("::1", 2500)):
        allowed.check(address)
    for address in (
        *(Address("10.2.0.1", 2500), Address("127.0.0.1", 2500), Address("::2", 2500)),
        *(Address("10.1.2.3", 1999), Address("10.1.2.3", 3001), Address("10.1.2.3", -1)),
        *(Address("localhost", 2500), Address("10.1.2.3@evil", 2500), Address("", 2500)),
        Address("::1%lo]:0;[fd00::5", 2500),  # to ZeroMQ: from ::1 to fd00::5
    ):
        with pytest.raises(ForbiddenError):
            allowed.check(address)


@pytest.mark.parametrize(
    ("network", "ports"), [("10.1", "1-2"), ("10.0.0.1/8", "1-2"), ("::1", "5-4"), ("::1", "0")]
)
def test_invalid_receiver_rules_are_refused(network: str, ports: str) -> None:
    with pytest.raises(ValueError):
        AllowedReceivers([network], ports)
