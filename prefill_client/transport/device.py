"""Rows in device memory: copied from a server's GPU to a GPU of this process without going through the host."""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from encoder_contract.device_memory import DeviceMemory, DeviceMemoryError, open_memory
from encoder_contract.errors import StaleHandleError
from encoder_contract.extents import Extent, pairs, views
from encoder_contract.handle import Handle
from encoder_contract.segment_file import segment_proof
from encoder_contract.v1 import encoder_pb2 as pb
from prefill_client.transport.receiver import Arrival
from prefill_client.transport.rows import Rows, array_view
from prefill_client.transport.shared_memory import SharedMemoryReceiver, SharedRows

if TYPE_CHECKING:  # it imports grpc
    from prefill_client.transport.channels import Channels

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class DeviceRows(SharedRows):
    """The rows of a handle into device memory. They are always copied, at 1 TB/s and more, and never lent in place.

    Copies are made on the current GPU and stream of the calling thread. A returned copy is complete, and was checked to
    be the handle's rows.
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

    def open(self) -> DeviceMemory:
        """Open the memory for this thread's current GPU unless it is open. Raises `StaleHandleError`."""
        return self._segment.memory(self.handle, current_gpu())

    def _copied(self, dtype: str) -> "torch.Tensor":
        return device_copy(self.open(), self.handle.extents, self.shape[1], dtype)


class OwnDeviceRows(Rows):
    """Rows in GPU memory of this process."""

    def __init__(self, tensor: "torch.Tensor") -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)

    def copy(self) -> NDArray[np.generic]:
        """Return a copy in host memory."""
        return array_view(self._tensor)

    def tensor(self, dtype: str) -> "torch.Tensor":  # noqa: ARG002
        """Return the rows without copying."""
        return self._tensor

    @contextmanager
    def lent(self) -> Iterator[Rows]:
        """Lend these rows, without a check."""
        yield self

    def own(self) -> "OwnDeviceRows":
        """Return this object."""
        return self


class DeviceReceiver(SharedMemoryReceiver):
    """Receives handles into the GPU memory of a server on this host whose segment this process can read."""

    transport = pb.TRANSPORT_DEVICE
    by_default = False

    def __init__(self, proof: bytes, endpoint: str, probe: bytes, probe_bytes: int) -> None:
        """`probe` names `probe_bytes` of memory on the server's device that this process must be able to open."""
        super().__init__(proof)
        self._endpoint = endpoint
        self._probe = probe
        self._probe_bytes = probe_bytes

    @cached_property
    def usable(self) -> bool:  # type: ignore[override]
        """Whether this process can open the probe. Tested once, when a call first requests this transport.

        It is not tested earlier because opening GPU memory creates a context on a GPU of this process, which takes
        hundreds of megabytes.
        """
        try:
            open_memory(self._probe, self._probe_bytes, current_gpu())
        except DeviceMemoryError as error:
            self._warn(error)
            return False
        return True

    @classmethod
    def from_server(
        cls,
        endpoint: str,
        description: pb.DescribeResponse,
        channels: "Channels",  # noqa: ARG003
    ) -> Self | None:
        """Return a receiver if the server has rows on a GPU, its segment can be read, and torch is installed."""
        if cls.transport not in description.transports or importlib.util.find_spec("torch") is None:
            return None
        proof = segment_proof(endpoint, description.shm_segment)
        return (
            cls(proof, endpoint, description.device_probe, description.device_probe_bytes) if proof else None
        )

    @staticmethod
    def announced(ready: pb.ImageReady) -> bool:
        """Return whether the message has a handle into device memory."""
        return bool(ready.handle.memory)

    def receive(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> Arrival:
        """Return the arrival of the rows, which is complete."""
        return _DeviceArrival(self, ready, is_open)

    def rows(self, ready: pb.ImageReady, is_open: Callable[[], bool]) -> DeviceRows:
        """Return the rows, with their memory opened. If that fails, later calls do not request this transport."""
        rows = DeviceRows(Handle.from_message(ready.handle), ready.width, ready.dtype, is_held=is_open)
        try:
            rows.open()
        except StaleHandleError as error:
            if self.usable:
                self._warn(error)
            self.usable = False
            raise
        return rows

    def _warn(self, error: Exception | str) -> None:
        log.warning(
            "%s: rows arrive by shared memory, because the server's GPU memory cannot be opened (%s). Both processes "
            "must share the PID and IPC namespaces, and each must see both GPUs",
            *(self._endpoint, error),
        )


class _DeviceArrival(Arrival):
    def __init__(self, receiver: DeviceReceiver, ready: pb.ImageReady, is_open: Callable[[], bool]) -> None:
        self._receiver = receiver
        self._ready = ready
        self._is_open = is_open

    def rows(self) -> DeviceRows:
        return self._receiver.rows(self._ready, self._is_open)


def device_copy(memory: DeviceMemory, extents: Sequence[Extent], width: int, dtype: str) -> "torch.Tensor":
    """Copy rows out of device memory on this thread's current GPU and stream; return the complete copy.

    The memory may lie on another GPU of the server, even one that this process does not see: it was opened for the
    current GPU, which reads it.

    The copy is [rows, width] of type `dtype`. The memory that replaces a GPU's in tests is copied on the CPU.
    """
    import torch

    if isinstance(memory.content, memoryview):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(memory.content, dtype=torch.uint8)
    else:
        # torch would ask CUDA which GPU has the memory, and refuse one that this process does not see.
        whole = torch.as_tensor(memory.content, device=f"cuda:{torch.cuda.current_device()}")
    device = whole.device
    copied = torch.empty(sum(length for _, length in extents), dtype=torch.uint8, device=device)
    for target, source in pairs([copied], views(whole, extents)):
        target.copy_(source, non_blocking=True)
    if copied.is_cuda:
        torch.cuda.current_stream().synchronize()
    return copied.view(getattr(torch, dtype)).view(-1, width)


def current_gpu() -> int:
    """Return the index of this thread's current GPU; 0 without a GPU."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0
