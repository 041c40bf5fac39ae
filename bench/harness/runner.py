"""Runs one benchmark in a separate process, for a limited time, and returns its result."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from bench.harness.benchmark import Benchmark
from bench.harness.results import NOT_RUN, OK, ROOT, STOPPED, Result, load, now, versions

LOGS = ROOT / ".bench"
END_S = 10.0  # for a benchmark that ran out of time to stop its servers
LATE_S = 60.0  # a benchmark in steps that ends so long after its budget hangs
STEP_S = 1.0  # between two looks at what a benchmark has printed
PROGRESS_S = 60.0


def run(
    benchmark: Benchmark,
    machine: str,
    *,
    dry_run: bool,
    limit_s: float,
    logs: Path = LOGS,
    so_far: Callable[[Result], object] = lambda _: None,
) -> Result:
    """Run a benchmark for at most `limit_s` seconds; its output goes to `NAME.log` in the folder `logs`.

    `so_far` is called every `STEP_S` with what a benchmark in steps has measured so far. Every `PROGRESS_S`, the last
    line of its output is shown.
    """
    command = benchmark.command(dry_run=dry_run, budget_s=limit_s)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{benchmark.name}.log"
    typed, busy = shlex.join(["python", *command]), round(load(), 2)
    result = Result(benchmark.name, machine, STOPPED, typed, now(), load=busy, versions=versions())
    began = shown = monotonic()
    deadline = began + limit_s + (LATE_S if benchmark.in_steps else 0.0)
    with log.open("w") as output:
        process = _started(command, output.fileno())
    try:
        while result.status == STOPPED:
            status, seconds = _status(process, deadline), round(monotonic() - began, 1)
            result = replace(
                result, status=status, measured_at=now(), seconds=seconds, figures=figures_in(log)
            )
            if benchmark.in_steps and result.figures:
                so_far(result)
            if result.status == STOPPED and monotonic() - shown >= PROGRESS_S:
                shown = monotonic()
                print(f"  {seconds:.0f} s: {last_line(log)[:100]}", flush=True)
    finally:
        _end(process)
    if result.status == OK and not result.figures:
        result = replace(result, status="failed")
    return result if result.status == OK else replace(result, error=last_line(log))


def not_run(benchmark: Benchmark, machine: str, why: str) -> Result:
    """Return the result of a benchmark that was not run."""
    command = shlex.join(["python", *benchmark.command(dry_run=False)])
    return Result(benchmark.name, machine, NOT_RUN, command, now(), error=why)


def _started(command: list[str], output: int) -> "subprocess.Popen[bytes]":
    # In its own session, so that stopping a benchmark also stops its servers and workers.
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _status(process: "subprocess.Popen[bytes]", deadline: float) -> str:
    """Return how a process has ended; `STOPPED` if it still runs `STEP_S` later and may."""
    try:
        code = process.wait(min(STEP_S, max(deadline - monotonic(), 0)))
    except subprocess.TimeoutExpired:
        return STOPPED if monotonic() < deadline else "timed out"
    return OK if code == 0 else f"failed with exit code {code}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop all processes of a benchmark's session; servers get time to drain."""
    for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, 1.0)):
        if not _signalled(process.pid, number):
            return
        deadline = monotonic() + patience_s
        while monotonic() < deadline:
            process.poll()  # a process that nobody waits for still counts as alive
            if not _signalled(process.pid, 0):
                return
            sleep(0.05)


def _signalled(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether it has any process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def figures_in(log: Path) -> dict[str, Any]:
    """Return the figures in a log: each JSON object that is a line of its own adds to them."""
    figures: dict[str, Any] = {}
    for line in log.read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError):  # the last line of a stopped benchmark may be truncated
            figures |= json.loads(line) if line.startswith("{") else {}
    return figures


def last_line(log: Path) -> str:
    """Return the last line that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
