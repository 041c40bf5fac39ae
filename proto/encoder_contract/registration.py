"""Registers host memory with CUDA on a background thread, so that copies between it and a GPU run at full speed."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

GIB = 1 << 30
REGISTERED_BYTES = 4 * GIB
"""Size of a piece of a `CudaRegistration`: about a second of work."""


class HostBytes(Protocol):
    """A tensor of flat bytes: uint8 [bytes]."""

    @property
    def is_cuda(self) -> bool: ...

    def data_ptr(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


Memory = TypeVar("Memory", bound=HostBytes)


class CudaRegistration(Generic[Memory]):
    """Registers memory with CUDA on a background thread: 0.1 to 0.3 s per GiB would delay a start, or an engine's step.

    Copies meanwhile are correct, and slower. The memory is registered in pieces: recent drivers refuse 512 GiB in one
    call, and `close` waits for one piece only. A piece begins at a multiple of `REGISTERED_BYTES` of the address, so
    `within_piece` can tell where a copy has to be cut.
    """

    def __init__(
        self,
        memory: Memory,
        register: Callable[[Memory], bool],
        unregister: Callable[[Memory], None] = lambda _: None,
    ) -> None:
        """Begin. `register` registers a piece and returns whether CUDA did; `unregister` undoes it for `close`.

        The thread ends at the first refusal, whose error CUDA keeps for the thread.
        """
        self._memory, self._register, self._unregister = memory, register, unregister
        self._registered: list[Memory] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cuda-registration", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and undo what was registered. No copy may be in progress."""
        self._closed.set()
        self._thread.join()
        for piece in self._registered:
            self._unregister(piece)

    def _run(self) -> None:
        began, offset = time.monotonic(), 0
        while offset < len(self._memory) and not self._closed.is_set():
            piece: Memory = self._memory[offset:]
            piece = piece[: within_piece(piece)]
            if not self._register(piece):
                return
            self._registered.append(piece)
            offset += len(piece)
        spent_s = time.monotonic() - began
        log.info("registered %.1f GiB of host memory with CUDA in %.1f s", offset / GIB, spent_s)


def within_piece(memory: HostBytes) -> int:
    """Return how many bytes from the beginning of `memory` on one copy may move: on the host, up to the end of a piece.

    CUDA refuses a copy whose host memory is partly registered, or registered in two pieces of a `CudaRegistration`.
    """
    if memory.is_cuda:
        return len(memory)
    return REGISTERED_BYTES - memory.data_ptr() % REGISTERED_BYTES
