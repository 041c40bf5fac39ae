"""Runs the tests that need a GPU and notes each result. A test file that cannot be imported fails alone."""

import re
import subprocess
import sys
from threading import Timer

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
    collected = 0
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pytest:
        timer = Timer(max(probe.budget.left_s, 1), pytest.kill)
        timer.start()
        for line in pytest.stdout or ():
            print(f"    {line}", end="", flush=True)
            collected += "::" in line
            if found := _OUTCOME.match(line):
                failed = {"failed": "no reason"} if found[2] in ("FAILED", "ERROR") else {}
                probe.note(found[1], outcome=found[2].lower(), **failed)
            elif reason := _REASON.match(line):
                probe.note(reason[1], failed=reason[2][:300])
        timer.cancel()
    code = pytest.returncode
    failed = {"failed": f"exit code {code}"} if code else {}
    probe.note("pytest", files=len(files), **({"collected": collected} if probe.dry else {}), **failed)
