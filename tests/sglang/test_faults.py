"""Damaged images, a service that dies, one of another model: a request fails alone, and the engine goes on."""

import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest

from testing.answers import Part, data_url
from testing.photos import photo
from testing.sglang_engine import SglangEngine, answer_of
from tests.engines.answers import PROMPTS, Own, assert_equal
from tests.sglang.conftest import LONG, UNREADABLE, checkpoint_of, let_it_encode
from tests.sglang.counters import fetches
from tests.vllm.restartable import Restartable

GOOD = photo(128, 128, 61)
JPEG = photo(640, 480, 62)
REFUSED = {
    "no image": (data_url(b"\x89PNG, and no image at all"), "image 1: "),
    "cut short": (data_url(JPEG[: len(JPEG) // 2]), "image 1: "),
    "no base64": ("data:image/png;base64,=!=", "image 1: the data URL is not base64"),
    "a host that is not allowed": ("http://169.254.169.254/latest", "image 1: images from 169.254.169.254"),
    "a file of this machine": ("/etc/hostname", "image 1 is a path, and no files are read"),
    "a URL of a file": ("file:///etc/hostname", "image 1 is a path, and no files are read"),
}
PATIENCE_S = 300.0


@pytest.mark.story("an image that cannot be encoded")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_image_is_400_with_our_text_and_the_next_request_is_served(
    engine: SglangEngine, own: Own, kind: str
) -> None:
    url, told = REFUSED[kind]
    response = engine.generate(["x ", GOOD, "y ", b"the second image"], image_data=[data_url(GOOD), url])
    assert response.status_code == 400
    assert told in response.text
    assert_equal(engine.ask(PROMPTS["one png"]), own(PROMPTS["one png"]))


def test_a_chat_with_a_wrong_image_is_400_with_our_text(engine: SglangEngine) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(JPEG[: len(JPEG) // 2])}}]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    response = httpx.post(f"{engine.url}/v1/chat/completions", json=asked, timeout=600)
    assert response.status_code == 400
    assert "image 0: " in response.text


@pytest.mark.story("callers hang up")
def test_hanging_up_during_an_encode_affects_no_other_request(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    service.signal(signal.SIGSTOP)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{engine.url}/generate",
                json={"text": "<image>", "image_data": [data_url(photo(300, 200, 63))]},
                timeout=2,
            )
    finally:
        service.signal(signal.SIGCONT)
    assert_equal(engine.ask(PROMPTS["one jpeg"]), own(PROMPTS["one jpeg"]))


def until_served(engine: SglangEngine) -> None:
    """Ask about new images, until the rows of one come from the service."""
    deadline = time.monotonic() + PATIENCE_S
    for seed in count(int(time.monotonic())):
        before = engine.fetched()
        engine.ask(["is it back? ", photo(100, 100, seed)], tokens=1)
        if engine.fetched() > before:
            return
        assert time.monotonic() < deadline, engine.log.read_text()
        time.sleep(0.5)


@pytest.mark.story("without the service")
def test_without_the_service_the_own_tower_encodes_until_it_is_back(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    service.kill()
    try:
        engine.forget()
        before = engine.fetched(), engine.by_own_tower()
        assert_equal(engine.ask(PROMPTS["text between"]), own(PROMPTS["text between"]))
        assert engine.fetched() == before[0]
        assert engine.by_own_tower() >= before[1] + 2, "and that of a caller who has left, if it comes late"
    finally:
        service.start()
    until_served(engine)


def asked_as_the_service_dies(
    engine: SglangEngine, service: Restartable, parts: Sequence[Part]
) -> httpx.Response:
    """Ask a long prompt, and kill the service after its first chunk."""
    server = service.process
    let_it_encode(service, parts)
    after = len(server.lines)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, parts)
        deadline = time.monotonic() + PATIENCE_S
        while not fetches(server, after):
            assert time.monotonic() < deadline, engine.log.read_text()
            time.sleep(0.001)
        server.kill()
        return answer.result()


def assert_own_tower_takes_over(engine: SglangEngine, service: Restartable, own: Own) -> None:
    """The service dies in a prefill; the answer is right nevertheless, and the next images are the service's again."""
    before = engine.fetched(), engine.by_own_tower("rows")
    assert_equal(answer_of(asked_as_the_service_dies(engine, service, LONG)), own(LONG))
    assert engine.fetched() > before[0], "the first chunk came from the service"
    assert engine.by_own_tower("rows") > before[1]
    assert engine.process.poll() is None
    service.start()
    until_served(engine)


@pytest.mark.story("the service dies during a prefill")
def test_a_service_that_dies_within_a_prefill_is_replaced_by_the_own_tower(
    engine: SglangEngine, service: Restartable, own: Own
) -> None:
    assert_own_tower_takes_over(engine, service, own)


def assert_a_request_without_rows_ends(
    engine: SglangEngine, service: Restartable, own: Own, name: str
) -> None:
    """The service dies in a prefill, and the engine cannot read the last image: 503, and nothing stays of it."""
    parts, before = UNREADABLE[name], engine.counted("lost_images")
    response = asked_as_the_service_dies(engine, service, parts)
    assert response.status_code == 503, response.text
    assert "image 1: the encoder service does not answer, and SGLang cannot read" in response.text
    assert engine.counted("lost_images") == before + 1
    service.start()
    until_served(engine)
    assert_equal(engine.ask(parts), own(parts))


@pytest.mark.story("rows are lost before the prefill")
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_request_without_rows_is_503_and_succeeds_when_retried(
    engine: SglangEngine, service: Restartable, own: Own, name: str
) -> None:
    assert_a_request_without_rows_ends(engine, service, own, name)


@pytest.mark.story("a service of another model")
def test_a_service_of_another_model_is_not_asked(
    engine: SglangEngine, service: Restartable, own: Own, tmp_path: Path
) -> None:
    service.kill()
    other = Restartable(checkpoint_of("qwen3_vl", tmp_path, seed=1))
    other.endpoint = service.endpoint
    other.start()
    try:
        engine.forget()
        for name in ("one png", "text between"):
            assert_equal(engine.ask(PROMPTS[name]), own(PROMPTS[name]))
        assert other.encodes() == 0
    finally:
        other.kill()
    service.start()
    until_served(engine)
