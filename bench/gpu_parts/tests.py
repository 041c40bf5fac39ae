"""Runs the tests that need a GPU and notes each result. A test file that cannot be imported fails alone."""

import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from threading import Timer

from bench.gpu_parts.probe import Probe
from bench.harness.results import ROOT

# Pytest runs in its own process, which a test may kill. The process is forked, so it need not import torch again.
FORKS = multiprocessing.get_context("fork")
_OUTCOME = re.compile(r"^(tests/\S+?\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_REASON = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py\S*) - (.+)$")
# Without conftest.py, which imports what servers need, and without our pytest options, whose plugins may be missing.
OPTIONS = (
    "-m",
    "gpu",
    "--noconftest",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "--continue-on-collection-errors",
)


def run(probe: Probe) -> None:
    """Run the tests until the time budget is used up. A dry run only collects them."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    )
    shown = ("--collect-only", "-q") if probe.dry else ("-v", "-rfE", "--color=no")
    read_end, write_end = os.pipe()
    process = FORKS.Process(target=_pytest, args=([*OPTIONS, *shown, *files], write_end))
    process.start()
    os.close(write_end)
    timer = Timer(max(probe.left_s, 0), process.kill)
    timer.start()
    collected = 0
    try:
        with (
            open(read_end, errors="replace") as lines,
            (probe.out / "tests.log").open("w", buffering=1) as log,
        ):
            for line in lines:
                log.write(line)
                collected += "::" in line
                if found := _OUTCOME.match(line):
                    probe.note(test=found[1], outcome=found[2].lower())
                elif reason := _REASON.match(line):
                    probe.note(test=reason[1], failed=reason[2][:300])
    finally:
        timer.cancel()
        process.join()
        code = process.exitcode
    probe.note(files=len(files), **({"collected": collected} if probe.dry else {}), exit_code=code)
    if code:
        raise SystemExit(f"pytest ended with {code}")


def _pytest(arguments: Sequence[str], output: int) -> None:
    """Run pytest in this process, with its output redirected to a file descriptor."""
    import pytest

    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.chdir(ROOT)
    sys.exit(pytest.main(list(arguments)))
