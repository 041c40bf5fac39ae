"""Registers the memory of the host tier with CUDA, so that copies between it and a GPU run at full speed."""

import logging
import threading
import time
from contextlib import suppress

import torch
from torch import Tensor

from encoder_service.store.segment import GIB

log = logging.getLogger(__name__)

REGISTERED_BYTES = 4 * GIB
"""Size of a piece of a `CudaRegistration`: about a second of work."""


class CudaRegistration:
    """Registers memory with CUDA on a background thread, because 0.1 to 0.3 s per GiB would delay the start by minutes.

    Copies meanwhile are correct, and slower. The memory is registered in pieces: recent drivers refuse 512 GiB in one
    call, and `close` waits for one piece only. A piece begins at a multiple of `REGISTERED_BYTES` of the address, so
    `within_piece` can tell where a copy has to be cut.
    """

    def __init__(self, memory: Tensor, device: str) -> None:
        """Begin. `memory` is uint8 [bytes]; `device` is the one whose context registers it, such as cuda:1."""
        self._memory, self._device = memory, device
        self._registered: list[Tensor] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-register", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and undo what was registered. No copy may be in progress."""
        self._closed.set()
        self._thread.join()
        for piece in self._registered:
            unregister_memory(piece, self._device)

    def _run(self) -> None:
        began, offset = time.monotonic(), 0
        while offset < len(self._memory) and not self._closed.is_set():
            piece = self._memory[offset:]
            piece = piece[: within_piece(piece)]
            if not register_memory(piece, self._device):
                return
            self._registered.append(piece)
            offset += len(piece)
        log.info("store: registered %.1f GiB with CUDA in %.1f s", offset / GIB, time.monotonic() - began)


def within_piece(memory: Tensor) -> int:
    """Return how many bytes from the beginning of `memory` on one copy may move: on the host, up to the end of a piece.

    CUDA refuses a copy whose host memory is partly registered, or registered in two pieces of a `CudaRegistration`.
    """
    if memory.is_cuda:
        return len(memory)
    return REGISTERED_BYTES - memory.data_ptr() % REGISTERED_BYTES


def register_memory(memory: Tensor, device: str) -> bool:
    """Register all of `memory` in one call. If CUDA refuses, log a warning and return False: copies are then slower.

    The call makes `device` current, because CUDA creates a context of hundreds of megabytes on the current device.
    """
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    if error:
        _forget_error(device)
        log.warning(
            "store: CUDA did not register the host tier (cudaError %d); copies to it will be slower. The usual "
            "reason is a limit on locked memory: see `ulimit -l`",
            error,
        )
    return not error


def _forget_error(device: str) -> None:
    """Have CUDA forget the error of this thread's last call. Else the next launch of a kernel reports it as its own."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def unregister_memory(memory: Tensor, device: str) -> None:
    """Undo `register_memory`. No copy may be in progress."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
