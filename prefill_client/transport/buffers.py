"""Memory for arriving rows, used again: a fresh 29 MB block costs more in page faults than the copy into it."""

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

# What is kept for reuse: two images of 2560x1440 in Qwen3-VL-8B. More than this in flight is fresh memory.
MAX_IDLE_BYTES = 256 << 20
# Below this the allocator's own reuse is as good.
MIN_POOLED_BYTES = 1 << 20


class Buffers:
    """Hands out byte arrays; each is returned by itself once nothing refers to it or to a view of it."""

    def __init__(self, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.RLock()  # the garbage collector may give back while we take
        self._idle: list[bytearray] = []
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse now."""
        return self._idle_bytes

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes with any content, uint8 [size]."""
        if size < MIN_POOLED_BYTES:
            return np.empty(size, np.uint8)
        block = self._reuse(size) or bytearray(size)
        whole = np.frombuffer(block, np.uint8)
        # Every view, and every view of a view, refers to `whole`, so it lives as long as any of them.
        weakref.finalize(whole, self._give_back, block).atexit = False
        return whole[:size]

    def _reuse(self, size: int) -> bytearray | None:
        """Return the smallest idle block that holds `size` and wastes no more than half of itself."""
        with self._lock:
            fitting = [block for block in self._idle if size <= len(block) <= 2 * size]
            if not fitting:
                return None
            block = min(fitting, key=len)
            self._idle.remove(block)
            self._idle_bytes -= len(block)
            return block

    def _give_back(self, block: bytearray) -> None:
        with self._lock:
            self._idle.append(block)
            self._idle_bytes += len(block)
            while self._idle_bytes > self._max_idle_bytes:
                self._idle_bytes -= len(self._idle.pop(0))
