"""The tests, which mirror the packages."""

import ctypes
import os


def has_gpu() -> bool:
    """Whether torch can use a GPU; where there is no driver torch is not asked, for importing it takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


# Without a GPU, Triton's kernels run in its interpreter: it must know when it is first imported.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
