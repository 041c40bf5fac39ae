"""Process memory settings: reuse freed blocks, and spare startup objects garbage collection."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's mallopt parameters, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
KEEP_BELOW_BYTES = 1 << 30
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Make malloc reuse freed memory for blocks below 1 GiB. Return False if the C library has no such settings.

    By default glibc maps every block of 32 MiB or more anew and unmaps it when freed: filling it then costs a page
    fault every 4 KiB, several times the cost of writing. There is one arena, because the arenas of threads only hold
    blocks of up to 64 MiB. This is like MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_ARENA_MAX in the
    environment, which must be set before the program starts.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, KEEP_BELOW_BYTES), (_M_TRIM_THRESHOLD, _NEVER))
    done = [mallopt(parameter, value) for parameter, value in settings]
    return all(done)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block, which imports modules. Collections find none, and take a sixth of its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def out_of_collections() -> Iterator[None]:
    """Exclude all existing objects from garbage collection. Enter it once everything is loaded.

    torch's modules alone are 200 000 objects. A full collection that walks them blocks all threads for about 0.15 s,
    and none of these objects is ever garbage.
    """
    gc.collect()
    gc.freeze()
    # The next full collection waits for a quarter as many new objects as the last one left: after this one, none.
    gc.collect()
    try:
        yield
    finally:
        gc.unfreeze()  # freed at exit: Triton's objects would be reported as leaked
