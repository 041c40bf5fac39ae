"""Elements of rows: how each type travels through numpy, which has no bfloat16, and on to torch."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from encoder_contract.device_memory import DeviceMemory

if TYPE_CHECKING:
    import torch

# bfloat16 has no numpy type: its bits travel as uint16.
_NUMPY_TYPES: "dict[str, np.dtype[Any]]" = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def element_type(dtype: str) -> "np.dtype[Any]":
    """Return the numpy type that carries elements of `dtype`."""
    return _NUMPY_TYPES[dtype]


def tensor_view(array: NDArray[np.generic], dtype: str) -> "torch.Tensor":
    """Return a torch tensor over the same memory, of type `dtype` (bfloat16 comes as uint16).

    A tensor has no read-only flag: writing to one that lies in a segment kills the process.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, dtype))


def array_view(tensor: "torch.Tensor") -> NDArray[np.generic]:
    """Return a tensor's elements as numpy carries them: over the same memory, or of a GPU a copy."""
    import torch

    on_host = tensor.cpu()
    return (on_host.view(torch.uint16) if on_host.dtype == torch.bfloat16 else on_host).numpy()


def device_copy(
    memory: DeviceMemory, extents: Sequence[tuple[int, int]], width: int, dtype: str
) -> "torch.Tensor":
    """Return a copy of rows that lie in device memory, [rows, width] of `dtype`, when it is complete.

    On the current GPU of this thread and its current stream; of memory that stands in for a GPU's, on the CPU.
    """
    import torch

    if isinstance(memory.content, memoryview):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(memory.content, dtype=torch.uint8)
    else:
        whole = torch.as_tensor(memory.content)
    device = f"cuda:{torch.cuda.current_device()}" if whole.is_cuda else "cpu"
    copied = torch.empty(sum(length for _, length in extents), dtype=torch.uint8, device=device)
    filled = 0
    for offset, length in extents:
        copied[filled : filled + length].copy_(whole[offset : offset + length], non_blocking=True)
        filled += length
    if copied.is_cuda:
        torch.cuda.current_stream().synchronize()
    return copied.view(getattr(torch, dtype)).view(-1, width)


def current_gpu() -> int:
    """Return the number of this thread's current GPU; 0 where there is none."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0
