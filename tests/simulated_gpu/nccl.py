"""Stands in for NCCL: exchanges never block the host, and a process that is gone blocks the stream for ever.

Processes connect in their first exchange, through the store.
"""

import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.simulated_gpu.device import SimulatedGpu

SETTINGS = {
    **dict.fromkeys(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"), "0"
    ),
    "NCCL_SOCKET_IFNAME": "lo",
}
"""What torch and NCCL must find in the environment. Without these, torch ends processes of a group that has ended, and
NCCL listens on an interface that other hosts reach."""


class ProcessGroup:
    """A group in which this process is alone, or in which nobody else answers."""

    def __init__(self, gpu: SimulatedGpu, store: Any, size: int) -> None:
        for name, value in SETTINGS.items():
            if os.environ.get(name) != value:
                gpu.finds(f"nccl: {name} is {os.environ.get(name)}")
        self._gpu, self._size = gpu, size
        self._index: int | None = None  # of the device, once it is connected
        self._store = store  # until it is connected
        self.aborted = threading.Event()

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: Sequence[int] | Any) -> Any:
        """Exchange with nobody: what was sent arrives. If there are others, the stream waits until `abort`."""
        if self._store is not None:
            self._store.check(["connected"])  # raises `RuntimeError` if there is no store any more
            self._store, self._index = None, received.device.index
        if self._size == 1:
            received.copy_(sent)
        else:
            received.zero_()
            self._gpu.host.stream.held.append(self.aborted)
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        """End the exchanges: the stream goes on, with whatever was received. Uses the group's device meanwhile."""
        if self._index is not None:
            self._gpu.leaves_device(self._index)
        self.aborted.set()


def in_place_of(gpu: SimulatedGpu) -> Any:
    """Return what takes the place of `ProcessGroupNCCL`."""

    def make(store: Any, _rank: int, size: int, _options: Any) -> ProcessGroup:
        return ProcessGroup(gpu, store, size)

    make.Options = SimpleNamespace  # type: ignore[attr-defined]
    return make
