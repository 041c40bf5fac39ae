"""Environment variables that vLLM on a CPU needs before torch and vLLM are imported, in tests and benchmarks."""

from pathlib import Path

PYTHON = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
"""The interpreter with vLLM, which `make test-vllm` installs."""

# One process, nothing from the network, and one thread: with two threads on two cores a step takes twenty times as
# long.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
