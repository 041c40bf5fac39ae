"""Rows of one image: their elements in numpy and torch, and the memory they lie in."""

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


class Rows(ABC):
    """Rows of one image, [rows, width]; bfloat16 as its bits, uint16."""

    shape: tuple[int, ...]
    handle: Handle | None = None
    """Names the rows to other processes of this host, if they are shared."""

    @property
    def lost(self) -> bool:
        """Whether the rows can no longer be read."""
        return False

    @abstractmethod
    def reading(self) -> AbstractContextManager[NDArray[np.generic]]:
        """Lend the rows where they are, read-only; what was read counts once the block is left.

        Raises `StaleHandleError` on entering and on leaving.
        """

    @abstractmethod
    def copy(self) -> NDArray[np.generic]:
        """Return the rows to keep, however long the Fetch lasts, on the host. Raises `StaleHandleError`."""

    def tensor(self, dtype: str) -> "torch.Tensor":
        """Return the rows to keep, as a tensor: on the GPU if they come from one. Raises `StaleHandleError`."""
        return tensor_view(self.copy(), dtype)

    @abstractmethod
    def lent(self) -> "AbstractContextManager[Rows]":
        """Lend the rows as rows that nobody can take away, as `reading` does."""

    @abstractmethod
    def own(self) -> "Rows":
        """Return the rows to keep, on the GPU if they come from one. Raises `StaleHandleError`."""


class OwnRows(Rows):
    """Rows in memory of this process."""

    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array = array
        self.shape = array.shape

    @contextmanager
    def reading(self) -> Iterator[NDArray[np.generic]]:
        """Lend the rows."""
        yield self._array

    def copy(self) -> NDArray[np.generic]:
        """Return the rows themselves: nobody else writes to them."""
        return self._array

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend the rows themselves."""
        yield self

    def own(self) -> "OwnRows":
        """Return the rows themselves."""
        return self
