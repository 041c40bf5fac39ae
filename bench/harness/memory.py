"""The memory of a process and its children while something runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

SAMPLE_S = 0.02


def resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process, with the pages that it shares."""
    return int(process.memory_info().rss)


def private_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process without files and shared memory, such as the store."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else 0  # a process that has ended has no memory


@contextmanager
def peak_bytes(
    pid: int, memory_of: Callable[[psutil.Process], int] = resident_bytes
) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak memory of a process and its children since the block began."""
    peak, is_over = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not is_over.wait(SAMPLE_S):
            process, held = psutil.Process(pid), 0
            for each in (process, *process.children(recursive=True)):
                try:
                    held += memory_of(each)
                except psutil.NoSuchProcess:
                    continue
            peak = max(peak, held)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield lambda: peak
    is_over.set()
    thread.join()
