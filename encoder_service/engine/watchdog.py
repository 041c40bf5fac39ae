"""Notices a device that hangs: CUDA has no wait with a limit, so what waits for such a device waits for ever."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOST, STUCK = 70, 71
"""Exit codes of a process whose device was lost, or hangs."""
TICK_S = 1.0
"""Time between two looks. Looks are counted, not the clock: a process that was stopped for a minute has not hung."""
HUNG_S = 30.0
"""What takes so long has hung, unless it was predicted to take long:"""
HUNG_FACTOR = 50.0
"""then it has this many times as long as was predicted."""
DECODE_S = 12.0
"""Prediction for an image that is decoded on the CPU and then copied: ten minutes are beyond any limit on decoding."""
FRAME_S = 0.01
"""And for each frame of a video that is decoded on the way: half a second is beyond the limit for one."""


class HungDeviceError(RuntimeError):
    """Work on the device took so long that it will not end."""


@dataclass(eq=False, slots=True)
class _Watched:
    name: str
    left_s: float


class Watchdog:
    """Watches what threads do on a device. Thread-safe."""

    def __init__(self, on_hang: Callable[[HungDeviceError], None]) -> None:
        """`on_hang` is called at most once, on the watchdog's thread."""
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._watched: set[_Watched] = set()
        self._closed = threading.Event()

    @contextmanager
    def watching(self, name: str, predicted_s: float = 0.0) -> Iterator[None]:
        """Watch the block, which is predicted to take so long; 0 where that is unknown or short."""
        watched = _Watched(name, max(HUNG_S, HUNG_FACTOR * predicted_s))
        with self._lock:
            self._watched.add(watched)
        try:
            yield
        finally:
            with self._lock:
                self._watched.discard(watched)

    def run(self) -> None:
        """Look every `TICK_S` until something hangs or `close`: a thread's target."""
        while not self._closed.wait(TICK_S):
            if (error := self.look()) is not None:
                self._on_hang(error)
                return

    def look(self) -> HungDeviceError | None:
        """Count one tick against all that is watched; return the error of what has hung."""
        with self._lock:
            for watched in self._watched:
                watched.left_s -= TICK_S
            hung = next((watched for watched in self._watched if watched.left_s <= 0), None)
        return None if hung is None else HungDeviceError(f"{hung.name} on the device does not end")

    def close(self) -> None:
        """End `run`."""
        self._closed.set()
