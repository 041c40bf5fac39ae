"""The device of this process: its CUDA streams, and whether it still works. On the CPU a stream does nothing."""

import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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


_OUT_OF_MEMORY = ("out of memory", "_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device: all, free, reserved by torch, and used by torch."""

    total: int = 0
    free: int = 0
    reserved: int = 0
    allocated: int = 0


class Device:
    """A device by torch's name for it: "cpu", "cuda" or "cuda:N". Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = torch.device(name).type

    @property
    def can_hang(self) -> bool:
        """Whether what waits for it may wait for ever; on the CPU a thread does its work itself."""
        return self.kind != "cpu"

    def stream(self) -> CudaStream:
        """Return a stream of its own for a worker."""
        return CudaStream(self.name)

    def is_lost(self) -> bool:
        """Whether nothing more can succeed on it in this process; to be asked on the thread that met an error.

        Errors do not tell: those of CUDA, cuBLAS, cuDNN, Triton and DALI have types and words of their own, and a
        launch that was refused, or memory that ran out, leaves the device as it was. But a device that is lost fails
        every later call, and so the wait that this is.
        """
        try:
            self.synchronize()
        except RuntimeError:  # what torch's own errors derive from
            return True
        return False

    @staticmethod
    def is_full(error: Exception) -> bool:
        """Whether an error means that memory ran out there: torch's own allocator says so by type, others in words.

        CUDA and Triton say "out of memory", cuBLAS and cuDNN "..._STATUS_ALLOC_FAILED".
        """
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)

    def memory(self) -> DeviceMemory:
        """Return the state of its memory now; zeros on the CPU, which has none of its own."""
        if self.kind == "cpu":
            return DeviceMemory()
        free, total = torch.cuda.mem_get_info(self.name)
        return DeviceMemory(
            total, free, torch.cuda.memory_reserved(self.name), torch.cuda.memory_allocated(self.name)
        )

    def recover(self, error: Exception) -> None:
        """After memory ran out: give back what `error` keeps alive, and what torch keeps for later.

        The locals of the calls that failed are the activations of the batch; the smaller batches that follow need
        their room.
        """
        traceback.clear_frames(error.__traceback__)
        self.empty_cache()

    def empty_cache(self) -> None:
        """Give the memory that torch has reserved and does not use back to the device."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for what this thread's current stream has to do. Nothing on the CPU, which cannot be lost."""
        if self.kind == "cuda":
            torch.cuda.current_stream(self.name).synchronize()
