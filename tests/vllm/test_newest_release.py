"""The newest release's renderer, scheduler and worker wrappers work with our connector."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.server_process import ServerProcess, running
from tests.vllm.service import SERVICE, SETTINGS
from tests.vllm.test_vllm_names import WHEELS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["host", "device"])
def tier(request: pytest.FixtureRequest) -> str:
    """The tier where the service keeps rows; a memory file replaces a GPU's memory."""
    return str(request.param)


@pytest.fixture(scope="module")
def service(checkpoint: Path, tier: str) -> Iterator[ServerProcess]:
    """A server with that tier."""
    gib = 0.01 if tier == "device" else 0.0
    with running(checkpoint, executable=SERVICE, **SETTINGS, store_device_gib=gib) as server:
        yield server


@pytest.fixture(scope="module")
def report(
    checkpoint: Path, service: ServerProcess, tier: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The report of `newest_release`, which runs the Python files of that wheel without its CUDA libraries."""
    wheels = sorted(WHEELS.glob("vllm-*.whl"))
    if not wheels:
        pytest.skip("make test-vllm fetches the wheels")
    files = tmp_path_factory.mktemp("newest")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(files, [name for name in wheel.namelist() if not name.endswith(".so")])
    paths = [files, ROOT, ROOT / "proto"]
    command = [sys.executable, "-m", "tests.vllm.newest_release", checkpoint, service.endpoint, tier]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert seen["from"] == str(files / "vllm")
    return seen


@pytest.mark.story("the newest release")
@pytest.mark.story("rows arrive to the bit")
@pytest.mark.parametrize("runner", ["first_runner", "second_runner"])
def test_prefill_stops_at_a_missing_image_and_rows_are_bit_equal(report: dict[str, Any], runner: str) -> None:
    assert report[runner] == {
        "stops_at_the_missing_image": True,
        "inside_a_step": True,
        "status": "FINISHED_LENGTH_CAPPED",
        "rows_equal": [True, True],
    }


def test_a_request_without_rows_fails_alone_and_holds_nothing(report: dict[str, Any]) -> None:
    assert report["hostile"] == "FINISHED_ERROR"
    assert report["held"] == 0


def test_parts_are_what_its_parser_takes_them_for(report: dict[str, Any]) -> None:
    assert not report["parts"]["count"], report["parts"]
    assert report["same_fields"]


@pytest.mark.story("the newest release")
def test_the_wheel_is_the_newest_release_in_pyproject(report: dict[str, Any]) -> None:
    assert report["version"].startswith("0.33.")
