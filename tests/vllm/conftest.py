"""Fixtures: checkpoints that vLLM loads, and a real server and a real engine for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from testing.checkpoints import write_checkpoint
from testing.server_process import ServerProcess, running
from testing.vllm_engine import VllmEngine
from tests.vllm.service import SERVICE, SETTINGS, patient

HERE = Path(__file__).parent
SMALL = {
    "qwen3_vl": {"size": {"longest_edge": 65536, "shortest_edge": 1024}},
    "qwen3_vl_moe": {"size": {"longest_edge": 65536, "shortest_edge": 1024}},
    "qwen2_5_vl": {"min_pixels": 784, "max_pixels": 65536},
    "qwen3_5": {"size": {"longest_edge": 65536, "shortest_edge": 1024}},
}
# Of the published configuration: vLLM's kernels for linear attention on a CPU take no other sizes, and only bfloat16.
LINEAR_ATTENTION: dict[str, Any] = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
HANG_S = 900
"""The time after which a test counts as hanging. Engines start within it even on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the time limit of this folder's tests; the limit in pyproject.toml is for tests without engines."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(HANG_S))


def checkpoint_of(family: str, folder: Path) -> Path:
    """Write a tiny checkpoint whose images have at most 64 tokens: a step reads several, and some span two steps."""
    hybrid = family == "qwen3_5"
    dtype, text = (torch.bfloat16, LINEAR_ATTENTION) if hybrid else (torch.float32, {})
    return write_checkpoint(folder, family, preprocessor=SMALL[family], dtype=dtype, text=text)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3-VL."""
    return checkpoint_of("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def service(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint."""
    with running(checkpoint, executable=SERVICE, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="session")
def patient_command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a server that waits for a stopped device."""
    return patient(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="session")
def patient_service(checkpoint: Path, patient_command: Path) -> Iterator[ServerProcess]:
    """A server of that checkpoint that waits for a stopped device."""
    with running(checkpoint, executable=patient_command, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def engine(checkpoint: Path, service: ServerProcess) -> Iterator[VllmEngine]:
    """An engine without the cache manager: each step waits for its images."""
    engine = VllmEngine(checkpoint, service.endpoint)
    yield engine
    engine.close()
