"""Device memory shared by two processes: CUDA memory on a GPU, or its replacement on the CPU."""

import ctypes
import gc
import pickle
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest
import torch

from encoder_contract.device_memory import CudaBytes, DeviceMemory, DeviceMemoryError, allocate, open_memory
from encoder_service.store import Store, tensors
from testing.stored import write
from tests.waiting import START_S

READER = """
import pickle, sys
import torch
from prefill_client import DeviceRows
rows = DeviceRows(pickle.load(sys.stdin.buffer), 64, "bfloat16").tensor("bfloat16")
print(rows.device.type, int(rows.view(torch.int16).long().sum()), *rows.shape)
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_reads_device_memory_without_a_host_copy(device: str, tmp_path: Path) -> None:
    """Uses two processes, because CUDA does not let a process open its own memory."""
    store = Store(
        host_bytes=1 << 20,
        device_bytes=1 << 20,
        device=device,
        row_bytes=2 * 64,
        segment_dir=str(tmp_path),
    )
    rows = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with write(store, b"a", rows.to(device), (1, 1, 1)) as pin:
        handle = pin.handle(100, 700)
        assert (pin.tier, len(handle.memory) == 64) == ("device", device == "cuda")
        command = [sys.executable, "-c", READER]
        read = subprocess.run(
            command, input=pickle.dumps(handle), stdout=subprocess.PIPE, timeout=START_S, check=True
        )
    expected = int(rows[100:700].view(torch.int16).long().sum())
    assert read.stdout.decode().split() == [device, str(expected), "600", "64"]
    assert store.pin(b"a").tier == "device"  # nothing was copied to the host for it
    store.close()


class Runtime:
    """Records the calls of CUDA's runtime: which GPUs became current, and what was done on which GPU."""

    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815 - CUDA's name

    class cudaIpcMemHandle_t:  # noqa: N801 - CUDA's name
        def __init__(self) -> None:
            self._bytes = ctypes.create_string_buffer(64)

        def getPtr(self) -> int:  # noqa: N802 - the binding's name
            return ctypes.addressof(self._bytes)

    def __init__(self, current: int, naming: object = 0) -> None:
        self.current = current
        self.naming = naming  # the error of giving a name; 0 for none
        self.made_current: list[int] = []
        self.done: list[tuple[str, int]] = []

    def cudaGetDevice(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.current

    def cudaSetDevice(self, device: int) -> tuple[int]:  # noqa: N802
        self.made_current.append(device)
        self.current = device
        return (0,)

    def cudaMalloc(self, size_bytes: int) -> tuple[int, int]:  # noqa: N802
        self.done.append((f"allocate {size_bytes}", self.current))
        return 0, 4096

    def cudaFree(self, _address: int) -> tuple[int]:  # noqa: N802
        self.done.append(("free", self.current))
        return (0,)

    def cudaIpcGetMemHandle(self, _address: int) -> tuple[object, object]:  # noqa: N802
        return self.naming, self.cudaIpcMemHandle_t()

    def cudaIpcOpenMemHandle(self, _handle: object, _flags: int) -> tuple[int, int]:  # noqa: N802
        self.done.append(("open", self.current))
        return 0, 4096

    def cudaIpcCloseMemHandle(self, _address: int) -> tuple[int]:  # noqa: N802
        self.done.append(("close", self.current))
        return (0,)


@pytest.mark.parametrize(("current", "used", "made_current"), [(1, 1, []), (0, 1, [1, 0, 1, 0]), (0, 0, [1])])
@pytest.mark.cuda
def test_device_memory_makes_no_context_on_other_gpus(
    monkeypatch: pytest.MonkeyPatch, current: int, used: int, made_current: list[int]
) -> None:
    """GPU 0 is current in a thread that never set one; nobody may use it."""
    pytest.importorskip("cuda.bindings")
    runtime = Runtime(current)
    monkeypatch.setattr("cuda.bindings.runtime", runtime)
    monkeypatch.setattr("cuda.bindings.driver.cuDevicePrimaryCtxGetState", lambda _gpu: (0, 0, used))
    memory = open_memory(bytes(64), 1 << 20, 1)
    del memory
    gc.collect()
    assert runtime.done == [("open", 1), ("close", 1)]
    assert runtime.made_current == made_current


class Refused(IntEnum):
    cudaErrorNotSupported = 801  # noqa: N815 - CUDA's name


@pytest.mark.parametrize(
    ("size_bytes", "whole_bytes"), [(1, 2 << 20), (2 << 20, 2 << 20), (5 << 20, 6 << 20)]
)
@pytest.mark.cuda
def test_shared_memory_takes_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, whole_bytes: int
) -> None:
    pytest.importorskip("cuda.bindings")
    runtime = Runtime(0)
    monkeypatch.setattr("cuda.bindings.runtime", runtime)
    memory = allocate("cuda:0", size_bytes)
    assert runtime.done == [(f"allocate {whole_bytes}", 0)]
    assert isinstance(memory.content, CudaBytes)
    assert memory.content.size_bytes == size_bytes
    assert (len(memory.name), memory.private_because) == (64, "")


@pytest.mark.cuda
def test_memory_without_an_ipc_handle_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    runtime = Runtime(0, Refused.cudaErrorNotSupported)
    monkeypatch.setattr("cuda.bindings.runtime", runtime)
    memory = allocate("cuda:0", 2 << 20)
    assert (memory.name, memory.private_because) == (b"", "CUDA: cudaErrorNotSupported")
    assert len(runtime.done) == 1, "it is not freed"


@pytest.mark.cuda
def test_a_copied_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaves like torch for memory that is on another GPU than requested."""
    memory = torch.zeros(8, dtype=torch.uint8)
    content = CudaBytes(memory.data_ptr(), 8)
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: memory)
    assert tensors.tensor_over(DeviceMemory(bytes(64), content), "cuda:1") is memory
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: memory.clone())
    with pytest.raises(AssertionError, match="copied"):
        tensors.tensor_over(DeviceMemory(bytes(64), content), "cuda:1")


def test_a_missing_gpu_is_an_error_that_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(DeviceMemoryError, match="cudaError"):
        allocate("cuda:0", 1 << 20)
    with pytest.raises(DeviceMemoryError, match="cudaError"):
        open_memory(bytes(64), 1 << 20, 0)
