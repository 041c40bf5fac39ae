"""The measured rate of the device: patches per second of encoding, weighted towards recent batches."""

import math

# Seconds of device time after which an old measurement weighs 1/e.
MEMORY_S = 10.0


class Rate:
    """An exponentially weighted mean of patches per second of device time."""

    def __init__(self) -> None:
        self._patches = 0.0
        self._seconds = 0.0

    def add(self, patches: int, seconds: float) -> None:
        """Count a batch: its patches and the seconds the device was busy with it."""
        fade = math.exp(-seconds / MEMORY_S)
        self._patches = self._patches * fade + patches
        self._seconds = self._seconds * fade + seconds

    @property
    def patches_per_s(self) -> float:
        """Patches per second of device time; 0 before anything was measured."""
        return self._patches / self._seconds if self._seconds else 0.0
