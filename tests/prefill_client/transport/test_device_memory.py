"""Device memory between two processes: CUDA's on a GPU, and what stands in for it on the CPU."""

import ctypes
import gc
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from encoder_contract.device_memory import DeviceMemoryError, allocate, open_memory
from encoder_service.store import Store

READER = """
import pickle, sys
import torch
from prefill_client import DeviceRows
rows = DeviceRows(pickle.load(sys.stdin.buffer), 64, "bfloat16").tensor("bfloat16")
print(rows.device.type, int(rows.view(torch.int16).long().sum()), *rows.shape)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_reads_device_memory_without_a_host_copy(device: str, tmp_path: Path) -> None:
    """Between processes, as CUDA lets nobody open memory of his own."""
    store = Store(
        host_bytes=1 << 20,
        device_bytes=1 << 20,
        device=device,
        width=64,
        dtype=torch.bfloat16,
        segment_dir=str(tmp_path),
    )
    rows = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with store.put(b"a", rows.to(device), (1, 1, 1)) as pin:
        handle = pin.handle(100, 700)
        assert (pin.tier, len(handle.memory) == 64) == ("device", device == "cuda")
        command = [sys.executable, "-c", READER]
        read = subprocess.run(
            command, input=pickle.dumps(handle), stdout=subprocess.PIPE, timeout=100, check=True
        )
    expected = int(rows[100:700].view(torch.int16).long().sum())
    assert read.stdout.decode().split() == [device, str(expected), "600", "64"]
    assert store.pin(b"a").tier == "device"  # nothing was copied to the host for it
    store.close()


class Runtime:
    """What is called of CUDA's runtime, by itself: which GPUs were made current, and what was done on which."""

    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815 - CUDA's name

    class cudaIpcMemHandle_t:  # noqa: N801 - CUDA's name
        def __init__(self) -> None:
            self._bytes = ctypes.create_string_buffer(64)

        def getPtr(self) -> int:  # noqa: N802 - the binding's name
            return ctypes.addressof(self._bytes)

    def __init__(self, current: int) -> None:
        self.current = current
        self.made_current: list[int] = []
        self.done: list[tuple[str, int]] = []

    def cudaGetDevice(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.current

    def cudaSetDevice(self, device: int) -> tuple[int]:  # noqa: N802
        self.made_current.append(device)
        self.current = device
        return (0,)

    def cudaIpcOpenMemHandle(self, _handle: object, _flags: int) -> tuple[int, int]:  # noqa: N802
        self.done.append(("open", self.current))
        return 0, 4096

    def cudaIpcCloseMemHandle(self, _address: int) -> tuple[int]:  # noqa: N802
        self.done.append(("close", self.current))
        return (0,)


@pytest.mark.parametrize(("current", "made_current"), [(1, []), (0, [1, 0])])
def test_device_memory_makes_no_context_on_other_gpus(
    monkeypatch: pytest.MonkeyPatch, current: int, made_current: list[int]
) -> None:
    pytest.importorskip("cuda.bindings")
    runtime = Runtime(current)
    monkeypatch.setattr("cuda.bindings.runtime", runtime)
    memory = open_memory(bytes(64), 1 << 20, 1)
    del memory
    gc.collect()
    assert runtime.done == [("open", 1), ("close", 1)]
    assert runtime.made_current == 2 * made_current


def test_a_gpu_that_is_not_there_is_an_error_that_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(DeviceMemoryError, match="cudaError"):
        allocate("cuda:0", 1 << 20)
    with pytest.raises(DeviceMemoryError, match="cudaError"):
        open_memory(bytes(64), 1 << 20, 0)
