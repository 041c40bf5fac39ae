"""The device of this process: its streams, its memory, and whether it is lost. On the CPU a stream does nothing."""

import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from encoder_service.devices.memory_plan import MemoryUse


class CudaStream:
    """Work enqueued inside `with stream.use():` overlaps with the work of other streams."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device) if device.startswith("cuda") else None  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[Any]:
        """Make this the current stream of this thread."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> "torch.cuda.Event | None":
        """Return an event that passes when all work enqueued so far is done. Waiting for it does not use a core."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def receive(self, event: "torch.cuda.Event | None", tensors: Iterable[Tensor]) -> None:
        """Make this stream's next work wait for `event`, and keep the memory of `tensors` until this stream is done."""
        if self._stream is None or event is None:
            return
        self._stream.wait_event(event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)


_OUT_OF_MEMORY = ("out of memory", "_STATUS_ALLOC_FAILED")


class Device:
    """A device by torch's name for it: "cpu", "cuda" or "cuda:N". Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = torch.device(name).type

    @property
    def can_hang(self) -> bool:
        """Whether a wait for the device may never end. On the CPU threads do the work themselves."""
        return self.kind != "cpu"

    def make_current(self) -> None:
        """Make this the current device of the calling thread, before the thread uses it.

        Each thread begins with the first GPU. torch makes a thread's current device current again when it leaves a
        stream, and so does DALI: that creates a context there, of half a gigabyte.
        """
        if self.kind == "cuda":
            torch.cuda.set_device(self.name)

    def can_access(self, other: str) -> bool:
        """Whether kernels on this device can use memory of the device `other`: over NVLink, or PCIe between peers."""
        return other == self.name or torch.cuda.can_device_access_peer(self.name, other)

    def stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(self.name)

    def is_lost(self) -> bool:
        """Whether no further work can succeed in this process. Call it on the thread that caught an error.

        The error itself does not tell: CUDA, cuBLAS, cuDNN, Triton and DALI have their own types and messages, and a
        device still works after a refused launch or when its memory has run out. But a lost device fails every later
        call, so this waits for the stream.
        """
        try:
            self.synchronize()
        except RuntimeError:  # the base of torch's own errors
            return True
        return False

    @staticmethod
    def is_full(error: Exception) -> bool:
        """Whether an error means that the device is out of memory.

        torch's allocator has a type for it. CUDA and Triton say "out of memory", cuBLAS and cuDNN
        "..._STATUS_ALLOC_FAILED".
        """
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)

    def memory(self) -> MemoryUse:
        """Return the state of the device's memory; zeros on the CPU."""
        if self.kind == "cpu":
            return MemoryUse()
        free, total = torch.cuda.mem_get_info(self.name)
        return MemoryUse(
            total, free, torch.cuda.memory_reserved(self.name), torch.cuda.memory_allocated(self.name)
        )

    def recover(self, error: Exception) -> None:
        """Free device memory after it ran out: what `error` keeps alive, and what torch has cached.

        The locals of the failed calls are the batch's activations. The smaller batches that follow need that memory.
        """
        traceback.clear_frames(error.__traceback__)
        self.empty_cache()

    def empty_cache(self) -> None:
        """Return memory to the device that torch has reserved and does not use."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the work of this thread's current stream. Does nothing on the CPU, which cannot be lost."""
        if self.kind == "cuda":
            torch.cuda.current_stream(self.name).synchronize()
