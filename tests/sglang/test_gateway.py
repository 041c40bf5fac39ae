"""An unmodified SGLang without the plug-in, fed by the gateway, against its own tower."""

import signal
from pathlib import Path

import httpx
import pytest

from testing.answers import data_url
from testing.photos import photo
from testing.sglang_engine import IMAGE, SglangEngine
from tests.engines.answers import PROMPTS, USUAL, Own, assert_equal
from tests.sglang.conftest import SIXTY_FOUR
from tests.sglang.counters import assert_parts
from tests.sglang.gateways import assert_fed, fed
from tests.vllm.restartable import Restartable

JPEG = photo(640, 480, 62)
DAMAGED = JPEG[: len(JPEG) // 2]
ASKED = ("text alone", *USUAL)
# What a control must differ by: a hundred times the largest difference that equal images have.
DIFFERENT = 1e-3


def assert_alive(engine: SglangEngine, own: Own) -> None:
    """The engine answers as before; one that died refuses connections."""
    assert engine.process.poll() is None, engine.log.read_text()
    assert_equal(engine.ask(PROMPTS["one png"]), own(PROMPTS["one png"]))


@pytest.mark.story("gateways")
@pytest.mark.story("no tower in the engine")
def test_an_engine_with_zmq_to_tokenizer_answers_as_by_its_own_tower_and_survives_errors(
    checkpoint: Path, service: Restartable, own: Own
) -> None:
    with fed(checkpoint, service, encoders=4, part_s=40) as (engine, gateway):
        assert_fed(engine, gateway, own, ASKED)
        assert gateway.count("parts", 'outcome="served"') > len(ASKED)
        other = engine.ask([photo(128, 128, 99, "PNG"), "What is this?"])
        assert other.distance(own(PROMPTS["one png"])) > DIFFERENT

        encoded = gateway.count("images", 'source="encoded"')
        engine.ask(["again: ", photo(128, 128, 99, "PNG")])
        assert gateway.count("images", 'source="encoded"') == encoded, "the same image in another request"

        refused = engine.generate(["x ", b"", "?"], image_data=[data_url(DAMAGED)])
        assert refused.status_code == 503
        assert_parts(gateway, "refused", 1)
        assert "image 0: " in gateway.log.read_text()
        assert_alive(engine, own)

        service.signal(signal.SIGSTOP)
        asked = {"text": IMAGE, "image_data": [data_url(photo(300, 200, 63))]}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{engine.url}/generate", json=asked, timeout=3)
        service.signal(signal.SIGCONT)
        assert_alive(engine, own)


@pytest.mark.story("gateways")
def test_an_engine_with_zmq_to_scheduler_survives_an_image_that_cannot_be_read(
    checkpoint: Path, service: Restartable, own: Own
) -> None:
    with fed(checkpoint, service, encoders=0, back_end="zmq_to_scheduler") as (engine, gateway):
        for parts in (PROMPTS["one jpeg"], PROMPTS["text between"], PROMPTS["sixteen"], SIXTY_FOUR):
            before = gateway.count("parts", 'outcome="served"')
            assert_equal(engine.ask(parts), own(parts))
            assert_parts(gateway, "served", before + 1)
        for number in range(1, 4):
            images = [data_url(JPEG), data_url(DAMAGED)]
            refused = engine.generate(["x ", b"", "y", b"", "?"], image_data=images)
            assert refused.status_code == 400, refused.text
            assert "too long" in refused.text
            assert_parts(gateway, "stand_in", number)
            assert_alive(engine, own)


def test_an_engine_with_zmq_to_scheduler_and_two_encoders_survives_too(
    checkpoint: Path, service: Restartable, own: Own
) -> None:
    with fed(checkpoint, service, encoders=2, back_end="zmq_to_scheduler") as (engine, gateway):
        assert_equal(engine.ask(PROMPTS["text between"]), own(PROMPTS["text between"]))
        assert engine.generate(
            ["x ", b"", "y", b"", "?"], image_data=[data_url(JPEG), data_url(DAMAGED)]
        ).status_code in (200, 400)
        assert_parts(gateway, "stand_in", 1)
        assert_alive(engine, own)
