"""Times of calls, and the processor time of processes."""

import time
from collections.abc import Callable
from statistics import median

CPUCLOCK_SCHED = 2  # with a process's id, its clock of processor time: clock_getcpuclockid(3)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def median_s(call: Callable[[], object], rounds: int) -> float:
    """Return the median of the seconds that calls take, after one that warms up."""
    call()
    return median(seconds(call) for _ in range(rounds))


def cpu_ms(process: int) -> float:
    """Return the processor time that all threads of a process have had, also those that have ended."""
    clock = ~process << 3 | CPUCLOCK_SCHED
    return time.clock_gettime_ns(clock) / 1e6


def spin_ms() -> float:
    """Return the processor time of a fixed piece of Python."""
    began, seen = time.process_time_ns(), {}
    for number in range(150_000):
        seen[number & 1023] = (number, str(number & 255))
    return (time.process_time_ns() - began) / 1e6
