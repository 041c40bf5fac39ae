"""Downloads into a folder the few wheels that a machine with torch for CUDA 13 lacks; `make gpu-wheels` runs it.

python -m bench.gpu_parts.wheels FOLDER
# on that machine:
python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl FOLDER/dali-*/*.whl
cat FOLDER/dali-*/dali.xz.* | tar xJ -C SITE
PYTHONPATH=SITE:.:proto python3 -m bench.gpu --out DIR

DALI's wheel has 476 MiB. So this keeps only its GPU code for Hopper, compresses it, and splits it into pieces. The
folder itself, `dali-1` and `dali-2` are each small enough to be transferred at a time.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_parts.fatbin import prune

# The modules that such a machine has: torch, triton, transformers and pytest with their dependencies, and some more.
PREINSTALLED = frozenset(
    {
        *("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "pytest"),
        *("PIL", "grpc", "google", "xxhash", "prometheus_client"),
    }
)
# Package → the module that it installs.
PACKAGES = {
    # FlashAttention 3, only the forward; a third-party build of the published sources.
    "fa3-fwd==0.0.3": "fa3_fwd_interface",
    "nvidia-nvimgcodec-cu13==0.9.0.20": "nvidia",  # DALI's own decoder
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
DALI = "nvidia-dali-cuda130==2.4.0"
DALI_NEEDS = {
    "astunparse": "astunparse",
    "gast": "gast",
    "libcst": "libcst",
    "makefun": "makefun",
    "nvtx": "nvtx",
    "optree": "optree",
    "six": "six",
}
CAPABILITIES = (90,)  # of H100 and H200
PIECE_BYTES = 40 << 20
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28)  # the 2.N for which wheels are built; pip takes no range
MAX_BYTES = 60 << 20  # of each of the three folders


def main(arguments: Sequence[str] | None = None) -> int:
    """Download and pack the wheels; return 1 if a folder is larger than `MAX_BYTES`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    for package in PACKAGES:
        subprocess.run(command(package, folder), check=True)
    for package in DALI_NEEDS:
        subprocess.run(command(package, folder / "dali-2"), check=True)
    fetch_dali(folder)
    folders = [folder, *sorted(folder.glob("dali-*"))]
    for each in folders:
        print(listing(each)[0])
    return int(any(listing(each)[1] > MAX_BYTES for each in folders))


def fetch_dali(folder: Path) -> None:
    """Download DALI and write it into `folder` in pieces."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(command(DALI, Path(scratch)), check=True)
        [wheel] = Path(scratch).glob("*.whl")
        pack(wheel, folder, Path(scratch) / "unpacked")


def pack(wheel: Path, folder: Path, scratch: Path) -> None:
    """Unpack DALI into `scratch`, drop the files for other Pythons and GPUs, and write it in pieces."""
    shutil.unpack_archive(wheel, scratch, "zip")
    shutil.rmtree(scratch / "nvidia" / "dali" / "include", ignore_errors=True)
    for path in list(scratch.rglob("*.cpython-*")):
        if f"cpython-{PYTHON.replace('.', '')}-" not in path.name:
            path.unlink()
    for path in scratch.rglob("*.so*"):
        prune(path, CAPABILITIES)
        subprocess.run(["strip", "--strip-all", path], check=True)
    with tarfile.open(packed := scratch / "dali.tar", "w") as archive:
        archive.add(scratch / "nvidia", "nvidia")
    small = subprocess.run(
        ["xz", "-6", "--threads=0", "--stdout", packed], check=True, capture_output=True
    ).stdout
    for number, begin in enumerate(range(0, len(small), PIECE_BYTES), 1):
        place = folder / f"dali-{number}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"dali.xz.{number}").write_bytes(small[begin : begin + PIECE_BYTES])


def command(package: str, folder: Path) -> list[str]:
    """Return the command that downloads one wheel for that machine."""
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
    """Return the files of a folder and their sizes as text, and the total in bytes."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    total = sum(sizes.values())
    rows = [f"{size / (1 << 20):7.2f} MiB  {name}" for name, size in sizes.items()]
    in_all = f"{total / (1 << 20):7.2f} MiB in {folder}, of at most {MAX_BYTES >> 20}"
    return "\n".join([*rows, in_all]), total


if __name__ == "__main__":
    sys.exit(main())
