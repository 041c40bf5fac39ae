"""Rows of one image: their element types in numpy and torch, and where they are stored."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from encoder_contract.handle import Handle

if TYPE_CHECKING:
    import torch

# numpy has no bfloat16: uint16 holds its bit patterns.
_NUMPY_TYPES: "dict[str, np.dtype[Any]]" = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def element_type(dtype: str) -> "np.dtype[Any]":
    """Return the numpy type that holds elements of type `dtype`."""
    return _NUMPY_TYPES[dtype]


def tensor_view(array: NDArray[np.generic], dtype: str) -> "torch.Tensor":
    """Return a torch tensor of type `dtype` over the memory of `array` (uint16 bit patterns for bfloat16).

    Tensors have no read-only flag: writing to a tensor over a mapped segment kills the process.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, dtype))


def array_view(tensor: "torch.Tensor") -> NDArray[np.generic]:
    """Return a tensor's elements as an array (uint16 for bfloat16): in the same memory, or copied from a GPU."""
    import torch

    on_host = tensor.cpu()
    return (on_host.view(torch.uint16) if on_host.dtype == torch.bfloat16 else on_host).numpy()


class Rows(ABC):
    """Rows of one image. `shape` is (rows, width). Arrays hold bfloat16 as uint16 bit patterns."""

    shape: tuple[int, ...]
    handle: Handle | None = None
    """The handle with which other processes of this host can read the rows; None if they are not shared."""

    @property
    def lost(self) -> bool:
        """Whether the rows are gone: reading them raises `StaleHandleError`."""
        return False

    @abstractmethod
    def copy(self) -> NDArray[np.generic]:
        """Return the rows in host memory. They stay valid after the Fetch call. Raises `StaleHandleError`."""

    def tensor(self, dtype: str) -> "torch.Tensor":
        """Return the rows as a tensor in host memory, or on the GPU from which they come.

        The tensor stays valid after the Fetch call. Raises `StaleHandleError`.
        """
        return tensor_view(self.copy(), dtype)

    @abstractmethod
    def lent(self) -> "AbstractContextManager[Rows]":
        """Lend the rows in place, read-only. Use results only after the block has ended without an error.

        Raises `StaleHandleError` on entry if the rows are gone, or on exit if they were replaced during the block.
        """

    @abstractmethod
    def own(self) -> "Rows":
        """Return `Rows` in memory of this process, on the host or on the GPU from which the rows come.

        They stay valid after the Fetch call. Raises `StaleHandleError`.
        """


class OwnRows(Rows):
    """Rows in memory of this process."""

    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array = array
        self.shape = array.shape

    def copy(self) -> NDArray[np.generic]:
        """Return the rows without copying, because nothing else writes to them."""
        return self._array

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend these rows, without a check."""
        yield self

    def own(self) -> "OwnRows":
        """Return this object."""
        return self
