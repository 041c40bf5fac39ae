"""The environment of a device's process: what its libraries read, without the passwords of the server's environment."""

import os

# Where the interpreter, libraries and caches are, and the settings of the libraries that a device's process uses.
_NAMES = ("PATH", "HOME", "TMPDIR", "LANG", "TZ", "USER", "CC")  # Triton compiles with `CC`
_PREFIXES = (
    *("PYTHON", "LD_", "LC_", "XDG_", "MALLOC_", "GLIBC_"),
    *("OMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "OPENCV_", "ATEN_"),
    *("TORCH", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "GLOO_", "DALI_", "FLASH_ATTENTION_"),
)


def device_environment() -> dict[str, str]:
    """Return the variables of this process that a device's process gets."""
    return {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
