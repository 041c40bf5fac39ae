"""The allocator's setting: memory that a thread frees is used again instead of being mapped afresh."""

import subprocess
import sys

PROGRAM = """
import resource, threading
import numpy as np
from encoder_service.engine.allocator import keep_freed_memory

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


def test_a_thread_fills_large_blocks_again_without_page_faults() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert int(result.stdout) < 1000, "three blocks mapped afresh would be 61 440 faults of 4 KiB"
