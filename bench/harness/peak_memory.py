"""The peak of this process's memory during a call."""

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path


def peak_bytes(call: Callable[[], None]) -> int:
    """Return how far the process's memory rises during a call."""
    # What the allocator kept of earlier work would hide what this call needs.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Return a memory figure of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
