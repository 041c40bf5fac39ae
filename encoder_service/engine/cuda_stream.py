"""The CUDA stream of one worker, and how tensors pass from one stream to another. On the CPU, nothing."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class CudaStream:
    """Work enqueued inside `with stream.use():` overlaps with that of other streams."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device) if device.startswith("cuda") else None  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        """Make this the current stream of this thread."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> "torch.cuda.Event | None":
        """Return an event that passes when everything enqueued so far is done; who waits for it takes no core."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def receive(self, event: "torch.cuda.Event | None", tensors: Iterable[Tensor]) -> None:
        """Let this stream's next work wait for `event`; keep the memory of `tensors` until it is done with them."""
        if self._stream is None or event is None:
            return
        self._stream.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
