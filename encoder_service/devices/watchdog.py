"""Notices a device that hangs: how long its work may take, and a watchdog that counts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
