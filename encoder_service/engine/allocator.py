"""Process memory settings: reuse freed blocks, and exclude startup objects from garbage collection."""

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
    """Serve blocks below 1 GiB from memory that was freed before; False where the C library has no such knobs.

    By default glibc maps every block of 32 MiB or more afresh and unmaps it when freed: filling it then costs a page
    fault every 4 KiB, several times the writing itself. One arena, because those of threads hold blocks of up to
    64 MiB only. As MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_ARENA_MAX in the environment, which
    count only when set before the program starts.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, KEEP_BELOW_BYTES), (_M_TRIM_THRESHOLD, _NEVER))
    done = [mallopt(parameter, value) for parameter, value in settings]
    return all(done)


@contextmanager
def out_of_collections() -> Iterator[None]:
    """Keep what exists now out of garbage collections: enter it once everything is loaded.

    torch's modules alone are 200 000 objects. A full collection that walks them takes some 0.15 s, in which no thread
    answers anybody; none of them is ever garbage.
    """
    gc.collect()
    gc.freeze()
    # A full collection waits until a quarter as many objects have come as the last one left: now none are left.
    gc.collect()
    try:
        yield
    finally:
        gc.unfreeze()  # the interpreter's last collection frees them: Triton's would be reported as leaked
