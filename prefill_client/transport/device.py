"""Rows in device memory: copied from a server's GPU to a GPU of this process, not through the host."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from encoder_contract.device_memory import DeviceMemory
from encoder_contract.handle import Handle
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.receiver import Arrival
from prefill_client.transport.rows import Rows, array_view
from prefill_client.transport.shared_memory import SharedMemoryReceiver, SharedRows

if TYPE_CHECKING:
    import torch


class DeviceRows(SharedRows):
    """The rows of a handle into device memory. They are always copied, at 1 TB/s and more, never lent in place.

    A copy is made on the current GPU and stream of the calling thread. It is complete, and checked to be the handle's
    rows, when it is returned.
    """

    on_device = True

    def tensor(self, dtype: str) -> "torch.Tensor":
        """Return a copy on the GPU, [rows, width] of type `dtype`. Raises `StaleHandleError`."""
        with self._checked():
            return self._copied(dtype)

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend a copy on the GPU."""
        yield self.own()

    def own(self) -> "OwnDeviceRows":
        """Return a copy on the GPU. Raises `StaleHandleError`."""
        return OwnDeviceRows(self.tensor(self.dtype))

    def _array(self) -> NDArray[np.generic]:
        return array_view(self._copied(self.dtype))

    def _copied(self, dtype: str) -> "torch.Tensor":
        memory = self._segment.memory(self.handle, current_gpu())
        return device_copy(memory, self.handle.extents, self.shape[1], dtype)


class OwnDeviceRows(Rows):
    """Rows in memory of this process on a GPU."""

    def __init__(self, tensor: "torch.Tensor") -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)

    @contextmanager
    def reading(self) -> Iterator[NDArray[np.generic]]:
        """Lend a copy on the host."""
        yield self.copy()

    def copy(self) -> NDArray[np.generic]:
        """Return a copy on the host."""
        return array_view(self._tensor)

    def tensor(self, dtype: str) -> "torch.Tensor":  # noqa: ARG002
        """Return the rows themselves."""
        return self._tensor

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend the rows themselves."""
        yield self

    def own(self) -> "OwnDeviceRows":
        """Return the rows themselves."""
        return self


class DeviceReceiver(SharedMemoryReceiver):
    """Receives handles into the GPU memory of a server of this host whose segment this process can read."""

    transport = pb.TRANSPORT_DEVICE
    by_default = False

    @classmethod
    def from_server(cls, endpoint: str, description: pb.DescribeResponse) -> Self | None:
        """Return a receiver if the server has rows on a GPU, its segment can be read, and torch is installed."""
        if cls.transport not in description.transports or importlib.util.find_spec("torch") is None:
            return None
        return super().from_server(endpoint, description)

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Return whether the message has a handle into the memory of a device."""
        return bool(ready.handle.memory)

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:
        """Return the arrival of the rows, which is complete."""
        return _DeviceArrival(ready, is_open)


class _DeviceArrival(Arrival):
    def __init__(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> None:
        self._ready = ready
        self._is_open = is_open

    def rows(self) -> DeviceRows:
        handle = Handle.from_message(self._ready.handle)
        return DeviceRows(handle, self._ready.width, self._ready.dtype, is_held=self._is_open)


def device_copy(
    memory: DeviceMemory, extents: Sequence[tuple[int, int]], width: int, dtype: str
) -> "torch.Tensor":
    """Copy rows out of device memory, on this thread's current GPU and stream, and return the finished copy.

    It is [rows, width] of type `dtype`. Memory that stands in for a GPU's in tests is copied on the CPU.
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
    """Return the number of this thread's current GPU; 0 without a GPU."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0
