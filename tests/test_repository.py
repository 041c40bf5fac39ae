"""The repository's own services: CI, dependency updates, hooks and forms are valid, and run commands that exist."""

import re
import subprocess
import sys

import pytest
import yaml

from tests.pages import ROOT

SCHEMAS = {
    ".github/workflows/ci.yml": "vendor.github-workflows",
    ".github/dependabot.yml": "vendor.dependabot",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    **{
        f".github/ISSUE_TEMPLATE/{name}.yml": "vendor.github-issue-forms" for name in ("bug", "idea", "model")
    },
}


@pytest.mark.parametrize("path", SCHEMAS)
def test_files_for_github_follow_its_schemas(path: str) -> None:
    program = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[path]]
    done = subprocess.run([*program, ROOT / path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_what_a_contributor_runs_on_the_oldest_and_the_newest_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["run"]
    assert job["steps"][-1]["run"] == ".ci/run"
    oldest = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert job["strategy"]["matrix"]["python"] == [oldest[1], "3.13"]
    assert re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()
    ) == [*("3.11", "3.12", "3.13")]


def test_hooks_run_commands_of_make_check() -> None:
    checks = (
        (ROOT / "Makefile")
        .read_text()
        .replace("$(VENV)/bin/", ".venv/bin/")
        .replace("$(PY)", ".venv/bin/python")
    )
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for hook in config["repos"][0]["hooks"]:
        command = re.sub(r" --(fix|force-exclude)\b", "", hook["entry"])
        assert f"@{command}" in checks, hook["id"]
