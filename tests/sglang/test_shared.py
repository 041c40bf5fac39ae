"""Two SGLangs (plug-in and gateway) and a vLLM share a service: no image is encoded twice."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from testing.engine_environments import VLLM_PYTHON, VLLM_VARIABLES
from testing.photos import photo
from testing.sglang_engine import SglangEngine
from tests.engines.answers import PROMPTS, Own, assert_equal
from tests.sglang.gateways import fed
from tests.vllm.restartable import Restartable


@pytest.mark.story("one service for engines of both kinds")
def test_two_sglangs_and_a_vllm_share_what_one_has_encoded(
    engine: SglangEngine, service: Restartable, checkpoint: Path, own: Own, tmp_path: Path
) -> None:
    python = Path(os.environ.get("VLLM_PYTHON", VLLM_PYTHON))
    if not python.exists():
        pytest.skip("make test-vllm installs vLLM")
    images = [photo(200, 150, 5000), photo(128, 128, 5001, "PNG")]
    parts = [*images, "What is this?"]
    encoded, by_itself = service.encodes(), engine.by_own_tower()
    first = engine.ask(parts)
    assert service.encodes() - encoded == len(images)
    with fed(checkpoint, service, encoders=2) as (other, gateway):
        assert_equal(other.ask(parts), first)
        assert gateway.count("images") == len(images)
        assert_equal(other.ask(PROMPTS["one jpeg"]), own(PROMPTS["one jpeg"]))
        encoded_by_other = service.encodes()
        assert_equal(engine.ask(PROMPTS["one jpeg"]), own(PROMPTS["one jpeg"]))
        assert service.encodes() == encoded_by_other
    files = [tmp_path / str(number) for number in range(len(images))]
    for file, image in zip(files, images, strict=True):
        file.write_bytes(image)
    before = service.encodes()
    ended = subprocess.run(
        [python, "-m", "tests.sglang.ask_vllm", checkpoint, service.endpoint, *files],
        env={**os.environ, **VLLM_VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert tuple(json.loads(ended.stdout.splitlines()[-1])) == first.tokens
    assert service.encodes() == before
    assert engine.by_own_tower() == by_itself
