"""Elements of rows: how each type travels through numpy, which has no bfloat16, and on to torch."""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
