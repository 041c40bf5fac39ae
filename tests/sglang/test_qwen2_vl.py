"""Qwen2-VL, for which the service has no own tower: SGLang behind the gateway against its own tower."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testing.checkpoints import CHAT_TEMPLATE
from testing.families import CHECKPOINTS, write_family_checkpoint
from testing.photos import photo
from tests.engines.answers import PROMPTS, USUAL, Own
from tests.sglang.conftest import answers_of, service_of
from tests.sglang.gateways import assert_fed, fed
from tests.vllm.restartable import Restartable

ASKED = ("text alone", *USUAL)
TOLERANCE = 1e-4
"""Of a log-probability: SGLang's own tower is another implementation of the same layers."""
DIFFERENT = 1e-3
"""What another image must change."""
# SGLang's bounds for images of Qwen2-VL, which ignore the checkpoint.
BOUNDED = replace(
    CHECKPOINTS["qwen2_vl"], image_settings={"size": {"shortest_edge": 3136, "longest_edge": 1003520}}
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_family_checkpoint(tmp_path_factory.mktemp("qwen2_vl"), "qwen2_vl", family=BOUNDED)
    # SGLang asks every model a question at its start.
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> Own:
    return answers_of(checkpoint, [PROMPTS[name] for name in ASKED])


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Restartable]:
    with service_of(checkpoint) as service:
        yield service


@pytest.mark.story("the same models without the tower in the engine")
@pytest.mark.story("models of `transformers`")
@pytest.mark.parametrize(("back_end", "encoders"), [("zmq_to_tokenizer", 3), ("zmq_to_scheduler", 0)])
def test_an_engine_that_the_gateway_feeds_answers_as_by_its_own_tower(
    checkpoint: Path, service: Restartable, own: Own, back_end: str, encoders: int
) -> None:
    with fed(checkpoint, service, encoders=encoders, back_end=back_end) as (engine, gateway):
        assert_fed(engine, gateway, own, ASKED, TOLERANCE)
        other = engine.ask([photo(128, 128, 99, "PNG"), "What is this?"])
        assert other.distance(own(PROMPTS["one png"])) > DIFFERENT
