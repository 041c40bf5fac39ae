"""The client works with only its own dependencies: without torch, Pillow and the server."""

import asyncio
import re
import tomllib
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import pytest

import encoder_contract
import prefill_client
from encoder_service.app import Server
from testing.photos import photo
from tests.pages import ROOT
from tests.processes import run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ABSENT = (
    *("torch", "PIL", "encoder_service", "prefill_reference"),
    *("prometheus_client", "redis", "rich", "safetensors"),
)

SCRIPT = """
import sys

site, endpoint, file, *absent = sys.argv[1:]
sys.path.insert(0, site)

from importlib.util import find_spec

from prefill_client import *
from prefill_client import cli

assert not [name for name in absent if find_spec(name)]
with BlockingClient.connect(endpoint) as encoder:
    (image,) = encoder.submit([open(file, "rb").read()])
    for transport in TRANSPORTS:
        with encoder.fetch([RowRequest(image.digest)], transports=[transport]) as outcomes:
            (rows,) = outcomes
            assert rows.error is None, rows.error
            print(rows.transport, type(rows.array).__module__, rows.array.shape[0] == image.tokens)
"""


def dependencies(requirements: list[str]) -> set[str]:
    """Return the names of distributions, and of all that they depend on."""
    names = {
        match[0]
        for each in requirements
        if "extra ==" not in each and (match := re.match(r"[\w.-]+", each)) and "python_version <" not in each
    }
    return names.union(*(dependencies(distribution(name).requires or []) for name in names))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that holds the client and what it depends on, and nothing else."""
    folder = tmp_path / "site"
    folder.mkdir()
    for package in (prefill_client, encoder_contract):
        (folder / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    for name in dependencies(PROJECT["dependencies"]):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(installed.locate_file(top))))
    return folder


async def test_the_client_returns_numpy_arrays_without_torch(
    server: Server, site: Path, tmp_path: Path
) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(photo(160, 120, 7))
    command = ("python", "-I", "-S", "-c", SCRIPT, site, server.endpoint, file, *ABSENT)
    done = await asyncio.to_thread(run, *command)
    assert done.stderr == ""
    assert done.stdout.split("\n")[:3] == ["shm numpy True", "shm numpy True", "inline numpy True"]


def test_packages_have_a_py_typed_marker() -> None:
    for package in ("prefill_client", "encoder_contract"):
        assert files(package).joinpath("py.typed").is_file()
