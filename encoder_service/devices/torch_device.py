"""The device of this process: CUDA streams, what an error means, a watchdog for a device that hangs.

On the CPU a stream does nothing.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encoder_contract.errors import EncoderError, OverloadedError, UnavailableError
from encoder_service.logs import known_error

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class MemoryUse:
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


DEVICE_LOST = "the server lost its device"
SHORT_RETRY_MS = 500  # other images in the pipeline release memory soon


class Faults:
    """What an error means for the device of this process. Thread-safe."""

    def __init__(self, device: Device, abort: Callable[[str, BaseException], None]) -> None:
        """`abort(why, error)` ends the process; it is called if the device is lost."""
        self._device = device
        self._abort = abort

    def known_error(self, error: Exception) -> EncoderError:
        """Translate an error for the callers that wait for an image. Call it on the thread that caught the error.

        Ends the process if the device is lost; see `is_loss`.
        """
        if self.is_loss(error):
            return UnavailableError(DEVICE_LOST)
        if self._device.is_full(error):
            log.warning("the device is short of memory", exc_info=error)
            return OverloadedError("the device is out of memory: retry", retry_after_ms=SHORT_RETRY_MS)
        return known_error(error)

    def is_loss(self, error: Exception) -> bool:
        """Check the device after `error`. Return whether it is lost, and then end the process.

        If the device is only out of memory, free memory.
        """
        if isinstance(error, EncoderError):
            return False
        if not self._device.is_lost():
            if self._device.is_full(error):
                self._device.recover(error)
            return False
        self._abort(DEVICE_LOST, error)
        return True


# CUDA has no wait with a time limit, so a wait for a device that hangs never ends: a watchdog notices it.
TICK_S = 1.0
"""Time between two checks. Checks are counted, not seconds: a process stopped for a minute has not hung."""
HUNG_S = 30.0
"""Work that takes this long has hung, unless it was predicted to take long."""
HUNG_FACTOR = 50.0
"""Work may take this many times its predicted time."""
DECODE_S = 12.0
"""Predicted time to decode an image on the CPU and copy it. 50 times this is beyond any limit on decoding."""
FRAME_S = 0.01
"""The same for each frame of a video that is decoded on the way. 50 times this is beyond the limit for one frame."""

FORM_S = 1.2
"""Predicted time to form a group. NCCL takes 2 to 20 s; 50 times this is a hang."""


class HungDeviceError(RuntimeError):
    """Work on the device takes so long that it will not end."""


@dataclass(eq=False, slots=True)
class _Watched:
    name: str
    left_s: float


class Watchdog:
    """Watches the work of threads on a device. Thread-safe."""

    def __init__(self, on_hang: Callable[[HungDeviceError], None]) -> None:
        """`on_hang` is called at most once, on the watchdog's thread."""
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._watched: set[_Watched] = set()
        self._closed = threading.Event()

    @contextmanager
    def watching(self, name: str, predicted_s: float = 0.0) -> Iterator[None]:
        """Watch the block. `predicted_s` is how long it should take; 0 if that is unknown or short."""
        watched = _Watched(name, max(HUNG_S, HUNG_FACTOR * predicted_s))
        with self._lock:
            self._watched.add(watched)
        try:
            yield
        finally:
            with self._lock:
                self._watched.discard(watched)

    def run(self) -> None:
        """Check every `TICK_S` until work hangs or `close` is called. Runs on its own thread."""
        while not self._closed.wait(TICK_S):
            if (error := self.check()) is not None:
                self._on_hang(error)
                return

    def check(self) -> HungDeviceError | None:
        """Count one tick against all watched work; return an error if some of it has hung."""
        with self._lock:
            for watched in self._watched:
                watched.left_s -= TICK_S
            hung = next((watched for watched in self._watched if watched.left_s <= 0), None)
        return None if hung is None else HungDeviceError(f"{hung.name} on the device does not end")

    def close(self) -> None:
        """End `run`."""
        self._closed.set()
