"""The wheel: built from the tree, installed in another folder, complete and able to serve."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from encoder_contract.version import __version__
from testing.photos import photo
from testing.processes import LoggedProcess
from tests.pages import ROOT

PACKAGES = {
    "encoder_service": ROOT,
    "prefill_client": ROOT,
    "prefill_reference": ROOT,
    "encoder_contract": ROOT / "proto",
}
# The tree is copied, because a build in it would leave files behind and pack those of an earlier build.
SOURCES = (
    *("pyproject.toml", "MANIFEST.in", "Makefile", "constraints.txt", "requirements-vllm.txt"),
    *("requirements-sglang.txt", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md"),
    *("SECURITY.md", "LICENSE", "encoder_service", "prefill_client", "prefill_reference", "proto"),
    *("bench", "demo", "deploy", "docs", "examples", "testing", "tests"),
)
NOT_OURS = ("__pycache__", "*.egg-info", "node_modules", ".env", "*.log")
WAIT_S = 200  # building and installing the wheel takes five seconds


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*NOT_OURS))
        else:
            shutil.copy(ROOT / name, tree / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", tree / "dist", tree)
    (built,) = (tree / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which only the wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--target", folder, wheel)
    return folder


def pip(*arguments: str | Path) -> None:
    command, *others = arguments
    every = [sys.executable, "-m", "pip", "--quiet", command, "--no-deps", "--no-index", *others]
    subprocess.run(every, check=True, timeout=WAIT_S)


def installed(site: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the installed wheel outside the tree. Its errors go to the output of the test."""
    given: dict[str, Any] = {"cwd": site, "timeout": WAIT_S}
    # The wheel precedes the tree, which may be installed in this interpreter too.
    given["env"] = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **given)


def test_every_file_names_this_release() -> None:
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == __version__
    before = r"encoder-service[\w-]*:|encoder_service-|newName: encoder-service[\w-]*, newTag: |version=\""
    ours = rf"(?:{before})(\d+\.\d+\.\d+)"
    files = [*(ROOT / "deploy").rglob("*.y*ml"), ROOT / "deploy/Dockerfile", ROOT / "README.md"]
    named = {str(path): set(re.findall(ours, path.read_text())) for path in files}
    assert {name: found - {__version__} for name, found in named.items() if found - {__version__}} == {}
    assert len([found for found in named.values() if found]) >= 4


def test_the_source_distribution_is_complete_and_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    tree = wheel.parent.parent
    tracked = {str(path.relative_to(tree)) for name in SOURCES for path in files_of(tree / name)}
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, timeout=WAIT_S, capture_output=True)
    (source,) = tmp_path.iterdir()
    with tarfile.open(source) as packed:
        assert tracked - {name.partition("/")[2] for name in packed.getnames()} == set()
    pip("wheel", "--no-build-isolation", "--wheel-dir", tmp_path / "dist", source)
    (again,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(again) as rebuilt:
        names = {name for name in ours.namelist() if ".dist-info/" not in name}
        assert names == {name for name in rebuilt.namelist() if ".dist-info/" not in name}
        assert all(ours.read(name) == rebuilt.read(name) for name in names)


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]


def test_the_command_of_the_readme_installs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Runs the command as typed, in the folder of `make wheel`. The dependencies are installed already."""
    (line,) = re.findall(r"^pip (install \S*dist/.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (tmp_path / "dist").mkdir()
    shutil.copy(wheel, tmp_path / "dist")
    settings = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_TARGET": str(tmp_path / "site")}
    command = [sys.executable, "-m", "pip", "--quiet", *shlex.split(line)]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **settings}, check=True, timeout=WAIT_S)
    version = installed(tmp_path / "site", tmp_path / "site/bin/encoder-service", "--version")
    assert version.stdout == f"encoder-service {__version__}\n"


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(root))
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == expected
    assert __version__ in wheel.name
    assert {Path(name).suffix for name in packed} >= {".py", ".pyi", ".proto", ".lua", ".typed"}


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("encoder-service", "encoder_service"),
        ("prefill-client", "prefill_client"),
        ("prefill-reference", "prefill_reference"),
        ("encoder-sglang-gateway", "prefill_client.sglang_gateway"),
    ],
)
def test_commands_run_the_installed_packages(site: Path, command: str, module: str) -> None:
    assert installed(site, site / "bin" / command, "--version").stdout.split() == [command, __version__]
    code = f"import {module} as package; print(package.__file__)"
    assert Path(installed(site, sys.executable, "-c", code).stdout).is_relative_to(site)


def test_scripts_for_redis_are_found(site: Path) -> None:
    code = (
        "from encoder_service.cluster.redis.connection import Script, __file__ as file;"
        " Script('acquire'); print(file)"
    )
    assert Path(installed(site, sys.executable, "-c", code).stdout).is_relative_to(site)


def test_an_installed_server_serves_an_installed_client(site: Path, checkpoint: Path) -> None:
    (site / "photo.jpg").write_bytes(photo(300, 200, 1))
    command: list[str | Path] = [site / "bin" / "encoder-service", "serve", "--model", checkpoint]
    command += ["--listen", "127.0.0.1:0", "--store-host-gib", "0.04"]
    server = LoggedProcess(command, {"PYTHONPATH": str(site)})
    try:
        endpoint = server.wait_for_settings()["listening"]
        encode = [site / "bin" / "prefill-client", "encode", site / "photo.jpg", "--server", endpoint]
        assert "by shm" in installed(site, *encode).stdout
        assert server.terminate() == 0
    finally:
        server.kill()
