"""Runs one benchmark in a separate process, for a limited time, and returns its result."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from bench.harness.benchmark import Benchmark
from bench.harness.results import NOT_RUN, OK, ROOT, Result, load, now, versions

LOGS = ROOT / ".bench"
END_S = 10.0  # for a benchmark that ran out of time to stop its servers


def run(benchmark: Benchmark, machine: str, *, quick: bool, limit_s: float) -> Result:
    """Run a benchmark for at most `limit_s` seconds; its output goes to `.bench/NAME.log`."""
    command = benchmark.command(quick=quick)
    LOGS.mkdir(exist_ok=True)
    log = LOGS / f"{benchmark.name}.log"
    measured, busy, began = versions(), load(), monotonic()
    with log.open("w") as output:
        status = _status(command, output.fileno(), limit_s)
    seconds = monotonic() - began
    figures, error = figures_in(log) if status == OK else ({}, "")
    if status == OK and error:
        status = "failed"
    return Result(
        benchmark.name,
        machine,
        status,
        shlex.join(["python", *command]),
        now(),
        round(seconds, 1),
        round(busy, 2),
        figures,
        error or ("" if status == OK else last_line(log)),
        measured,
    )


def not_run(benchmark: Benchmark, machine: str, why: str) -> Result:
    """Return the result of a benchmark that was not run."""
    command = shlex.join(["python", *benchmark.command(quick=False)])
    return Result(benchmark.name, machine, NOT_RUN, command, now(), error=why)


def _status(command: list[str], output: int, limit_s: float) -> str:
    # In its own session, so that stopping a benchmark also stops its servers and workers.
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"timed out after {limit_s:.0f} s"
    finally:
        _end(process)
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


def figures_in(log: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a log's last line, and an error if there is none."""
    try:
        figures = json.loads(last_line(log))
    except json.JSONDecodeError:
        return {}, f"its last line is no JSON object: {last_line(log)!r}"
    return (figures, "") if isinstance(figures, dict) else ({}, "its last line is no JSON object")


def last_line(log: Path) -> str:
    """Return the last line that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
