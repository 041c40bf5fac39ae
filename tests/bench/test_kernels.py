"""Every Triton kernel compiles for a GPU as in production. This machine needs no GPU."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

# Compiling takes long on a busy machine, and counts towards the first test's time.
pytestmark = pytest.mark.timeout(600)

Kernels = list[dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The properties of each kernel, compiled for sm_90."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "testing.compiled_kernels", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Kernels = json.loads(done.stdout)
    return found


@pytest.mark.cuda
def test_kernels_compile_for_hopper_without_spills_and_access_whole_words(compiled: Kernels) -> None:
    names = [kernel["kernel"] for kernel in compiled]
    assert len(names) == len({*names}) >= 8
    for kernel in compiled:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["registers"] <= 64, kernel
        assert kernel["widest_access_bytes"] >= 4, kernel


def test_pointwise_kernels_and_the_resize_along_columns_access_8_bytes_or_more(compiled: Kernels) -> None:
    """The resize along rows gathers pixels of three bytes one by one."""
    for kernel in compiled:
        assert kernel["widest_access_bytes"] >= 8 or kernel["kernel"] == "resize along rows", kernel
