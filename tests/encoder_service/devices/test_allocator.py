"""Freed memory is reused instead of being mapped anew; loaded objects are excluded from garbage collection."""

import subprocess
import sys

PROGRAM = """
import resource, threading
import numpy as np
from encoder_service.devices.allocator import keep_freed_memory

def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work(found):
    np.empty(80 << 20, np.uint8).fill(1)
    before = faults()
    for _ in range(3):
        np.empty(80 << 20, np.uint8).fill(1)
    found.append(faults() - before)

assert keep_freed_memory()
found = []
thread = threading.Thread(target=work, args=(found,))
thread.start(); thread.join()
print(found[0])
"""


def printed(program: str) -> list[int]:
    """Return the numbers that a program prints, and nothing else: native modules report no leaks at exit."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert ran.stderr == ""
    return [int(number) for number in ran.stdout.split()]


def test_a_thread_fills_large_blocks_again_without_page_faults() -> None:
    [faults] = printed(PROGRAM)
    assert faults < 1000, "three blocks mapped afresh would be 61 440 faults of 4 KiB"


def test_loaded_objects_are_excluded_from_garbage_collection() -> None:
    loaded, left = printed("""
import gc, encoder_service.app, triton
from encoder_service.devices.allocator import out_of_collections
loaded = len(gc.get_objects())
with out_of_collections():
    print(loaded, len(gc.get_objects()))
""")
    assert loaded > 50_000
    assert left < 1000


def test_full_collections_happen_while_a_server_runs() -> None:
    """A full collection waits for a quarter as many new objects as the last one left, including frozen ones."""
    [collections] = printed("""
import gc
from encoder_service.devices.allocator import out_of_collections
loaded = [[] for _ in range(1_000_000)]
with out_of_collections():
    before = gc.get_stats()[2]["collections"]
    kept = [[] for _ in range(150_000)]
    print(gc.get_stats()[2]["collections"] - before)
""")
    assert collections > 0
