"""Downloads the few wheels that a machine with torch for CUDA 13 lacks for `make gpu-first`, in three folders.

    python -m bench.gpu_carried FOLDER      # here: FOLDER/1, FOLDER/2 and FOLDER/3, one for each call
    python3 -m pip install --no-index --no-deps --target SITE FOLDER/1/*.whl                 # there, before call 1
    cat FOLDER/[23]/dali.xz.* | tar xJ -C SITE; python3 -m pip install ... FOLDER/3/*.whl    # before call 3
    GPU_PYTHON=python3 PYTHONPATH=SITE make gpu-first CALL=1 OUT=found                       # then 2 and 3

DALI's wheel has 476 MiB. Only its GPU code for Hopper is kept, compressed and split in two, so that each folder is
small enough for machines that take 64 MiB at a time.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_carried.fatbin import prune

# The machine has torch, triton, transformers and pytest with their dependencies, Pillow, gRPC, protobuf, xxhash and
# prometheus-client.
PACKAGES = (
    "fa3-fwd==0.0.3",  # flash attention 3, only the forward
    "blake3",
    "cachetools",
    "redis",
    "grpcio-health-checking==1.76.0",
    "grpcio-reflection==1.76.0",
)
DALI = "nvidia-dali-cuda130==2.4.0"
DALI_NEEDS = (
    *("nvidia-nvimgcodec-cu13==0.9.0.20", "nvidia-nvjpeg==13.3.2.43"),
    *("astunparse", "gast", "libcst", "makefun", "nvtx", "optree", "six"),
)
CAPABILITIES = (90,)  # of H100 and H200
PIECE_BYTES = 40 << 20
PYTHON = "3.12"
GLIBC = (17, 24, 27, 28)  # the 2.N for which wheels are built; pip takes no range
MAX_BYTES = 58 << 20  # of each folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Download and pack the wheels; return 1 if a folder is larger than `MAX_BYTES`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    for package in PACKAGES:
        subprocess.run(command(package, folder / "1"), check=True)
    for package in DALI_NEEDS:
        subprocess.run(command(package, folder / "3"), check=True)
    fetch_dali(folder)
    too_large = False
    for each in sorted(folder.iterdir()):
        text, size_bytes = listing(each)
        print(text)
        too_large |= size_bytes > MAX_BYTES
    return int(too_large)


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
    split(small, folder)


def split(small: bytes, folder: Path) -> None:
    """Write the two pieces of DALI into folders 2 and 3. Raises `ValueError` if it needs more."""
    if len(small) > 2 * PIECE_BYTES:
        raise ValueError(f"DALI has {len(small)} bytes, more than two pieces of {PIECE_BYTES}")
    for number, begin in enumerate(range(0, len(small), PIECE_BYTES), 2):
        place = folder / str(number)
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
