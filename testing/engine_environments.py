"""The virtual environments of vLLM and SGLang, and how to run a module of ours there."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""The interpreter that has vLLM; `make test-vllm` makes it."""
SGLANG_FOLDER = Path(os.environ.get("SGLANG_ENVIRONMENT", ROOT / ".venv-sglang"))
"""`make test-sglang` makes it with the oldest release; `newest` in it has the newest, `wheels` those between."""
SGLANG_PYTHON = SGLANG_FOLDER / "bin" / "python"
"""The interpreter that has the oldest release of SGLang."""

# For vLLM on a CPU, to be set before torch and vLLM are imported: one process, no network, and one thread. With two
# threads on two cores a step takes twenty times as long.
VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def run_module(python: Path, module: str, *arguments: str, variables: Mapping[str, str]) -> int:
    """Run a module of ours with another interpreter, for servers of this environment; return its exit code."""
    if not python.exists():
        sys.stderr.write(f"{module} needs {python}: make test-vllm or make test-sglang\n")
        return 2
    service = Path(sys.executable).with_name("encoder-service")
    environment = {"ENCODER_SERVICE": str(service), **os.environ, **variables}
    return subprocess.run([python, "-m", module, *arguments], env=environment, check=False).returncode
