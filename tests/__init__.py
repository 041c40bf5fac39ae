"""The tests, which mirror the packages."""

import ctypes
import os


def has_gpu() -> bool:
    """Return whether torch can use a GPU. Without a driver torch is not imported, which would take seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


# Without a GPU, Triton's kernels run in its interpreter. Triton reads this variable at its first import.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
