"""CUDA keeps the error of a refused registration for the thread: no kernel of another purpose may report it."""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from encoder_service.store.registration import registration_of
from prefill_client.vllm.host_memory import HostMemory, RowLoad
from prefill_client.vllm.worker_side import RowLoader
from tests.simulated_gpu import simulated_gpu
from tests.waiting import soon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("refused")]

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that refuses to register memory. A thread has CUDA's error until it launches a kernel, which fails."""
    with simulated_gpu() as gpu, torch.inference_mode():
        kept: set[int] = set()
        launch = gpu.launch

        def register(*_: int) -> int:
            kept.add(threading.get_ident())
            return OUT_OF_MEMORY

        def launch_and_check(name: str, *args: Any, **options: Any) -> None:
            launch(name, *args, **options)
            if threading.get_ident() in kept and not name.startswith(
                "copy"
            ):  # copies check only their own error
                kept.remove(threading.get_ident())
                raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
        monkeypatch.setattr(gpu, "launch", launch_and_check)
        torch.cuda.set_device("cuda:1")
        yield


@pytest.mark.cuda
async def test_a_step_after_a_refused_registration_does_not_fail(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(1 << 16)
    extents = memory.allocate(64) or ()
    cache: dict[str, torch.Tensor] = {}
    with caplog.at_level(logging.WARNING, "vllm.encoder_service"):
        loader = RowLoader(8, "bfloat16", torch.device("cuda:1"))
        loader.load(memory.path, [RowLoad("an image", extents)], cache)
        await soon(lambda: "ulimit -l" in caplog.text)
    assert (cache["an image"] + 1).is_cuda  # the first kernel of the engine's step
    memory.close()


def test_a_server_after_a_refused_registration_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "encoder_service"):
        registration_of(torch.empty(64, dtype=torch.uint8), "cuda:1").close()
    assert "ulimit -l" in caplog.text
    assert torch.ones(4, device="cuda:1").is_cuda
