"""Runs the tests that need a GPU and notes each result. A test file that cannot be imported fails alone."""

import re
import subprocess
import sys

from bench.gpu_parts.probe import Probe
from bench.harness.results import ROOT

_OUTCOME = re.compile(r"^(tests/\S+?\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_REASON = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?\.py\S*) - (.+)$")
# Without conftest.py, which imports what servers need, and without our pytest options, whose plugins may be missing.
OPTIONS = [
    "-m",
    "gpu",
    "--noconftest",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "--continue-on-collection-errors",
]


def run(probe: Probe) -> None:
    """Run the tests until the time budget is used up. A dry run only collects them."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    )
    shown = ("--collect-only", "-q") if probe.dry else ("-v", "-rfE", "--color=no")
    command = [sys.executable, "-m", "pytest", *OPTIONS, *shown, *files]
    path = probe.out / "tests.log"
    with path.open("w") as log:
        try:
            code: int | str = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=log, timeout=max(probe.left_s, 1), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
    lines = path.read_text(errors="replace").splitlines()
    for line in lines:
        if found := _OUTCOME.match(line):
            probe.note(test=found[1], outcome=found[2].lower())
        elif reason := _REASON.match(line):
            probe.note(test=reason[1], failed=reason[2][:300])
    collected = {"collected": sum("::" in line for line in lines)} if probe.dry else {}
    probe.note(files=len(files), **collected, exit_code=code)
    if code:
        raise SystemExit(f"pytest ended with {code}")
