"""Qwen2-VL, for which the service has no own tower: SGLang behind the gateway against its own tower."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testing.checkpoints import CHAT_TEMPLATE
from testing.families import CHECKPOINTS, write_family_checkpoint
from testing.photos import photo
from tests.sglang.conftest import PROMPTS, Own, answers_of, service_of
from tests.sglang.gateways import fed
from tests.vllm.restartable import Restartable

ASKED = ("text alone", "one png", "one jpeg", "text between", "the same twice", "sixteen")
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


@pytest.mark.parametrize(("back_end", "encoders"), [("zmq_to_tokenizer", 3), ("zmq_to_scheduler", 0)])
def test_an_engine_that_the_gateway_feeds_answers_as_by_its_own_tower(
    checkpoint: Path, service: Restartable, own: Own, back_end: str, encoders: int
) -> None:
    with fed(checkpoint, service, encoders=encoders, back_end=back_end) as (engine, gateway):
        distances: dict[str, float] = {}
        for name in ASKED:
            before, images = gateway.count("images"), sum(isinstance(part, bytes) for part in PROMPTS[name])
            distances[name] = engine.ask(PROMPTS[name]).distance(own(PROMPTS[name]))
            assert gateway.count("images") - before == images
        assert max(distances.values()) <= TOLERANCE, distances
        other = engine.ask([photo(128, 128, 99, "PNG"), "What is this?"])
        assert other.distance(own(PROMPTS["one png"])) > DIFFERENT
