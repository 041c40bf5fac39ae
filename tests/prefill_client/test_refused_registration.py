"""CUDA keeps the error of a refused registration for the thread: its next kernel must not report it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from encoder_service.store import registration
from prefill_client.vllm.host_memory import HostMemory, RowLoad
from prefill_client.vllm.worker_side import RowLoader
from tests.simulated_gpu import simulated_gpu

pytestmark = pytest.mark.slow

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU that refuses to register memory; CUDA's error stays until a launch reports it."""
    with simulated_gpu() as gpu, torch.inference_mode():
        kept: list[str] = []
        launch = gpu.launch

        def register(*_: int) -> int:
            kept.append("out of memory")
            return OUT_OF_MEMORY

        def launch_and_check(name: str, *args: Any, **options: Any) -> None:
            launch(name, *args, **options)
            if kept and not name.startswith("copy"):  # copies check only their own error
                raise RuntimeError(f"CUDA error: {kept.pop()}")

        monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
        monkeypatch.setattr(gpu, "launch", launch_and_check)
        torch.cuda.set_device("cuda:1")
        yield gpu


def test_a_step_after_a_refused_registration_does_not_fail(refused: Any) -> None:
    memory = HostMemory(1 << 16)
    extents = memory.allocate(64) or ()
    cache: dict[str, torch.Tensor] = {}
    RowLoader(8, "bfloat16", torch.device("cuda:1")).load(memory.path, [RowLoad("an image", extents)], cache)
    assert (cache["an image"] + 1).is_cuda  # the first kernel of the engine's step


def test_a_server_after_a_refused_registration_goes_on(refused: Any) -> None:
    assert not registration.register_memory(torch.empty(64, dtype=torch.uint8), "cuda:1")
    assert torch.ones(4, device="cuda:1").is_cuda
