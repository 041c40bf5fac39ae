"""Stands in for NCCL: exchanges never block the host, and a process that is gone blocks the stream for ever.

Processes connect in their first exchange, through the store.
"""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.simulated_gpu.device import SimulatedGpu


class ProcessGroup:
    """A group in which this process is alone, or in which nobody else answers."""

    def __init__(self, gpu: SimulatedGpu, store: Any, size: int) -> None:
        self._gpu, self._size = gpu, size
        self._store = store  # until it is connected
        self.aborted = threading.Event()

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: Sequence[int] | Any) -> Any:
        """Exchange with nobody: what was sent arrives. If there are others, the stream waits until `abort`."""
        if self._store is not None:
            self._store.check(["connected"])  # raises `RuntimeError` if there is no store any more
            self._store = None
        if self._size == 1:
            received.copy_(sent)
        else:
            received.zero_()
            self._gpu.host.stream.held.append(self.aborted)
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        """End the exchanges: the stream goes on, with whatever was received."""
        self.aborted.set()


def in_place_of(gpu: SimulatedGpu) -> Any:
    """Return what takes the place of `ProcessGroupNCCL`."""

    def make(store: Any, _rank: int, size: int, _options: Any) -> ProcessGroup:
        return ProcessGroup(gpu, store, size)

    make.Options = SimpleNamespace  # type: ignore[attr-defined]
    return make
