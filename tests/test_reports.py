"""A report that cannot be made takes neither the run nor its worker with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

# What CPython 3.11.2 does now and then, it does here each time that pytest parses the source of a failed test.
FAILING = """
import ast
import pytest

broken = pytest.MonkeyPatch()

def parse(*_, **__):
    raise SystemError("AST constructor recursion depth mismatch (before=46, after=49)")

def test_fails():
    broken.setattr(ast, "parse", parse)
    assert [] == ["the reason"]

def test_passes():
    broken.undo()
"""


@pytest.mark.parametrize("workers", [[], ["--numprocesses", "1"]], ids=["alone", "worker"])
def test_the_other_tests_run_when_a_report_cannot_be_made(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_file.py").write_text(FAILING)
    (tmp_path / "conftest.py").write_text("from tests.reports import pytest_runtest_makereport")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *workers]
    done = subprocess.run(
        [*command, "-c", "/dev/null", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "the reason" in done.stdout
    assert "AST constructor recursion depth mismatch" in done.stdout
