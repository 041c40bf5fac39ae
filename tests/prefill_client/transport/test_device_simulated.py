"""Rows from a GPU's memory on a simulated GPU: the copy is complete, on the current GPU, and names its device."""

import ctypes

import pytest
import torch

from encoder_contract.device_memory import CudaBytes, DeviceMemory
from prefill_client.transport.device import device_copy

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from tests.simulated_gpu import simulated_gpu
from tests.simulated_gpu.tensors import DeviceTensor

pytestmark = pytest.mark.slow


@pytest.mark.cuda
def test_a_copy_of_rows_names_its_gpu_and_is_complete():
    """Asked for no device, torch would look up which GPU has the memory, and refuse one that is masked."""
    stored = torch.arange(64, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * 64)(*stored.tolist())
    shared = DeviceMemory(b"", CudaBytes(ctypes.addressof(memory), 64))
    with simulated_gpu() as gpu:
        torch.cuda.set_device(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            rows = device_copy(shared, [(32, 16), (0, 16)], 8, "uint8")
        assert isinstance(rows, DeviceTensor)
        assert rows.device == torch.device("cuda:1")
        assert rows.shape == (4, 8)
        copied = rows.plain.flatten()  # another stream may read it: the copy has ended
        assert torch.cuda.current_stream().device_index == 1
        assert rows.cpu().flatten().tolist() == copied.tolist() == [*range(32, 48), *range(16)]
        assert not gpu.findings
