"""An SGLang with nothing of ours installed, fed by the gateway, against the same SGLang's own tower."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from testing.answers import Answer, Part, data_url
from testing.photos import photo
from testing.sglang_engine import IMAGE, SglangEngine, serving
from tests.sglang.conftest import assert_equal
from tests.sglang_gateway_process import GatewayProcess, running_gateway
from tests.vllm.restartable import Restartable

JPEG = photo(640, 480, 62)
DAMAGED = JPEG[: len(JPEG) // 2]
PROMPTS: dict[str, list[Part]] = {
    "text alone": ["Say something about nothing."],
    "one png": [photo(128, 128, 1, "PNG"), "What is this?"],
    "one jpeg": ["x ", photo(333, 222, 2), "What is this?"],
    "text between": ["A: ", photo(256, 192, 3, "PNG"), " and B: ", photo(320, 320, 4), " differ how?"],
    "the same twice": [photo(256, 256, 5), "and", photo(256, 256, 5), "same?"],
    "sixteen": [part for seed in range(16) for part in (f"{seed}: ", photo(240, 250, 20 + seed))],
}
"""Images have at most 64 tokens, so several are in a chunk of 96, and some across two."""
# What a control must differ by: a hundred times the largest difference that equal images have.
DIFFERENT = 1e-3
# SGLang counts a failed check of health every so many seconds, and leaves an encoder out after three.
HEALTH_S = 1.0


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> dict[str, Answer]:
    """The answers of an SGLang as it is, by its own tower."""
    with serving(checkpoint) as engine:
        return {name: engine.ask(parts) for name, parts in PROMPTS.items()}


@contextmanager
def fed(
    checkpoint: Path, service: Restartable, *flags: str, encoders: int, back_end: str, **settings: object
) -> Iterator[tuple[SglangEngine, GatewayProcess]]:
    """Run an SGLang of that back end, and a gateway that is so many encoders to it; 0: one without a path."""
    with running_gateway(service.endpoint, language_model=checkpoint, **settings) as gateway:
        urls = [f"{gateway.url}/v{number}" for number in range(encoders)] or [gateway.url]
        given = ["--language-only", "--encoder-transfer-backend", back_end, *flags, "--encoder-urls", *urls]
        variables = {
            "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL": str(HEALTH_S),
            "SGLANG_ENCODER_RECV_TIMEOUT": "60",
        }
        with serving(checkpoint, *given, environment=variables) as engine:
            yield engine, gateway


def assert_alive(engine: SglangEngine, own: dict[str, Answer]) -> None:
    """The engine answers as before; one that died refuses connections."""
    assert engine.process.poll() is None, engine.log.read_text()
    assert_equal(engine.ask(PROMPTS["one png"]), own["one png"])


def test_an_engine_with_zmq_to_tokenizer_answers_as_by_its_own_tower_and_survives_errors(
    checkpoint: Path, service: Restartable, own: dict[str, Answer]
) -> None:
    with fed(checkpoint, service, encoders=4, back_end="zmq_to_tokenizer", part_s=40) as (engine, gateway):
        for name, parts in PROMPTS.items():
            before, images = gateway.count("images"), sum(isinstance(part, bytes) for part in parts)
            assert_equal(engine.ask(parts), own[name])
            assert gateway.count("images") - before == images, f"{name}: SGLang used its own tower"
        assert gateway.count("parts", 'outcome="served"') > len(PROMPTS)
        other = engine.ask([photo(128, 128, 99, "PNG"), "What is this?"])
        assert other.distance(own["one png"]) > DIFFERENT

        # The same image again, beside others: it is not encoded again.
        encoded = gateway.count("images", 'source="encoded"')
        engine.forget()
        engine.ask(["again: ", photo(128, 128, 1, "PNG")])
        assert gateway.count("images", 'source="encoded"') == encoded

        refused = engine.generate(["x ", b"", "?"], image_data=[data_url(DAMAGED)])
        assert refused.status_code == 503
        assert gateway.count("parts", 'outcome="refused"') == 1
        assert "image 0: " in gateway.log.read_text()
        assert_alive(engine, own)

        service.signal(signal.SIGSTOP)
        asked = {"text": IMAGE, "image_data": [data_url(photo(300, 200, 63))]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{engine.url}/generate", json=asked, timeout=3)
        service.signal(signal.SIGCONT)
        assert_alive(engine, own)


def test_an_engine_with_zmq_to_scheduler_survives_an_image_that_cannot_be_read(
    checkpoint: Path, service: Restartable, own: dict[str, Answer]
) -> None:
    with fed(checkpoint, service, encoders=0, back_end="zmq_to_scheduler") as (engine, gateway):
        for name in ("one jpeg", "text between", "sixteen"):
            before = gateway.count("parts", 'outcome="served"')
            assert_equal(engine.ask(PROMPTS[name]), own[name])
            assert gateway.count("parts", 'outcome="served"') == before + 1
        for number in range(1, 4):
            images = [data_url(JPEG), data_url(DAMAGED)]
            refused = engine.generate(["x ", b"", "y", b"", "?"], image_data=images)
            assert refused.status_code == 400, refused.text
            assert "too long" in refused.text
            assert gateway.count("parts", 'outcome="stand_in"') == number
            assert_alive(engine, own)


def test_an_engine_with_zmq_to_scheduler_and_two_encoders_survives_too(
    checkpoint: Path, service: Restartable, own: dict[str, Answer]
) -> None:
    with fed(checkpoint, service, encoders=2, back_end="zmq_to_scheduler") as (engine, gateway):
        assert_equal(engine.ask(PROMPTS["text between"]), own["text between"])
        assert engine.generate(
            ["x ", b"", "y", b"", "?"], image_data=[data_url(JPEG), data_url(DAMAGED)]
        ).status_code in (200, 400)
        assert gateway.count("parts", 'outcome="stand_in"') == 1
        assert_alive(engine, own)
