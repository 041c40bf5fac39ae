"""A benchmark run by its command, as `make bench` does."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bench.harness.results import ROOT


def figures_of_run(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark by the interpreter's `arguments`, `--json` among them, and return its figures."""
    ran = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures
