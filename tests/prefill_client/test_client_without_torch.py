"""The client alone: it installs and works where there is no torch, with rows as numpy arrays."""

import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

from testing.photos import photo
from tests.processes import running

ROOT = Path(__file__).resolve().parents[2]

# Whatever is not among the client's own dependencies is not to be had.
SCRIPT = """
import asyncio, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "nvidia", "safetensors", "redis", "fastapi",
                                      "uvicorn", "prometheus_client", "matplotlib", "rich", "encoder_service"}:
            raise ImportError(f"{name} is absent")

sys.meta_path.insert(0, Absent())

from prefill_client.prompt import layout

from prefill_client.prompt import chunks as plan

from prefill_client.transport import shared_memory as segment

from prefill_client.prompt import prefetch as session

from prefill_client.tools import timeline

from prefill_client.tools import trace

from prefill_client import blocking, cli, client
from prefill_client.images import RowRequest

endpoint, file = sys.argv[1:]
with blocking.BlockingClient.connect(endpoint) as encoder:
    (image,) = encoder.submit([open(file, "rb").read()])
    for transport in ("shm", "inline"):
        with encoder.fetch([RowRequest(image.digest)], transports=[transport]) as outcomes:
            (rows,) = outcomes
            assert rows.error is None, rows.error
            print(rows.transport, type(rows.array).__module__, rows.array.shape[0] == image.tokens)
assert "torch" not in sys.modules
"""


def test_without_torch_the_client_gives_rows_as_numpy_arrays(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(photo(160, 120, 7))
    with running(checkpoint) as server:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, server.endpoint, str(file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:2] == ["shm numpy True", "inline numpy True"]


def test_the_packages_say_that_they_are_typed() -> None:
    for package in ("prefill_client", "encoder_contract"):
        assert files(package).joinpath("py.typed").is_file()


def test_torch_is_an_extra_and_no_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith("torch")]
    assert [name.split(">")[0] for name in project["optional-dependencies"]["torch"]] == ["torch"]
