"""Fixtures: checkpoints that vLLM loads, a real server for each, a real engine beside it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.checkpoints import write_checkpoint
from testing.server_process import ServerProcess, running
from testing.vllm_engine import Engine

ROOT = Path(__file__).resolve().parents[2]
SERVICE = Path(os.environ.get("ENCODER_SERVICE", ROOT / ".venv/bin/encoder-service"))
"""The command of the environment that has what the server needs."""
SMALL = {
    "qwen3_vl": {"size": {"longest_edge": 65536, "shortest_edge": 1024}},
    "qwen3_vl_moe": {"size": {"longest_edge": 65536, "shortest_edge": 1024}},
    "qwen2_5_vl": {"min_pixels": 784, "max_pixels": 65536},
}
SETTINGS = {"device": "cpu", "dtype": "float32", "store_host_gib": 0.25}


def checkpoint_of(family: str, folder: Path) -> Path:
    """Write a tiny checkpoint whose images have at most 64 tokens: several to a step, some across two."""
    return write_checkpoint(folder, family, preprocessor=SMALL[family])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL."""
    return checkpoint_of("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def service(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint."""
    with running(checkpoint, executable=SERVICE, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: ServerProcess) -> Iterator[Engine]:
    """An engine that waits, for each step, for the images of that step."""
    engine = Engine(checkpoint, service.endpoint)
    yield engine
    engine.close()
