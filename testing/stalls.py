"""A pytest plugin that stalls processes and event loops at random, as a busy machine does: `make test-stalls`.

A test that fails only beside other load fails here within a run or two. Each worker's event loops stall between
callbacks, and the first process stops one descendant after the other: workers, servers, devices, Redis.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SWITCH_S = 0.02
"""How long a thread may keep the interpreter from others: Python's own value is 0.005."""
LOOP_RUNS_S, LOOP_STALLS_S = 0.2, 0.1
"""How long an event loop runs between two stalls, and how long it stalls, in the mean."""
PROCESS_STALLS_S = 0.25
"""The mean pause of a process. No stall is longer than eight times its mean."""


def pytest_configure(config: pytest.Config) -> None:
    """Stall this process's event loops, and from the first process all descendants."""
    seed = os.environ.setdefault("STALLS_SEED", str(random.SystemRandom().randrange(1 << 32)))
    chance = random.Random(f"{seed} {os.environ.get('PYTEST_XDIST_WORKER', '')}")
    sys.setswitchinterval(SWITCH_S)
    run = asyncio.events.Handle._run

    due = 0.0

    def run_late(handle: asyncio.Handle) -> None:
        nonlocal due
        if time.monotonic() > due:
            time.sleep(_drawn_s(chance, LOOP_STALLS_S))
            due = time.monotonic() + _drawn_s(chance, LOOP_RUNS_S)
        run(handle)

    asyncio.events.Handle._run = run_late  # type: ignore[assignment, method-assign]
    if hasattr(config, "workerinput"):
        sys.addaudithook(_note_stops)
        return
    folder = tempfile.TemporaryDirectory(prefix="stalls-")
    os.environ["STALLS_FOLDER"] = folder.name
    config.add_cleanup(folder.cleanup)
    threading.Thread(target=_stop_descendants, args=(chance,), daemon=True, name="stalls").start()


def pytest_report_header() -> str:
    """Name the seed."""
    return f"stalls: STALLS_SEED={os.environ['STALLS_SEED']}"


def _note_stops(event: str, arguments: tuple[Any, ...]) -> None:
    """Note which processes a test stops, so that they stay stopped."""
    if event == "os.kill" and arguments[1] in (signal.SIGSTOP, signal.SIGCONT):
        stopped = _stopped(arguments[0])
        if arguments[1] == signal.SIGSTOP:
            stopped.touch()
        else:
            stopped.unlink(missing_ok=True)


def _stopped(process: int) -> Path:
    return Path(os.environ["STALLS_FOLDER"], str(process))


def _stop_descendants(chance: random.Random) -> None:
    while True:
        time.sleep(chance.uniform(0, PROCESS_STALLS_S))
        if running := _running_descendants(os.getpid()):
            process = chance.choice(running)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGSTOP)
                time.sleep(_drawn_s(chance, PROCESS_STALLS_S))
                if not _stopped(process).exists():
                    os.kill(process, signal.SIGCONT)


def _drawn_s(chance: random.Random, mean_s: float) -> float:
    return min(chance.expovariate(1 / mean_s), 8 * mean_s)


def _running_descendants(ancestor: int) -> list[int]:
    """Return the descendants that no test has stopped."""
    children: dict[int, list[int]] = {}
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            process = int(stat.parent.name)
            states[process] = state
            children.setdefault(int(parent), []).append(process)
    found = []
    left = children.get(ancestor, [])
    while left:
        process = left.pop()
        left += children.get(process, [])
        if states[process] in "RSD":
            found.append(process)
    return found
