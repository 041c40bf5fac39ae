"""Downloads the few wheels that a machine with torch for CUDA 13 lacks into a folder: run by `make gpu-wheels`.

python -m bench.gpu_parts.wheels FOLDER
# there:
python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl
PYTHONPATH=SITE:.:proto python3 -m bench.gpu --out DIR
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The modules that such a machine has: torch, triton, transformers and pytest with their dependencies, and these.
THERE = frozenset(
    {
        *("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "pytest"),
        *("PIL", "grpc", "google", "xxhash", "prometheus_client"),
    }
)
# Package → the module that it brings.
PACKAGES = {
    # Flash attention 3, forward alone; one person's build of the published sources.
    "fa3-fwd==0.0.3": "fa3_fwd_interface",
    "nvidia-nvimgcodec-cu13==0.9.0.20": "nvidia",  # DALI's own decoder; DALI itself is ten times as large
    "nvidia-nvjpeg==13.3.2.43": "nvidia",
    "blake3": "blake3",
    "cachetools": "cachetools",
    "redis": "redis",
    "rich": "rich",
    "markdown-it-py": "markdown_it",  # for rich; Pygments comes with pytest
    "mdurl": "mdurl",
    "psutil": "psutil",
    "grpcio-health-checking==1.76.0": "grpc_health",
    "grpcio-reflection==1.76.0": "grpc_reflection",
}
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28)  # versions 2.N that wheels are built for; pip takes no range
MAX_BYTES = 60 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Download them; return 1 when the folder is larger than it may be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    for package in PACKAGES:
        subprocess.run(command(package, folder), check=True)
    listed, size_bytes = listing(folder)
    print(listed)
    return int(size_bytes > MAX_BYTES)


def command(package: str, folder: Path) -> list[str]:
    """Return the command that fetches one wheel for that machine."""
    platforms = [
        *(f"manylinux_2_{version}_x86_64" for version in GLIBC),
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"),
        *("--abi", "cp312", "--abi", "abi3", "--abi", "none"),
        *(word for platform in platforms for word in ("--platform", platform)),
        *("--dest", str(folder), package),
    ]


def listing(folder: Path) -> tuple[str, int]:
    """Return the wheels of a folder with their sizes as text, and the sum in bytes."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.whl"))}
    total = sum(sizes.values())
    rows = [f"{size / (1 << 20):7.2f} MiB  {name}" for name, size in sizes.items()]
    return "\n".join([*rows, f"{total / (1 << 20):7.2f} MiB in all, of at most {MAX_BYTES >> 20}"]), total


if __name__ == "__main__":
    sys.exit(main())
